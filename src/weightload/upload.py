"""The pipeline: reader threads fill slots, and copies drain them.

Each thread takes the next span, takes a slot (settling the oldest one in flight
when none is free), reads into it and queues its copies. Reading therefore
overlaps copying, and the slots are the only bound on bytes in flight. The first
error stops the others at their next span; it is the one that is raised, and every
thread is joined before it is.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from weightload.errors import DriverError
from weightload.host.reads import DirectRefusedError, ShardReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import ExitStack

    from weightload.checkpoint.folder import Shard
    from weightload.device.profile import Device
    from weightload.device.slots import Ring, Slot
    from weightload.host.system import System
    from weightload.plan import Span
    from weightload.report import LoadReport
    from weightload.routes import Route


class ShardWork(NamedTuple):
    """One shard's part of the load.

    Attributes:
        shard: the open file.
        route: how to read it.
        spans: what to read.
        addresses: device address of each planned tensor's first byte.
    """

    shard: Shard
    route: Route
    spans: Sequence[Span]
    addresses: Sequence[int]


class Upload:
    """One run of the pipeline."""

    def __init__(
        self, device: Device, ring: Ring, stream: int, system: System, report: LoadReport
    ) -> None:
        self._device = device
        self._ring = ring
        self._stream = stream
        self._system = system
        self._report = report
        self._lock = threading.Lock()
        self._first_error: BaseException | None = None

    def run(self, work: Sequence[ShardWork], threads: int, closing: ExitStack) -> None:
        """Bring every span to the device and wait until all of it is there.

        Args:
            work: the shards, in loading order.
            threads: reader threads, at least 1.
            closing: closes the direct descriptors when the load is over.

        Raises:
            WeightloadError: the first error of any thread.
        """
        queue = self._queue(work, closing)
        readers = [
            threading.Thread(target=self._drain, args=(queue,), name=f"weightload-{number}")
            for number in range(threads)
        ]
        started: list[threading.Thread] = []
        try:
            for reader in readers:
                reader.start()
                started.append(reader)
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
        try:
            self._ring.settle_all()
        except DriverError as error:
            self._keep(error)

    def _queue(
        self, work: Sequence[ShardWork], closing: ExitStack
    ) -> Iterator[tuple[_ShardState, Span]]:
        for item in work:
            state = _ShardState(item, self._system, closing, self._report)
            for span in item.spans:
                yield state, span

    def _next(self, queue: Iterator[tuple[_ShardState, Span]]) -> tuple[_ShardState, Span] | None:
        with self._lock:
            return None if self._first_error is not None else next(queue, None)

    def _keep(self, error: BaseException) -> None:
        with self._lock:
            self._first_error = self._first_error or error

    def _drain(self, queue: Iterator[tuple[_ShardState, Span]]) -> None:
        try:
            with self._device.current():
                while (item := self._next(queue)) is not None:
                    self._bring(*item)
        except BaseException as error:  # noqa: BLE001 - a thread must hand every error over
            self._keep(error)

    def _bring(self, state: _ShardState, span: Span) -> None:
        slot = self._ring.take()
        try:
            reads, route = state.fill(span, slot.bytes_view)
        except BaseException:
            self._ring.give_back(slot)
            raise
        self._copy(slot, span, state.work.addresses)
        self._ring.submit(slot, self._stream)
        moved = sum(piece.nbytes for piece in span.slices)
        with self._lock:
            report = self._report
            report.reads += reads
            report.read_bytes += span.nbytes
            report.copies += len(span.slices)
            report.route_bytes[route] = report.route_bytes.get(route, 0) + moved

    def _copy(self, slot: Slot, span: Span, addresses: Sequence[int]) -> None:
        call = self._device.driver.call
        try:
            for piece in span.slices:
                call(
                    "cuMemcpyHtoDAsync",
                    addresses[piece.tensor] + piece.tensor_offset,
                    slot.address + piece.slot_offset,
                    piece.nbytes,
                    self._stream,
                )
        except BaseException:
            self._ring.quarantine(slot)
            raise


class _ShardState:
    """One shard's reader, which falls back from direct to buffered for the whole file."""

    def __init__(
        self, work: ShardWork, system: System, closing: ExitStack, report: LoadReport
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
                closing.callback(system.close, descriptor)
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
