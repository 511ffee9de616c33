"""The pipeline: threads that bring batches of spans to the device, side by side.

Each thread takes the next batch and brings its spans in order; through the ring,
reading one span overlaps copying the others, and the slots are the only bound on
bytes in flight. Everything is planned before the first thread begins, and nobody works
beside the threads: whoever does, in Python, keeps readers that come back from a read
waiting for Python's lock, and then the link stands idle. The first error stops the others
at their next batch; it is the one that is raised, and every thread is joined and every
copy awaited before it is.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Protocol

from weightload.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from weightload.checkpoint.folder import Shard
    from weightload.device.copies import Copies
    from weightload.device.profile import Device
    from weightload.device.slots import Ring
    from weightload.plan import Span
    from weightload.report import LoadReport
    from weightload.routes import Route
    from weightload.verify import BatchHasher, Verifier
    from weightload.work import Count, ShardWork


class Carrier(Protocol):
    """How one shard's spans get to the device."""

    work: ShardWork

    def bring(self, span: Span, hasher: BatchHasher | None, count: Count) -> None:
        """Bring one span, hash it on the way if asked, and count it."""


_Batch = tuple[Carrier, "Sequence[Span]"]


class Upload:
    """One run of the pipeline."""

    def __init__(
        self,
        device: Device,
        copies: Copies,
        ring: Ring | None,
        report: LoadReport,
        verifier: Verifier | None = None,
        progress: Callable[[int, int], None] | None = None,
        reached: Callable[[Shard, int], None] | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            device: the opened device.
            copies: the stream.
            ring: the slots, for routes that use them.
            report: counts what is brought.
            verifier: hashes what is brought.
            progress: the caller's, called with bytes done and wanted.
            reached: called with the shard and file offset of each span before it is brought.
        """
        self._device = device
        self._copies = copies
        self._ring = ring
        self._report = report
        self._verifier = verifier
        self._progress = progress
        self._reached = reached
        self._lock = threading.Lock()
        # Not the lock that a caller's progress function runs under.
        self._error_lock = threading.Lock()
        self._first_error: BaseException | None = None
        self._moved_bytes = 0
        self._large_bytes = 0
        # A deque's ends may be used from several threads without a lock.
        self._waiting: deque[_Batch] = deque()

    def run(self, carriers: Iterable[Carrier], threads: int) -> None:
        """Bring every span to the device and wait until all of it is there.

        Args:
            carriers: one per shard, in loading order.
            threads: reader threads.

        Raises:
            WeightloadError: the first error of any thread.
        """
        self._waiting.extend(self._in_order(carriers, threads))
        started: list[threading.Thread] = []
        try:
            for number in range(threads):
                reader = threading.Thread(target=self._drain, name=f"weightload-{number}")
                reader.start()
                started.append(reader)
        except BaseException as error:
            self.stop(error)
            raise
        finally:
            for reader in started:
                reader.join()
            self._settle()
        if self._first_error is not None:
            raise self._first_error
        brought = sum(self._report.route_bytes.values())
        if brought != self._report.wanted_bytes:
            raise AssertionError(
                f"{brought} of {self._report.wanted_bytes} bytes were brought, and no error seen"
            )

    def _in_order(self, carriers: Iterable[Carrier], threads: int) -> list[_Batch]:
        """Every batch in loading order; with digests the largest first."""
        batches = [(carrier, batch) for carrier in carriers for batch in carrier.work.batches]
        if self._verifier is not None:
            # The largest first, so that no thread is left hashing it alone at the end.
            batches.sort(key=_batch_bytes, reverse=True)
            # Half of a thread's share: a batch beyond it would decide when the last one ends.
            self._large_bytes = sum(map(_batch_bytes, batches)) // (2 * threads)
        return batches

    def stop(self, error: BaseException) -> None:
        """Have the readers stop at their next batch; the first error is the one that is raised."""
        with self._error_lock:
            # An error may be false, if its class says so.
            if self._first_error is None:
                self._first_error = error

    def _settle(self) -> None:
        """Wait for all copies; those of a quarantined slot end with the stream at the latest."""
        try:
            if self._ring is not None:
                self._report.quarantined_slots = len(self._ring.quarantined)
                self._ring.settle_all()
        except DriverError as error:
            self.stop(error)
        try:
            self._copies.finish()
        except DriverError as error:
            self.stop(error)

    def _drain(self) -> None:
        tally = _Tally(self._on_moved if self._progress is not None else None)
        try:
            with self._device.current():
                while self._first_error is None and (item := self._next()) is not None:
                    self._bring(*item, tally)
        except BaseException as error:  # noqa: BLE001 - a thread must hand every error over
            self.stop(error)
        with self._lock:
            tally.add_to(self._report)

    def _next(self) -> _Batch | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _bring(self, carrier: Carrier, batch: Sequence[Span], tally: _Tally) -> None:
        if self._verifier is None:
            self._bring_spans(carrier, batch, None, tally)
            return
        large = _batch_bytes((carrier, batch)) > self._large_bytes
        hasher = self._verifier.hasher(carrier.work.records, large=large)
        try:
            self._bring_spans(carrier, batch, hasher, tally)
        finally:
            hasher.finish()

    def _bring_spans(
        self, carrier: Carrier, batch: Sequence[Span], hasher: BatchHasher | None, tally: _Tally
    ) -> None:
        for span in batch:
            if self._reached is not None:
                self._reached(carrier.work.shard, span.offset)
            carrier.bring(span, hasher, tally)

    def _on_moved(self, nbytes: int) -> None:
        with self._lock:
            self._moved_bytes += nbytes
            if self._progress is not None:
                self._progress(self._moved_bytes, self._report.wanted_bytes)


class Stop:
    """An interrupt on its way to an upload, which may not have begun yet."""

    def __init__(self) -> None:
        self._upload: Upload | None = None
        self._interrupt: BaseException | None = None

    def __call__(self, interrupt: BaseException) -> None:
        """Have the upload stop; called from another thread than the load's."""
        self._interrupt = interrupt
        if self._upload is not None:
            self._upload.stop(interrupt)

    def attach(self, upload: Upload) -> None:
        """Say which upload it is."""
        self._upload = upload
        if self._interrupt is not None:
            upload.stop(self._interrupt)


class _Tally:
    """What one thread has brought; counted alone, added up at the end."""

    def __init__(self, on_moved: Callable[[int], None] | None) -> None:
        self._on_moved = on_moved
        self._reads = self._read_bytes = self._copies = 0
        self._route_bytes: dict[str, int] = {}

    def __call__(self, span: Span, reads: int, copies: int, route: Route) -> None:
        moved = 0
        for piece in span.slices:
            moved += piece.nbytes
        self._reads += reads
        self._read_bytes += span.nbytes
        self._copies += copies
        self._route_bytes[route] = self._route_bytes.get(route, 0) + moved
        if self._on_moved is not None:
            self._on_moved(moved)

    def add_to(self, report: LoadReport) -> None:
        report.reads += self._reads
        report.read_bytes += self._read_bytes
        report.copies += self._copies
        for route, nbytes in self._route_bytes.items():
            report.route_bytes[route] = report.route_bytes.get(route, 0) + nbytes


def _batch_bytes(item: _Batch) -> int:
    return sum(span.wanted_end for span in item[1])
