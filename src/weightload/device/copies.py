"""Host-to-device copies of one load, all on one stream."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from weightload.device.packing import lay_out, runs
from weightload.errors import DriverError
from weightload.plan import DEVICE_ALIGNMENT_BYTES, round_up

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightload.device.driver import Driver
    from weightload.device.slots import Slot
    from weightload.plan import Span


class Copies:
    """The stream, and what is known of the copies on it.

    Attributes:
        call: the driver's seam.
        stream: a stream of our own, which torch's streams do not wait for.
        spaced: whether tensors stand 256 bytes apart, with nothing of anybody's between.
        unfinished: the stream's end could not be awaited, so that a copy may still run and
            neither end of it may be freed.
    """

    def __init__(self, driver: Driver, stream: int, *, pinned: bool, spaced: bool) -> None:
        """Copy on `stream`; copies from memory that is not pinned may block."""
        self.call = driver.call
        name = "cuMemcpyHtoDAsync"
        self._copy = driver.quick(name) if pinned else partial(driver.call, name)
        self.stream = stream
        self.spaced = spaced
        self.unfinished = False

    def queue(self, span: Span, source: int, addresses: Sequence[int]) -> int:
        """Queue a span's copies, one for each slice.

        Args:
            span: what to copy.
            source: host address of the span's first byte.
            addresses: device address of each tensor's first byte.

        Returns:
            The number of copies.

        Raises:
            DriverError: a copy could not be queued.
        """
        for piece in span.slices:
            target = addresses[piece.tensor] + piece.tensor_offset
            self._copy(target, source + piece.slot_offset, piece.nbytes, self.stream)
        return len(span.slices)

    def queue_from_slot(self, span: Span, slot: Slot, addresses: Sequence[int]) -> int:
        """Queue a span's copies from a slot, with runs of small slices as one copy.

        Runs are laid out behind the span's bytes. When that room is used up, the copies
        out of it are awaited before it is written again.

        Args:
            span: what to copy; it lies at the start of the slot.
            slot: the slot, filled.
            addresses: device address of each tensor's first byte.

        Returns:
            The number of copies.

        Raises:
            DriverError: a copy could not be queued or awaited.
        """
        if len(span.slices) == 1:
            return self.queue(span, slot.address, addresses)
        first = round_up(span.wanted_end, DEVICE_ALIGNMENT_BYTES)
        room = len(slot.bytes_view) - first
        position, count = first, 0
        for run in runs(span.slices, addresses, room, spaced=self.spaced):
            count += 1
            if len(run.slices) == 1:
                piece = run.slices[0]
                source = slot.address + piece.slot_offset
                self._copy(run.address, source, piece.nbytes, self.stream)
                continue
            if position + run.nbytes > len(slot.bytes_view):
                self.call("cuEventRecord", slot.event, self.stream)
                self.call("cuEventSynchronize", slot.event)
                position = first
            lay_out(run, addresses, slot.bytes_view, position)
            self._copy(run.address, slot.address + position, run.nbytes, self.stream)
            position = round_up(position + run.nbytes, DEVICE_ALIGNMENT_BYTES)
        return count

    def finish(self) -> None:
        """Wait for every copy on the stream.

        Raises:
            DriverError: they cannot be awaited; `unfinished` says so from now on.
        """
        try:
            self.call("cuStreamSynchronize", self.stream)
        except DriverError:
            self.unfinished = True
            raise
