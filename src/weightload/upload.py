"""The pipeline: reader threads fill slots, and copies drain them.

Each thread takes the next batch of spans; for each it takes a slot (settling the
oldest one in flight when none is free), reads into it and queues its copies. Reading therefore
overlaps copying, and the slots are the only bound on bytes in flight. The first
error stops the others at their next batch; it is the one that is raised, and every
thread is joined before it is.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from weightload.errors import DriverError
from weightload.host.reads import DirectRefusedError, ShardReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from weightload.checkpoint.folder import Shard
    from weightload.checkpoint.header import Record
    from weightload.cleanup import Cleanup
    from weightload.device.profile import Device
    from weightload.device.slots import Ring, Slot
    from weightload.host.system import System
    from weightload.plan import Span
    from weightload.report import LoadReport
    from weightload.routes import Route
    from weightload.verify import Verifier

    _Batch = tuple["_ShardState", Sequence[Span]]


class ShardWork(NamedTuple):
    """One shard's part of the load.

    Attributes:
        shard: the open file.
        records: its wanted tensors, in the order of their bytes.
        addresses: device address of each one's first byte.
        route: how to read it.
        batches: what to read; each batch by one thread, in order.
    """

    shard: Shard
    records: Sequence[Record]
    addresses: Sequence[int]
    route: Route
    batches: Iterable[Sequence[Span]]


class Upload:
    """One run of the pipeline.

    Attributes:
        unfinished: whether copies may still be on their way to the device after a failed
            run, so that neither end of them may be freed.
    """

    def __init__(
        self,
        device: Device,
        ring: Ring,
        stream: int,
        system: System,
        report: LoadReport,
        verifier: Verifier | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._device = device
        self._ring = ring
        self._stream = stream
        self._system = system
        self._report = report
        self._verifier = verifier
        self._progress = progress
        self._lock = threading.Lock()
        self._first_error: BaseException | None = None
        self.unfinished = False

    @contextmanager
    def running(self, work: Sequence[ShardWork], threads: int, closing: Cleanup) -> Iterator[None]:
        """Bring every span to the device while the body runs, and wait until all is there.

        Args:
            work: the shards, in loading order.
            threads: reader threads at most.
            closing: closes the direct descriptors when the load is over.

        Raises:
            WeightloadError: the first error of any thread.
        """
        states = [_ShardState(item, self._system, closing, self._report) for item in work]
        queue: Iterator[_Batch] = (
            (state, batch) for state in states for batch in state.work.batches
        )
        if self._verifier is not None:
            # The largest first, so that no thread is left hashing it alone at the end.
            queue = iter(sorted(queue, key=_batch_bytes, reverse=True))
        readers = [
            threading.Thread(target=self._drain, args=(queue,), name=f"weightload-{number}")
            for number in range(threads)
        ]
        started: list[threading.Thread] = []
        try:
            for reader in readers:
                reader.start()
                started.append(reader)
            yield
            for reader in started:
                reader.join()
        except BaseException as error:
            # Ctrl-C lands here: stop the readers before anything is taken from under them.
            self._keep(error)
            raise
        finally:
            for reader in started:
                reader.join()
            self._settle()
            self._report.quarantined_slots = len(self._ring.quarantined)
        if self._first_error is not None:
            raise self._first_error

    def _settle(self) -> None:
        """Wait for all copies: those of quarantined slots can only be awaited with the stream."""
        try:
            self._ring.settle_all()
        except DriverError as error:
            self._keep(error)
        if self._ring.quarantined:
            try:
                self._device.driver.call("cuStreamSynchronize", self._stream)
            except DriverError as error:
                self._keep(error)
                self.unfinished = True

    def _keep(self, error: BaseException) -> None:
        with self._lock:
            self._first_error = self._first_error or error

    def _next(self, waiting: Iterator[_Batch]) -> _Batch | None:
        with self._lock:
            return None if self._first_error is not None else next(waiting, None)

    def _drain(self, waiting: Iterator[_Batch]) -> None:
        try:
            with self._device.current():
                while (item := self._next(waiting)) is not None:
                    self._bring(*item)
        except BaseException as error:  # noqa: BLE001 - a thread must hand every error over
            self._keep(error)

    def _bring(self, state: _ShardState, batch: Sequence[Span]) -> None:
        hasher = self._verifier.hasher(state.work.records) if self._verifier else None
        for span in batch:
            slot = self._ring.take()
            try:
                reads, route = state.fill(span, slot.bytes_view)
            except BaseException:
                self._ring.give_back(slot)
                raise
            try:
                self._copy(slot, span, state.work.addresses)
                if hasher is not None:
                    hasher.update(slot.bytes_view, span.slices)
            except BaseException:
                self._ring.quarantine(slot)
                raise
            self._ring.submit(slot, self._stream)
            self._count(span, reads, route)

    def _copy(self, slot: Slot, span: Span, addresses: Sequence[int]) -> None:
        call = self._device.driver.call
        for piece in span.slices:
            call(
                "cuMemcpyHtoDAsync",
                addresses[piece.tensor] + piece.tensor_offset,
                slot.address + piece.slot_offset,
                piece.nbytes,
                self._stream,
            )

    def _count(self, span: Span, reads: int, route: Route) -> None:
        moved = sum(piece.nbytes for piece in span.slices)
        report = self._report
        with self._lock:
            report.reads += reads
            report.read_bytes += span.nbytes
            report.copies += len(span.slices)
            report.route_bytes[route] = report.route_bytes.get(route, 0) + moved
            if self._progress is not None:
                self._progress(sum(report.route_bytes.values()), report.wanted_bytes)


def _batch_bytes(item: _Batch) -> int:
    return sum(span.wanted_end for span in item[1])


class _ShardState:
    """One shard's reader, which falls back from direct to buffered for the whole file."""

    def __init__(
        self, work: ShardWork, system: System, closing: Cleanup, report: LoadReport
    ) -> None:
        self.work = work
        self._report = report
        self._lock = threading.Lock()
        self._buffered = ShardReader(system, work.shard, work.shard.descriptor, direct=False)
        self._direct: ShardReader | None = None
        if work.route == "direct":
            try:
                descriptor = system.open_direct(work.shard.descriptor)
            except OSError as error:
                self._fall_back(f"O_DIRECT was refused at open ({error.strerror})")
            else:
                closing.undo(system.close, descriptor)
                self._direct = ShardReader(system, work.shard, descriptor, direct=True)

    def fill(self, span: Span, target: memoryview) -> tuple[int, Route]:
        reader = self._direct
        if reader is not None:
            try:
                return reader.fill(span, target), "direct"
            except DirectRefusedError:
                with self._lock:
                    if self._direct is not None:
                        self._direct = None
                        self._fall_back("O_DIRECT was refused at a read")
        return self._buffered.fill(span, target), "buffered"

    def _fall_back(self, why: str) -> None:
        self._report.fallbacks.append(f"{self.work.shard.name}: {why}; read through the cache")
