"""The steps of one load, in an order that is fixed by what costs memory.

Open and check every file, plan, reserve the ring, take the slabs, stream, then give
the ring back before anything is handed out. Whatever fails, everything that was taken
is given back in the opposite order, and the first error is the one that is raised.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from weightload.budget import check_room
from weightload.checkpoint.folder import open_checkpoint, stored_bytes
from weightload.checkpoint.selection import select
from weightload.cleanup import Cleanup, abandon
from weightload.device.copies import Copies
from weightload.device.destination import (
    CallerDestination,
    Destination,
    DriverDestination,
    TorchDestination,
)
from weightload.device.driver import STREAM_NON_BLOCKING, Driver
from weightload.device.pinned import RING_ALIGNMENT_BYTES, Reservation
from weightload.device.profile import Device
from weightload.device.slots import Ring
from weightload.host.collector import collector_held_off
from weightload.host.readahead import ReadAhead
from weightload.layers import layer_intervals
from weightload.limits import host_to_device_gbs, reads_gbs
from weightload.loaded import Loaded
from weightload.mapped import WINDOW_BYTES, MappedCarrier
from weightload.plan import plan_batches
from weightload.release import ReleaseQueue, resident_bytes
from weightload.routes import AUTO, STAGED_ROUTES, check_device, decide
from weightload.staged import StagedCarrier
from weightload.upload import Stop, Upload
from weightload.work import ShardWork

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from weightload.checkpoint.folder import Shard
    from weightload.checkpoint.selection import Selection
    from weightload.host.system import System
    from weightload.report import LoadReport
    from weightload.verify import Verifier


@dataclass
class Run:
    """One call of `load`, with its arguments checked."""

    system: System
    seam: Driver
    ordinal: int
    route: str
    threads: int
    slot_bytes: int
    slot_count: int
    from_torch: bool
    progress: Callable[[int, int], None] | None
    report: LoadReport
    verifier: Verifier | None
    read_ahead: int
    read_ahead_bytes: int
    release: ReleaseQueue | bool | None
    measure_limits: bool
    stop: Stop = field(default_factory=Stop)

    def load(
        self,
        checkpoint: str | os.PathLike[str],
        only: Sequence[str] | None,
        into: Mapping[str, Any] | None,
    ) -> Loaded:
        """Run every step; arguments and errors are those of `weightload.load`."""
        report = self.report
        with report.phase("total"), Cleanup() as kept:
            needed = max(1, -(-stored_bytes(checkpoint) // self.slot_bytes))
            with report.phase("device"):
                gpu = Device(self.seam, self.ordinal)
                kept.undo(gpu.close)
                check_device(self.route, gpu.profile)
            with gpu.current(), Cleanup() as staging:
                with report.phase("reserve"):
                    reservation = self._begin_ring(
                        gpu, max(1, min(self.slot_count, needed)), staging
                    )
                with report.phase("open"), collector_held_off():
                    files = open_checkpoint(checkpoint)
                with files:
                    report.strays = files.strays
                    selection = select(files, only, into)
                    destination = self._destination(gpu, selection, into)
                    shards = [part.shard for part in selection.shards]
                    report.resident_before_bytes = resident_bytes(self.system, shards)
                    tensors = self._upload(gpu, selection, destination, reservation, kept, staging)
                    with report.phase("close"):
                        for shard in shards:
                            shard.check_unchanged()
                        staging.close()
                    report.resident_after_bytes = resident_bytes(self.system, shards)
                    digests = self._verify(selection, whole=only is None and into is None)
                    self._release(gpu, shards)
            # torch's tensors keep their own memory and its hold on the context; memory
            # from the driver lives until the caller closes it.
            closing = ExitStack() if self.from_torch else kept.pop_all()
            return Loaded(tensors, report, digests, closing)

    def _begin_ring(self, gpu: Device, slots: int, staging: Cleanup) -> Reservation | None:
        """Begin to pin the slots; mapping routes need none."""
        if self.route not in {AUTO, *STAGED_ROUTES}:
            return None
        pinned = self.route != "pageable"
        reservation = Reservation(gpu, self.system, slots, self.slot_bytes, pinned=pinned)
        staging.undo(reservation.cancel)
        return reservation

    def _verify(self, selection: Selection, *, whole: bool) -> dict[str, str]:
        """Compare with the caller's manifest; returns the digests, none without `verify`."""
        return self.verifier.finish(selection.records, whole=whole) if self.verifier else {}

    def _release(self, gpu: Device, shards: Sequence[Shard]) -> None:
        """Give the pages back, or queue the shards for whoever does it later."""
        if isinstance(self.release, ReleaseQueue):
            for shard in shards:
                self.release.add(shard)
            return
        through_cache = set(self.report.route_bytes) - {"direct"}
        wanted = gpu.profile.integrated if self.release is None else self.release
        if wanted and through_cache:
            with ReleaseQueue(system=self.system) as queue:
                for shard in shards:
                    queue.add(shard)
            self.report.released = queue.released

    def _destination(
        self, gpu: Device, selection: Selection, into: Mapping[str, Any] | None
    ) -> Destination:
        if into is not None:
            return CallerDestination(gpu, selection.records, into)
        if self.from_torch:
            return TorchDestination(gpu, selection.records)
        return DriverDestination(gpu, selection.records)

    def _upload(
        self,
        gpu: Device,
        selection: Selection,
        destination: Destination,
        reservation: Reservation | None,
        kept: Cleanup,
        staging: Cleanup,
    ) -> dict[str, Any]:
        """Stream every wanted byte; returns the tensors."""
        report, call = self.report, self.seam.call
        ring_bytes = self.slot_count * self.slot_bytes if reservation else 0
        check_room(gpu.profile, self.system, selection.wanted_bytes, ring_bytes)
        with report.phase("allocate"):
            stream = int(call("cuStreamCreate", STREAM_NON_BLOCKING))
            staging.undo(call, "cuStreamDestroy", stream)
            kept.undo(destination.release)
            destination.allocate()
            destination.ready(stream)
        # Beside the readers it would cost them Python's lock; see `upload`.
        with report.phase("plan"), collector_held_off():
            work = list(self._work(selection, destination))
            tensors = destination.tensors()
        ring = None
        if reservation is not None:
            with report.phase("reserve"):
                ring = Ring(self.seam, reservation.finish(), self.slot_bytes)
                staging.undo(ring.close)
        self._describe(gpu, selection, destination, ring)
        copies = Copies(
            self.seam, stream, pinned=report.pinned_bytes > 0, spaced=destination.spaced
        )
        carriers = [self._carrier(item, ring, copies, staging) for item in work]
        ahead = self._read_ahead(selection)
        upload = Upload(
            gpu,
            copies,
            ring,
            report,
            self.verifier,
            self.progress,
            reached=ahead.advance if ahead else None,
        )
        self.stop.attach(upload)
        with report.phase("stream"):
            try:
                with ahead or nullcontext(), self._hashing(ring):
                    upload.run(carriers, self._threads_for(selection))
            except BaseException:
                if copies.unfinished:
                    abandon(kept.pop_all())
                raise
        report.read_ahead_bytes = ahead.read_bytes if ahead else 0
        if self.measure_limits:
            self._measure_limits(work, ring, copies)
        return tensors

    def _threads_for(self, selection: Selection) -> int:
        """No more threads than reads: a slot's bytes each, and one for a shard's last piece."""
        reads = selection.wanted_bytes // self.slot_bytes + len(selection.shards)
        return min(self.threads, max(1, reads))

    def _hashing(self, ring: Ring | None) -> AbstractContextManager[None]:
        """Hash beside reading where bytes stay in slots until they are hashed."""
        if self.verifier is None or ring is None:
            return nullcontext()
        return self.verifier.overlapping(self.threads)

    def _read_ahead(self, selection: Selection) -> ReadAhead | None:
        if not self.read_ahead:
            return None
        return ReadAhead(
            self.system,
            [part.shard for part in selection.shards],
            layer_intervals(part.records for part in selection.shards),
            self.read_ahead,
            self.read_ahead_bytes,
        )

    def _measure_limits(
        self, work: Sequence[ShardWork], ring: Ring | None, copies: Copies
    ) -> None:
        """Measure what was possible, for routes that use the ring."""
        if ring is None:
            return
        limits = {"host_to_device_gbs": host_to_device_gbs(ring, copies)}
        reads = reads_gbs(work, ring, self.system, self.threads)
        limits |= {f"{route}_reads_gbs": rate for route, rate in reads.items()}
        reached = self.report.wanted_bytes / self.report.phases_s["stream"] / 1e9
        self.report.limits = limits | {"fraction_reached": reached / min(limits.values())}

    def _work(self, selection: Selection, destination: Destination) -> Iterator[ShardWork]:
        """Give each shard its route, its plan and its tensors' addresses."""
        addresses = iter(destination.addresses)
        for shard, records in selection.shards:
            decision = decide(self.route, shard, self.system)
            self.report.decisions.append(decision)
            staged = decision.route in STAGED_ROUTES
            alignment = self.system.direct_alignment(shard.descriptor)
            if alignment is not None and alignment > RING_ALIGNMENT_BYTES:
                alignment = None
            batches = list(
                plan_batches(
                    records,
                    self.slot_bytes if staged else WINDOW_BYTES,
                    (alignment if staged else None) or self.system.page_bytes,
                    whole_tensors=self.verifier is not None,
                )
            )
            ours = list(islice(addresses, len(records)))
            yield ShardWork(shard, records, ours, decision.route, alignment, batches)

    def _carrier(
        self, work: ShardWork, ring: Ring | None, copies: Copies, closing: Cleanup
    ) -> StagedCarrier | MappedCarrier:
        if ring is not None:
            return StagedCarrier(work, ring, copies, self.system, closing, self.report)
        return MappedCarrier(work, copies, closing)

    def _describe(
        self, gpu: Device, selection: Selection, destination: Destination, ring: Ring | None
    ) -> None:
        """Fill in what the report says of the parts, once they are known."""
        report = self.report
        report.device, report.integrated = gpu.profile.name, gpu.profile.integrated
        report.shards = len(selection.shards)
        report.tensors = sum(len(part.records) for part in selection.shards)
        report.wanted_bytes = selection.wanted_bytes
        if ring is not None:
            memory = ring.memory
            report.slot_count, report.slot_bytes = memory.slot_count, self.slot_bytes
            report.ring_memory, report.pinned_bytes = memory.kind, memory.pinned_bytes
            report.fallbacks += memory.refusals
        report.device_bytes = sum(destination.slab_bytes)
        report.slabs = len(destination.slab_bytes)
