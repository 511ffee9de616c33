"""The ring's memory: pinned once, by the cheapest means that this device takes.

On a discrete GPU memory that was filled beforehand is registered; an integrated one
gets it from the driver, since reports disagree on whether it can register at
all. When a pin is refused, smaller ones are tried down to 8 MiB, and then pageable
memory is taken: a slow load that says so is better than none.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal

from weightload.cleanup import abandon
from weightload.device.driver import HOST_ALLOC_PORTABLE
from weightload.errors import DriverError
from weightload.plan import round_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightload.device.driver import Driver
    from weightload.host.staging import Staging

# Below this the copies are too small to reach the link's rate.
_RING_BYTES_FLOOR = 8 << 20
# How drivers have been seen to refuse a pin: invalid value (kernels 6.11 to 6.13), out of
# memory (WSL2), operating-system call failed, already registered (said of a GB10),
# not supported, not permitted.
_PIN_REFUSALS = (1, 2, 304, 712, 800, 801)

PinKind = Literal["registered", "allocated", "pageable"]


@dataclass
class RingMemory:
    """Memory for all slots.

    Attributes:
        address: of the first slot; aligned as asked.
        slot_count: slots that fit.
        kind: how it was pinned, or that it was not.
        pinned_bytes: bytes that the driver pinned.
        free: gives the memory back.
        mapping: what holds the memory, where that is not the driver.
        refusals: what was asked for and refused, in words.
    """

    address: int
    slot_count: int
    kind: PinKind
    pinned_bytes: int
    free: Callable[[], object]
    mapping: object = None
    refusals: list[str] = field(default_factory=list)

    def abandon(self) -> None:
        """Leave the memory as it is until the process ends: the device may still read it."""
        abandon(self.mapping)


def reserve(
    driver: Driver, staging: Staging | None, slot_count: int, slot_bytes: int, alignment: int
) -> RingMemory:
    """Reserve the ring's memory, once.

    Args:
        driver: the seam.
        staging: memory to register; None asks the driver to allocate.
        slot_count: slots wanted; fewer come when a pin of that size is refused.
        slot_bytes: capacity of one slot.
        alignment: of the first slot's address, in bytes.

    Raises:
        DriverError: the driver failed in a way that a smaller pin cannot cure.
    """
    refusals: list[str] = []
    if staging is not None:
        try:
            staging.wait()
            driver.call("cuMemHostRegister", staging.address, staging.nbytes, HOST_ALLOC_PORTABLE)
        except DriverError as error:
            staging.close()
            _note_refusal(error, f"registering {staging.nbytes} bytes", refusals)
        else:
            return _registered(driver, staging, slot_count)
    while True:
        wanted = slot_count * slot_bytes + alignment
        try:
            base = int(driver.call("cuMemHostAlloc", wanted, HOST_ALLOC_PORTABLE))
        except DriverError as error:
            _note_refusal(error, f"pinning {wanted} bytes", refusals)
        else:
            free = partial(driver.call, "cuMemFreeHost", base)
            address = round_up(base, alignment)
            return RingMemory(address, slot_count, "allocated", wanted, free, refusals=refusals)
        if slot_count == 1 or wanted // 2 < _RING_BYTES_FLOOR:
            return _pageable(slot_count, slot_bytes, refusals)
        slot_count //= 2


def _note_refusal(error: DriverError, what: str, refusals: list[str]) -> None:
    if error.code not in _PIN_REFUSALS:
        raise error
    refusals.append(f"{what} was refused ({error.name})")


def _registered(driver: Driver, staging: Staging, slot_count: int) -> RingMemory:
    def free() -> None:
        try:
            driver.call("cuMemHostUnregister", staging.address)
        except DriverError:
            memory.abandon()
            raise
        staging.close()

    memory = RingMemory(
        staging.address, slot_count, "registered", staging.nbytes, free, mapping=staging
    )
    return memory


def _pageable(slot_count: int, slot_bytes: int, refusals: list[str]) -> RingMemory:
    mapping = mmap.mmap(-1, slot_count * slot_bytes)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    return RingMemory(
        address, slot_count, "pageable", 0, mapping.close, mapping=mapping, refusals=refusals
    )
