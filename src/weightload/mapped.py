"""Bytes that are copied straight from a mapping of the file, without a slot.

Three routes share this: `touch` reads one byte of every page first, `readonly-map`
lets a device that walks the host's page tables do the work, and `registered-map` pins
each window of the mapping while it is copied. Each span waits for its own event, so
that a window is never unpinned, and a mapping never unmapped, under a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightload.cleanup import Cleanup, abandon
from weightload.device.driver import (
    EVENT_DISABLE_TIMING,
    HOST_ALLOC_PORTABLE,
    HOST_REGISTER_READ_ONLY,
)
from weightload.errors import ReadError
from weightload.host.mapping import FileMapping

if TYPE_CHECKING:
    from weightload.device.copies import Copies
    from weightload.plan import Span
    from weightload.verify import BatchHasher
    from weightload.work import Count, ShardWork

# Large enough that registering and waiting cost little beside the copy.
WINDOW_BYTES = 64 << 20


class MappedCarrier:
    """Brings spans of one shard from its mapping; safe to use from several threads."""

    def __init__(self, work: ShardWork, copies: Copies, closing: Cleanup) -> None:
        """Map the shard.

        Raises:
            ReadError: the file system cannot map files.
        """
        self.work = work
        self._copies = copies
        # Events and registered windows of spans whose copies failed.
        self._failed: list[tuple[int, int | None]] = []
        shard = work.shard
        try:
            self._mapping = FileMapping(shard.descriptor, shard.identity.file_bytes)
        except OSError as error:
            raise ReadError(
                f"{shard.name} cannot be mapped ({error.strerror}); use the route auto."
            ) from error
        closing.undo(self._close)

    def _close(self) -> None:
        """Give back what failed spans left, then the mapping, unless a copy may still run."""
        if self._copies.unfinished:
            abandon(self._mapping)
            return
        with Cleanup() as closing:
            closing.undo(self._mapping.close)
            for event, registered in self._failed:
                closing.undo(self._release, event, registered)

    def _release(self, event: int, registered: int | None) -> None:
        self._copies.call("cuEventDestroy", event)
        if registered is not None:
            self._copies.call("cuMemHostUnregister", registered)

    def bring(self, span: Span, hasher: BatchHasher | None, count: Count) -> None:
        """Bring one span: it is on the device when this returns."""
        start, end = span.offset, span.offset + span.wanted_end
        if self.work.route == "touch":
            self._mapping.touch(start, end)
        call, address = self._copies.call, self._mapping.address + start
        event = int(call("cuEventCreate", EVENT_DISABLE_TIMING))
        registered = None
        try:
            if self.work.route == "registered-map":
                flags = HOST_ALLOC_PORTABLE | HOST_REGISTER_READ_ONLY
                call("cuMemHostRegister", address, span.wanted_end, flags)
                registered = address
            copies = self._copies.queue(span, address, self.work.addresses)
            call("cuEventRecord", event, self._copies.stream)
            if hasher is not None:
                hasher.update(self._mapping.bytes_view[start:end], span.slices)
            call("cuEventSynchronize", event)
        except BaseException:
            self._failed.append((event, registered))
            raise
        self._release(event, registered)
        count(span, 0, copies, self.work.route)
