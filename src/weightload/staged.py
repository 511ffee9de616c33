"""Bytes that pass through the ring: read into a slot, copied out of it.

A shard that refuses O_DIRECT, at its opening or at any read, is read through the page
cache from there on, and the report says so.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from weightload.host.reads import DirectRefusedError, ShardReader

if TYPE_CHECKING:
    from weightload.cleanup import Cleanup
    from weightload.device.copies import Copies
    from weightload.device.slots import Ring
    from weightload.host.system import System
    from weightload.plan import Span
    from weightload.report import LoadReport
    from weightload.routes import Route
    from weightload.verify import BatchHasher
    from weightload.work import Count, ShardWork


class StagedCarrier:
    """Brings spans of one shard through the ring; safe to use from several threads."""

    def __init__(
        self,
        work: ShardWork,
        ring: Ring,
        copies: Copies,
        system: System,
        closing: Cleanup,
        report: LoadReport,
    ) -> None:
        self.work = work
        self._ring = ring
        self._copies = copies
        self._report = report
        self._lock = threading.Lock()
        shard = work.shard
        self._through_cache = ShardReader(system, shard, shard.descriptor, None)
        self._direct: ShardReader | None = None
        if work.route == "direct":
            self._open_direct(system, closing)

    def _open_direct(self, system: System, closing: Cleanup) -> None:
        shard = self.work.shard
        if self.work.direct_alignment is None:
            self._fall_back("the file system has no direct input")
            return
        try:
            descriptor = system.open_direct(shard.descriptor)
        except OSError as error:
            self._fall_back(f"O_DIRECT was refused at open ({error.strerror})")
            return
        closing.undo(system.close, descriptor)
        self._direct = ShardReader(system, shard, descriptor, self.work.direct_alignment)

    def bring(self, span: Span, hasher: BatchHasher | None, count: Count) -> None:
        """Bring one span: it is on its way when this returns."""
        slot = self._ring.take(hasher.finish if hasher else None)
        try:
            reads, route = self._fill(span, slot.bytes_view)
        except BaseException:
            self._ring.give_back(slot)
            raise
        try:
            copies = self._copies.queue_from_slot(span, slot, self.work.addresses)
        except BaseException:
            self._ring.quarantine(slot)
            raise
        if hasher is None:
            self._ring.submit(slot, self._copies.stream)
        else:
            submit = partial(self._ring.submit, slot, self._copies.stream)
            hasher.update_then(slot.bytes_view, span.slices, submit)
        count(span, reads, copies, route)

    def _fill(self, span: Span, target: memoryview) -> tuple[int, Route]:
        reader = self._direct
        if reader is not None:
            try:
                return reader.fill(span, target), "direct"
            except DirectRefusedError:
                with self._lock:
                    if self._direct is not None:
                        self._direct = None
                        self._fall_back("O_DIRECT was refused at a read")
        route: Route = "pageable" if self.work.route == "pageable" else "buffered"
        return self._through_cache.fill(span, target), route

    def _fall_back(self, why: str) -> None:
        self._report.fallbacks.append(f"{self.work.shard.name}: {why}; read through the cache")
