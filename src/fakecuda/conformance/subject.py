"""A driver under test, with what rows need to talk to it.

The race window is opened in one way for all: `held(stream)`. On the fake that is its
own `hold`; on a GPU the stream waits for a value in pinned memory that the host has
not written yet, so no kernel is needed.
"""

import contextlib
import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from fakecuda.choices import AsSeen
from fakecuda.fake import FakeCuda
from fakecuda.profile import load_profile

NON_BLOCKING = 1
NO_TIMING = 2
# Long enough for a call that does not wait to return, on a busy machine too.
_RETURNS_WITHIN_S = 0.5
_JOIN_S = 20.0


class Subject(ABC):
    """One driver, fake or real, for the time of one row.

    Attributes:
        cu: The driver, in the shape of `cuda.bindings.driver`.
    """

    def __init__(self, cu: Any) -> None:
        self.cu = cu
        self._undo: list[Callable[[], Any]] = []

    @abstractmethod
    def hold(self, stream: int) -> Callable[[], None]:
        """Keep a stream's later work from running; the result lets it go."""

    def start(self) -> None:
        """Start the driver and make the primary context of device 0 current."""
        self.ok(self.cu.cuInit(0))
        self.device_handle = int(self.ok(self.cu.cuDeviceGet(0)))
        self.context = int(self.ok(self.cu.cuDevicePrimaryCtxRetain(self.device_handle)))
        self.ok(self.cu.cuCtxSetCurrent(self.context))

    def end(self) -> None:
        """Give back everything that the row asked for."""
        self.cu.cuCtxSetCurrent(self.context)
        self.ok(self.cu.cuCtxSynchronize())
        while self._undo:
            self._undo.pop()()

    def afterwards(self, undo: Callable[[], Any]) -> None:
        """Do this when the row has ended."""
        self._undo.append(undo)

    @staticmethod
    def code(result: tuple[Any, ...]) -> str:
        """The result code's short name."""
        name: str = result[0].name
        return name.removeprefix("CUDA_").removeprefix("ERROR_")

    def ok(self, result: tuple[Any, ...]) -> Any:
        """The values of a call that must succeed.

        Raises:
            AssertionError: It did not.
        """
        if self.code(result) != "SUCCESS":
            raise AssertionError(f"a call of the row's set-up answered {self.code(result)}")
        values = result[1:]
        return values[0] if len(values) == 1 else values

    def stream(self, flags: int = NON_BLOCKING) -> int:
        """A new stream."""
        handle = int(self.ok(self.cu.cuStreamCreate(flags)))
        self._undo.append(lambda: self.cu.cuStreamDestroy(handle))
        return handle

    def event(self, flags: int = NO_TIMING) -> int:
        """A new event."""
        handle = int(self.ok(self.cu.cuEventCreate(flags)))
        self._undo.append(lambda: self.cu.cuEventDestroy(handle))
        return handle

    def device(self, nbytes: int) -> int:
        """Device memory filled with zeros."""
        address = int(self.ok(self.cu.cuMemAlloc(nbytes)))
        self._undo.append(lambda: self.cu.cuMemFree(address))
        self.ok(self.cu.cuMemsetD8(address, 0, nbytes))
        self.ok(self.cu.cuCtxSynchronize())
        return address

    def pinned(self, nbytes: int, fill: int = 0) -> int:
        """Pinned memory filled with one byte."""
        address = int(self.ok(self.cu.cuMemHostAlloc(nbytes, 0)))
        self._undo.append(lambda: self.cu.cuMemFreeHost(address))
        ctypes.memset(address, fill, nbytes)
        return address

    def pageable(self, nbytes: int, fill: int = 0) -> int:
        """Ordinary host memory filled with one byte."""
        buffer = ctypes.create_string_buffer(nbytes)
        self._undo.append(lambda: buffer)
        address = ctypes.addressof(buffer)
        ctypes.memset(address, fill, nbytes)
        return address

    def first_byte(self, device_address: int, nbytes: int) -> int:
        """The byte that all of a device range holds.

        Raises:
            AssertionError: It holds more than one.
        """
        target = self.pinned(nbytes)
        self.ok(self.cu.cuMemcpyDtoH(target, device_address, nbytes))
        data = ctypes.string_at(target, nbytes)
        if data.count(data[:1]) != nbytes:
            raise AssertionError("the range holds more than one value")
        return data[0]

    @contextlib.contextmanager
    def held(self, stream: int) -> Iterator[Callable[[], None]]:
        """Hold a stream; the value that is yielded lets it go early."""
        release = self.hold(stream)
        try:
            yield release
        finally:
            release()

    def waits(self, stream: int, call: Callable[[], tuple[Any, ...]]) -> str:
        """Whether a call returns while a stream is held: `returns` or `blocks`.

        Raises:
            AssertionError: The call failed, or never came back.
        """
        results: list[tuple[Any, ...]] = []

        def body() -> None:
            self.cu.cuCtxSetCurrent(self.context)
            results.append(call())

        with self.held(stream):
            thread = threading.Thread(target=body, daemon=True)
            thread.start()
            thread.join(_RETURNS_WITHIN_S)
            outcome = "blocks" if thread.is_alive() else "returns"
        thread.join(_JOIN_S)
        if thread.is_alive():
            raise AssertionError("the call never came back after the stream was let go")
        self.ok(results[0])
        return outcome

    def on_new_thread(self, call: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Make a call on a thread that has never had a context."""
        results: list[tuple[Any, ...]] = []
        thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
        thread.start()
        thread.join(_JOIN_S)
        return results[0]


class FakeSubject(Subject):
    """The fake, deciding every "may" as one device was seen to decide it.

    Args:
        profile: Which device.
    """

    cu: FakeCuda

    def __init__(self, profile: str) -> None:
        facts = load_profile(profile)
        super().__init__(FakeCuda(facts, choices=AsSeen(facts.seen)))

    def hold(self, stream: int) -> Callable[[], None]:
        """Hold by the fake's own means."""
        self.cu.hold(stream)
        released: list[bool] = []

        def release() -> None:
            if not released:
                released.append(True)
                self.cu.release(stream)

        return release


class RealSubject(Subject):
    """A real driver.

    Args:
        cu: `cuda.bindings.driver`.
    """

    def hold(self, stream: int) -> Callable[[], None]:
        """Let the stream wait for a pinned word to become 1."""
        flag = self.pinned(4)
        word = ctypes.c_uint32.from_address(flag)
        address = int(self.ok(self.cu.cuMemHostGetDevicePointer(flag, 0)))
        self.ok(self.cu.cuStreamWaitValue32(stream, address, 1, 0))

        def release() -> None:
            word.value = 1

        return release
