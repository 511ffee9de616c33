"""A state machine: whatever a careful program does, in whatever schedule, is right.

The machine keeps its own model of what every byte must be and of what the host may
assume, makes only moves that are allowed by it, and lets Hypothesis decide both the
program and the schedule. The fake must deliver the model's bytes and report nothing.
"""

import ctypes
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

from fakecuda import Drawn, FakeCuda
from tests.fakecuda.programs import ok

_BYTES = 160


@dataclass(eq=False)
class Buffer:
    """A buffer and the streams that have touched it since the host last knew."""

    address: int
    data: bytes | None
    busy: set[int] = field(default_factory=set)


class CarefulProgram(RuleBasedStateMachine):
    """Moves a program may make with two streams and any number of buffers."""

    devices = Bundle("devices")
    hosts = Bundle("hosts")

    @initialize(data=st.data(), flags=st.tuples(st.sampled_from((0, 1)), st.just(1)))
    def start(self, data: st.DataObject, flags: tuple[int, int]) -> None:
        """Make a driver whose schedule Hypothesis draws."""
        self.cu = FakeCuda(choices=Drawn(lambda most: data.draw(st.integers(0, most))))
        ok(self.cu.cuInit(0))
        ok(self.cu.cuCtxSetCurrent(ok(self.cu.cuDevicePrimaryCtxRetain(0))))
        self.streams = [ok(self.cu.cuStreamCreate(flag)) for flag in flags]
        self.buffers: list[Buffer] = []

    @rule(target=devices)
    def new_device(self) -> Buffer:
        """Allocate device memory."""
        buffer = Buffer(ok(self.cu.cuMemAlloc(_BYTES)), None)
        self.buffers.append(buffer)
        return buffer

    @rule(target=hosts, value=st.integers(0, 255))
    def new_host(self, value: int) -> Buffer:
        """Allocate and fill pinned memory."""
        buffer = Buffer(ok(self.cu.cuMemHostAlloc(_BYTES, 0)), None)
        self.buffers.append(buffer)
        self._fill(buffer, value)
        return buffer

    @rule(buffer=hosts, value=st.integers(0, 255))
    def refill(self, buffer: Buffer, value: int) -> None:
        """The host writes a buffer that no work touches any more."""
        if not buffer.busy:
            self._fill(buffer, value)

    @rule(source=hosts, destination=devices, stream=st.sampled_from((0, 1)))
    def upload(self, source: Buffer, destination: Buffer, stream: int) -> None:
        """Copy to the device, if the stream is ordered after all that touched the two."""
        if self._may_touch(stream, source, destination):
            call = self.cu.cuMemcpyHtoDAsync
            ok(call(destination.address, source.address, _BYTES, self.streams[stream]))
            self._copied(source, destination, stream)

    @rule(source=devices, destination=hosts, stream=st.sampled_from((0, 1)))
    def download(self, source: Buffer, destination: Buffer, stream: int) -> None:
        """Copy to the host."""
        if source.data is not None and self._may_touch(stream, source, destination):
            call = self.cu.cuMemcpyDtoHAsync
            ok(call(destination.address, source.address, _BYTES, self.streams[stream]))
            self._copied(source, destination, stream)

    @rule(source=devices, destination=devices, stream=st.sampled_from((0, 1)))
    def pack(self, source: Buffer, destination: Buffer, stream: int) -> None:
        """Copy on the device, to another place."""
        if source is destination or source.data is None:
            return
        if self._may_touch(stream, source, destination):
            call = self.cu.cuMemcpyDtoDAsync
            ok(call(destination.address, source.address, _BYTES, self.streams[stream]))
            self._copied(source, destination, stream)

    @rule(destination=devices, value=st.integers(0, 255), stream=st.sampled_from((0, 1)))
    def clear(self, destination: Buffer, value: int, stream: int) -> None:
        """Fill device memory."""
        if self._may_touch(stream, destination):
            ok(self.cu.cuMemsetD8Async(destination.address, value, _BYTES, self.streams[stream]))
            destination.data = bytes([value]) * _BYTES
            destination.busy.add(stream)

    @rule(stream=st.sampled_from((0, 1)))
    def order_streams(self, stream: int) -> None:
        """Let one stream wait for all that the other has been given so far."""
        event = ok(self.cu.cuEventCreate(2))
        ok(self.cu.cuEventRecord(event, self.streams[1 - stream]))
        ok(self.cu.cuStreamWaitEvent(self.streams[stream], event, 0))
        ok(self.cu.cuEventDestroy(event))
        # Whoever comes later in this stream comes after both.
        for buffer in self.buffers:
            if 1 - stream in buffer.busy:
                buffer.busy = {stream}

    @rule()
    def await_all(self) -> None:
        """Wait for everything."""
        ok(self.cu.cuCtxSynchronize())
        for buffer in self.buffers:
            buffer.busy.clear()

    @rule(stream=st.sampled_from((0, 1)))
    def poll(self, stream: int) -> None:
        """Ask a stream; its answer changes what the host knows only if it is yes."""
        if int(self.cu.cuStreamQuery(self.streams[stream])[0]) == 0:
            for buffer in self.buffers:
                if buffer.busy == {stream}:
                    buffer.busy.clear()

    @rule(buffer=consumes(devices))
    def free_device(self, buffer: Buffer) -> None:
        """Free device memory once nothing touches it."""
        self._free(buffer, self.cu.cuMemFree)

    @rule(buffer=consumes(hosts))
    def free_host(self, buffer: Buffer) -> None:
        """Free pinned memory once nothing touches it."""
        self._free(buffer, self.cu.cuMemFreeHost)

    @precondition(lambda self: hasattr(self, "cu"))
    @invariant()
    def nothing_is_reported(self) -> None:
        """A careful program breaks no rule."""
        assert self.cu.hazards == ()

    def teardown(self) -> None:
        """Wait, compare every buffer with the model, and give everything back."""
        if not hasattr(self, "cu"):
            return
        self.await_all()
        back = ok(self.cu.cuMemHostAlloc(_BYTES, 0))
        for buffer in list(self.buffers):
            on_device = buffer.address >> 48 != 0
            if buffer.data is not None:
                address = buffer.address
                if on_device:
                    ok(self.cu.cuMemcpyDtoH(back, buffer.address, _BYTES))
                    address = back
                assert ctypes.string_at(address, _BYTES) == buffer.data
            self._free(buffer, self.cu.cuMemFree if on_device else self.cu.cuMemFreeHost)
        ok(self.cu.cuMemFreeHost(back))
        for stream in self.streams:
            ok(self.cu.cuStreamDestroy(stream))
        ok(self.cu.cuDevicePrimaryCtxRelease(0))
        self.cu.close()

    def _fill(self, buffer: Buffer, value: int) -> None:
        ctypes.memset(buffer.address, value, _BYTES)
        buffer.data = bytes([value]) * _BYTES

    def _may_touch(self, stream: int, *buffers: Buffer) -> bool:
        return all(buffer.busy <= {stream} for buffer in buffers)

    def _copied(self, source: Buffer, destination: Buffer, stream: int) -> None:
        destination.data = source.data
        source.busy.add(stream)
        destination.busy.add(stream)

    def _free(self, buffer: Buffer, free: object) -> None:
        if buffer.busy:
            self.await_all()
        ok(free(buffer.address))  # type: ignore[operator]
        self.buffers.remove(buffer)


CarefulProgram.TestCase.settings = settings(max_examples=200, stateful_step_count=25)
TestCarefulProgram = CarefulProgram.TestCase
