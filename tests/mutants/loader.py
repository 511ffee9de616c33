"""A compact loader over the driver's seam, right as it stands.

Chunks go through a ring of pinned slots into staging memory on one stream; another
stream packs them into their target and reads them back. It has every kind of wait
that a real pipeline has, so that each can be broken: `fixtures/mutants` lists the
ways, each one changed piece of this text.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

NON_BLOCKING = 1
NO_TIMING = 2


class LoadError(Exception):
    """A driver call failed."""


def check(result: tuple[Any, ...]) -> Any:
    """The value of a call that must succeed.

    Raises:
        LoadError: It did not.
    """
    if int(result[0]) != 0:
        raise LoadError(result[0].name)
    return result[1] if len(result) > 1 else None


@dataclass
class Slot:
    """One pinned staging buffer and the event that tells when it is free."""

    address: int
    event: int


class Loader:
    """Loads bytes through a ring of slots.

    Args:
        cu: The driver.
        chunk: How many bytes one slot holds.
        slots: How many slots there are.
    """

    def __init__(self, cu: Any, chunk: int, slots: int) -> None:
        self.cu = cu
        self.chunk = chunk
        self.count = slots
        self.ring: list[Slot] = []
        self.owned: list[tuple[Any, int]] = []
        self.copies = self.packing = 0
        self.in_doubt = False

    def load(self, data: bytes) -> bytes:
        """Bring bytes to the device and back; everything is given back in any case.

        Raises:
            LoadError: A driver call failed; it is the first that did.
        """
        cu = self.cu
        check(cu.cuInit(0))
        device = check(cu.cuDeviceGet(0))
        context = check(cu.cuDevicePrimaryCtxRetain(device))
        try:
            check(cu.cuCtxSetCurrent(context))
            return self.run(data)
        finally:
            self.give_back()
            cu.cuDevicePrimaryCtxRelease(device)[0].name  # noqa: B018 - looked at, and kept quiet

    def run(self, data: bytes) -> bytes:
        """Reserve, upload, pack and read back."""
        cu, size = self.cu, len(data)
        back = self.own(cu.cuMemFreeHost, cu.cuMemHostAlloc(size, 0))
        staging = self.own(cu.cuMemFree, cu.cuMemAlloc(size))
        target = self.own(cu.cuMemFree, cu.cuMemAlloc(size))
        self.copies = self.own(cu.cuStreamDestroy, cu.cuStreamCreate(NON_BLOCKING))
        self.packing = self.own(cu.cuStreamDestroy, cu.cuStreamCreate(NON_BLOCKING))
        uploaded = self.own(cu.cuEventDestroy, cu.cuEventCreate(NO_TIMING))
        for _ in range(self.count):
            address = self.own(cu.cuMemFreeHost, cu.cuMemHostAlloc(self.chunk, 0))
            event = self.own(cu.cuEventDestroy, cu.cuEventCreate(NO_TIMING))
            self.ring.append(Slot(address, event))
        try:
            check(cu.cuMemsetD8Async(target, 0, size, self.packing))
            for index, offset in enumerate(range(0, size, self.chunk)):
                self.upload(index, offset, data, staging)
            check(cu.cuEventRecord(uploaded, self.copies))
            check(cu.cuStreamWaitEvent(self.packing, uploaded, 0))
            check(cu.cuMemcpyDtoDAsync(target, staging, size, self.packing))
            check(cu.cuMemcpyDtoHAsync(back, target, size, self.packing))
            check(cu.cuStreamSynchronize(self.packing))
            return ctypes.string_at(back, size)
        except LoadError:
            # What is still under way must end before anything is given back.
            for stream in (self.copies, self.packing):
                if cu.cuStreamSynchronize(stream)[0] != 0:
                    self.in_doubt = True
            raise

    def upload(self, index: int, offset: int, data: bytes, staging: int) -> None:
        """Send one chunk through its slot."""
        cu, slot = self.cu, self.ring[index % self.count]
        nbytes = min(self.chunk, len(data) - offset)
        check(cu.cuEventSynchronize(slot.event))
        ctypes.memmove(slot.address, data[offset : offset + nbytes], nbytes)
        check(cu.cuMemcpyHtoDAsync(staging + offset, slot.address, nbytes, self.copies))
        check(cu.cuEventRecord(slot.event, self.copies))

    def own(self, free: Any, result: tuple[Any, ...]) -> int:
        """Remember how to give something back."""
        handle = int(check(result))
        self.owned.append((free, handle))
        return handle

    def give_back(self) -> None:
        """Free everything, last first; keep all of it if the device may still use it."""
        while self.owned and not self.in_doubt:
            free, handle = self.owned.pop()
            # A failure here must not hide the first error; the driver keeps the thing.
            free(handle)[0].name  # noqa: B018 - looked at, and kept quiet
