"""The ring: slots reserved once, and the rule for when one may be written again.

Pinning costs time, so the ring is small, is reserved before the weights take their
memory (some kernels fail pins under device-memory pressure), and never grows. A slot
may be written again only when its own event says that the copies out of it have run:
to settle. A copy, event or wait that fails proves nothing about its own slot, because
a driver call may return an earlier call's error; such a slot is quarantined, neither
rewritten nor freed.

The queues of slots are deques, whose ends may be used from several threads without a
lock: readers that queue for a lock, or for Python's own, leave the link idle.

Considered and left: one allocation per slot (small pinned allocations are not
page-aligned, and each costs a driver round trip), and events that put a waiting
thread to sleep (CU_EVENT_BLOCKING_SYNC raises an interrupt for every slot: 8.4 GB
streamed in 0.21 s instead of 0.17 s on an H200).
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weightload.cleanup import Cleanup
from weightload.device.driver import EVENT_DISABLE_TIMING
from weightload.errors import DriverError, RingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from weightload.device.driver import Driver
    from weightload.device.pinned import RingMemory


@dataclass(eq=False)
class Slot:
    """One staging buffer.

    Attributes:
        address: host address of its first byte.
        bytes_view: the same bytes, writable.
        event: the slot's own event, recorded after its copies.
    """

    address: int
    bytes_view: memoryview
    event: int


class Ring:
    """All slots. Safe to use from several threads.

    Attributes:
        memory: where the slots lie.
        slots: all of them, whatever their state.
        quarantined: slots set aside for good.
    """

    def __init__(self, driver: Driver, memory: RingMemory, slot_bytes: int) -> None:
        """Cut the memory into slots, each with an event of its own.

        Raises:
            DriverError: an event could not be made; the memory was given back.
        """
        self._driver = driver
        self._record = driver.quick("cuEventRecord")
        self.memory = memory
        self.slot_bytes = slot_bytes
        self.quarantined: list[Slot] = []
        self._changed = threading.Condition()
        self._closed = False
        self._waiting = 0
        self._in_flight: deque[Slot] = deque()
        self.slots: list[Slot] = []
        try:
            self._make_slots()
        except BaseException:
            with suppress(DriverError):
                self.close()
            raise
        self._free = deque(self.slots)

    def _make_slots(self) -> None:
        for number in range(self.memory.slot_count):
            address = self.memory.address + number * self.slot_bytes
            buffer = (ctypes.c_ubyte * self.slot_bytes).from_address(address)
            event = int(self._driver.call("cuEventCreate", EVENT_DISABLE_TIMING))
            self.slots.append(Slot(address, memoryview(buffer).cast("B"), event))

    def take(self, let_go: Callable[[], None] | None = None) -> Slot:
        """A slot that may be written; settles the oldest one in flight when none is free.

        Args:
            let_go: hands in the slot that the caller still keeps, if any; called before this
                waits for others to hand in theirs.

        Raises:
            RingError: every slot is quarantined.
            DriverError: the wait failed; its slot is quarantined.
        """
        while True:
            try:
                return self._free.popleft()
            except IndexError:
                pass
            try:
                slot = self._in_flight.popleft()
            except IndexError:
                if let_go is not None:
                    let_go()
                self._wait()
                continue
            self._settle(slot)
            return slot

    def _wait(self) -> None:
        """Wait until some other thread has put a slot somewhere."""
        with self._changed:
            self._waiting += 1
            try:
                if self._free or self._in_flight:
                    return
                if len(self.quarantined) == len(self.slots):
                    raise RingError(
                        "every slot of the ring is quarantined; the load cannot go on."
                    )
                self._changed.wait()
            finally:
                self._waiting -= 1

    def _put(self, place: deque[Slot] | list[Slot], slot: Slot) -> None:
        """Put a slot where it belongs; the lock is taken only when somebody waits for one."""
        place.append(slot)
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    def _settle(self, slot: Slot) -> None:
        try:
            self._driver.await_event(slot.event)
        except DriverError:
            self.quarantine(slot)
            raise

    def submit(self, slot: Slot, stream: int) -> None:
        """Mark a slot's copies as queued on `stream`.

        Raises:
            DriverError: the event could not be recorded; the slot is quarantined.
        """
        try:
            self._record(slot.event, stream)
        except DriverError:
            self.quarantine(slot)
            raise
        self._put(self._in_flight, slot)

    def give_back(self, slot: Slot) -> None:
        """Return a slot from which nothing was copied."""
        self._put(self._free, slot)

    def quarantine(self, slot: Slot) -> None:
        """Set a slot aside for good: something about its copies failed."""
        self._put(self.quarantined, slot)

    def settle_all(self) -> None:
        """Wait for every slot in flight.

        Raises:
            DriverError: the first wait that failed; the others were still waited for.
        """
        first: DriverError | None = None
        while self._in_flight:
            slot = self._in_flight.popleft()
            try:
                self._settle(slot)
            except DriverError as error:
                first = first or error
            else:
                self.give_back(slot)
        if first:
            raise first

    def close(self) -> None:
        """Destroy the events and free the memory; a second call does nothing.

        With a slot in quarantine the memory stays reserved on purpose, since the device
        may still read it.

        Raises:
            DriverError: the first failure; the rest was still tried, and is noted on it.
        """
        if self._closed:
            return
        self._closed = True
        with Cleanup() as closing:
            # Undone in reverse: settle what is in flight, destroy the events, free the memory.
            closing.undo(self._free_memory)
            for slot in self.slots:
                closing.undo(self._destroy_event, slot)
            closing.undo(self.settle_all)

    def _destroy_event(self, slot: Slot) -> None:
        if slot not in self.quarantined:
            self._driver.call("cuEventDestroy", slot.event)

    def _free_memory(self) -> None:
        if self.quarantined:
            self.memory.abandon()
        else:
            self.memory.free()
