"""State machines: a careful program is always right, one wrong move is always reported.

A machine keeps its own model of what every byte must be and of what the host may
assume, and lets Hypothesis decide both the program and the schedule. The fake must
deliver the model's bytes and report nothing; where the other machine does one thing
that the model forbids, it must report that and nothing else.
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
        self.expected: set[str] = set()

    @rule(target=devices)
    def new_device(self) -> Buffer:
        """Allocate device memory."""
        return self._make_device()

    @rule(target=hosts, value=st.integers(0, 255))
    def new_host(self, value: int) -> Buffer:
        """Allocate and fill pinned memory."""
        return self._make_host(value)

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
    def reports_are_right(self) -> None:
        """Nothing is reported but what was done wrong on purpose."""
        assert {hazard.id for hazard in self.cu.hazards} <= self.expected

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
        self.cu.close(check=False)
        self.reports_are_right()

    def _make_device(self) -> Buffer:
        buffer = Buffer(ok(self.cu.cuMemAlloc(_BYTES)), None)
        self.buffers.append(buffer)
        return buffer

    def _make_host(self, value: int) -> Buffer:
        buffer = Buffer(ok(self.cu.cuMemHostAlloc(_BYTES, 0)), None)
        self.buffers.append(buffer)
        self._fill(buffer, value)
        return buffer

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


class CarelessProgram(CarefulProgram):
    """The same, with one wrong move somewhere, which must be reported in every schedule."""

    @rule(
        which=st.tuples(st.integers(0, 3), st.integers(0, 3)),
        stream=st.sampled_from((0, 1)),
        at=st.integers(0, _BYTES - 1),
        to_device=st.booleans(),
    )
    def write_too_early(
        self, which: tuple[int, int], stream: int, at: int, *, to_device: bool
    ) -> None:
        """The host writes a byte of a buffer under a copy."""
        host, device = self._some(which)
        if not self._may_err(stream, host, device, reads_device=not to_device):
            return
        if to_device:
            self.upload(source=host, destination=device, stream=stream)
        else:
            self.download(source=device, destination=host, stream=stream)
        block = self.cu._memory.find(host.address)
        assert block is not None
        if len(self.cu._engine.touching(block)) > 1:
            # Under several copies at once, a change may be the doing of any of them.
            return
        ctypes.c_uint8.from_address(host.address + at).value ^= 1
        self._caught("PIN-REUSE-BEFORE-COPY" if to_device else "WRITE-BEFORE-DONE")

    @rule(stream=st.sampled_from((0, 1)), frees_host=st.booleans())
    def free_too_early(self, stream: int, *, frees_host: bool) -> None:
        """One end of a copy is freed before it is known to be done."""
        host, device = self._make_host(1), self._make_device()
        if self._may_err(stream, host, device):
            self.upload(source=host, destination=device, stream=stream)
            gone, free = (host, "cuMemFreeHost") if frees_host else (device, "cuMemFree")
            ok(getattr(self.cu, free)(gone.address))
            self.buffers.remove(gone)
            self._caught("FREE-WHILE-PENDING")

    @rule(which=st.tuples(st.integers(0, 3), st.integers(0, 3)), stream=st.sampled_from((0, 1)))
    def clear_on_the_wrong_stream(self, which: tuple[int, int], stream: int) -> None:
        """A fill is not ordered after the other stream's work on its target."""
        host, device = self._some(which)
        if self._may_err(stream, host, device):
            self.upload(source=host, destination=device, stream=stream)
            other = self.streams[1 - stream]
            ok(self.cu.cuMemsetD8Async(device.address, 0, _BYTES, other))
            self._caught("WRITE-BEFORE-DONE")

    def _some(self, which: tuple[int, int]) -> tuple[Buffer, Buffer]:
        """A host and a device buffer: old ones if there are so many, else new ones."""
        on_device = [buffer for buffer in self.buffers if buffer.address >> 48]
        on_host = [buffer for buffer in self.buffers if not buffer.address >> 48]
        host = on_host[which[0]] if which[0] < len(on_host) else self._make_host(1)
        device = on_device[which[1]] if which[1] < len(on_device) else self._make_device()
        return host, device

    def _may_err(
        self, stream: int, host: Buffer, device: Buffer, *, reads_device: bool = False
    ) -> bool:
        """Whether the move before the wrong one is right, and nothing was wrong yet."""
        readable = device.data is not None or not reads_device
        return readable and not self.expected and self._may_touch(stream, host, device)

    def _caught(self, hazard: str) -> None:
        """The wrong move is reported, now or when everything has been awaited."""
        self.expected = {hazard}
        self.await_all()
        assert {found.id for found in self.cu.hazards} == self.expected
        # Whose bytes are right after a race is nobody's business.
        for buffer in self.buffers:
            buffer.data = None


CarefulProgram.TestCase.settings = settings(max_examples=100, stateful_step_count=25)
CarelessProgram.TestCase.settings = settings(max_examples=100, stateful_step_count=25)
TestCarefulProgram = CarefulProgram.TestCase
TestCarelessProgram = CarelessProgram.TestCase
