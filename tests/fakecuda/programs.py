"""Small programs against a driver, shared by the tests of the fake."""

import ctypes
from dataclasses import dataclass, field
from typing import Any


def ok(result: tuple[Any, ...]) -> Any:
    """The value of a call that must succeed."""
    assert int(result[0]) == 0, result[0].name
    return result[1] if len(result) == 2 else result[1:]


@dataclass
class Setup:
    """A started driver and what a test has asked of it."""

    cu: Any
    undo: list[tuple[Any, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        ok(self.cu.cuInit(0))
        self.context = ok(self.cu.cuDevicePrimaryCtxRetain(0))
        ok(self.cu.cuCtxSetCurrent(self.context))

    def device(self, nbytes: int) -> int:
        """Device memory."""
        return self._own(self.cu.cuMemFree, self.cu.cuMemAlloc(nbytes))

    def pinned(self, nbytes: int, flags: int = 0) -> int:
        """Pinned memory."""
        return self._own(self.cu.cuMemFreeHost, self.cu.cuMemHostAlloc(nbytes, flags))

    def filled(self, nbytes: int, value: int = 0x5A) -> int:
        """Pinned memory that the host has written."""
        address = self.pinned(nbytes)
        ctypes.memset(address, value, nbytes)
        return address

    def stream(self, flags: int = 1) -> int:
        """A stream, non-blocking if not said otherwise."""
        return self._own(self.cu.cuStreamDestroy, self.cu.cuStreamCreate(flags))

    def event(self, flags: int = 2) -> int:
        """An event, without timing if not said otherwise."""
        return self._own(self.cu.cuEventDestroy, self.cu.cuEventCreate(flags))

    def give_back(self) -> None:
        """Free everything, last first."""
        while self.undo:
            free, handle = self.undo.pop()
            ok(free(handle))
        ok(self.cu.cuDevicePrimaryCtxRelease(0))

    def read(self, address: int, nbytes: int) -> bytes:
        """Device bytes, by a synchronous copy."""
        target = self.pinned(nbytes)
        ok(self.cu.cuMemcpyDtoH(target, address, nbytes))
        return ctypes.string_at(target, nbytes)

    def _own(self, free: Any, result: tuple[Any, ...]) -> int:
        handle = int(ok(result))
        self.undo.append((free, handle))
        return handle


def ring_load(cu: Any, data: bytes, *, chunk: int, slots: int, settle: bool = True) -> bytes:
    """Load bytes through a ring of pinned slots and read them back.

    Args:
        cu: The driver.
        data: What to load.
        chunk: The size of a slot.
        slots: How many there are.
        settle: Whether a slot's copy is awaited before the slot is used again.
    """
    setup = Setup(cu)
    ring = [(setup.pinned(chunk), setup.event()) for _ in range(slots)]
    target, stream = setup.device(len(data)), setup.stream()
    for index, offset in enumerate(range(0, len(data), chunk)):
        address, event = ring[index % slots]
        part = data[offset : offset + chunk]
        if settle:
            ok(cu.cuEventSynchronize(event))
        ctypes.memmove(address, part, len(part))
        ok(cu.cuMemcpyHtoDAsync(target + offset, address, len(part), stream))
        ok(cu.cuEventRecord(event, stream))
    ok(cu.cuStreamSynchronize(stream))
    loaded = setup.read(target, len(data))
    setup.give_back()
    return loaded


def pattern(nbytes: int) -> bytes:
    """Bytes in which a shifted, stale or zeroed one shows."""
    return bytes((7 * i + 3) % 251 for i in range(nbytes))
