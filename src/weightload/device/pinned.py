"""The ring's memory: pinned once, by the cheapest means that this device takes.

On an integrated device the driver allocates it, before the weights take theirs: some
kernels fail pins under device-memory pressure, and reports disagree on whether a GB10
can register memory at all. On a discrete one memory is filled in the background while
the weights are allocated, and then registered. When a pin is refused, smaller ones are
tried down to 8 MiB, and then pageable memory is taken: a slow load that says so is
better than none.
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
from weightload.host.staging import Staging
from weightload.plan import round_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightload.device.driver import Driver
    from weightload.device.profile import Device
    from weightload.host.system import System

# Of the first slot, which suits direct reads of every common device. The driver's own
# pinned memory is not even page-aligned (512 bytes past a page were seen on an H200).
RING_ALIGNMENT_BYTES = 64 << 10
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


class Reservation:
    """The pin of one ring, begun before the weights are allocated and finished after."""

    def __init__(
        self,
        device: Device,
        system: System,
        slot_count: int,
        slot_bytes: int,
        *,
        pinned: bool = True,
    ) -> None:
        """Begin: allocate pinned memory, or start to fill memory that will be registered.

        Args:
            device: the opened device.
            system: the operating system's seam.
            slot_count: slots wanted; fewer come when a pin of that size is refused.
            slot_bytes: capacity of one slot.
            pinned: False takes pageable memory at once.

        Raises:
            DriverError: the driver failed in a way that a smaller pin cannot cure.
        """
        self._driver = device.driver
        self._slot_count = slot_count
        self._slot_bytes = slot_bytes
        self._refusals: list[str] = []
        self._memory: RingMemory | None = None
        self._staging: Staging | None = None
        if not pinned:
            self._memory = _pageable(slot_count, slot_bytes, [])
        elif device.profile.integrated or not device.profile.host_register:
            self._memory = self._allocate()
        else:
            self._staging = Staging(system, slot_count * slot_bytes)

    def finish(self) -> RingMemory:
        """The memory, now pinned; it is the caller's to free.

        Raises:
            DriverError: as when the reservation began.
        """
        memory, self._memory = self._memory or self._register() or self._allocate(), None
        return memory

    def cancel(self) -> None:
        """Give back what was begun and not finished."""
        if self._memory is not None:
            self._memory.free()
        if self._staging is not None:
            self._staging.close()

    def _register(self) -> RingMemory | None:
        staging = self._staging
        if staging is None:
            return None
        staging.wait()
        try:
            self._driver.call(
                "cuMemHostRegister", staging.address, staging.nbytes, HOST_ALLOC_PORTABLE
            )
        except DriverError as error:
            self._refuse(error, f"registering {staging.nbytes} bytes")
            staging.close()
            return None
        self._staging = None
        return _registered(self._driver, staging, self._slot_count)

    def _allocate(self) -> RingMemory:
        slots = self._slot_count
        while True:
            wanted = slots * self._slot_bytes + RING_ALIGNMENT_BYTES
            try:
                base = int(self._driver.call("cuMemHostAlloc", wanted, HOST_ALLOC_PORTABLE))
            except DriverError as error:
                self._refuse(error, f"pinning {wanted} bytes")
            else:
                free = partial(self._driver.call, "cuMemFreeHost", base)
                address = round_up(base, RING_ALIGNMENT_BYTES)
                return RingMemory(
                    address, slots, "allocated", wanted, free, refusals=self._refusals
                )
            if slots == 1 or wanted // 2 < _RING_BYTES_FLOOR:
                return _pageable(slots, self._slot_bytes, self._refusals)
            slots //= 2

    def _refuse(self, error: DriverError, what: str) -> None:
        if error.code not in _PIN_REFUSALS:
            raise error
        self._refusals.append(f"{what} was refused ({error.name})")


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
