"""Bytes that are in host memory already, brought to the device through the ring.

They belong to no shard, so they are counted as a route of their own, `host`. Memory of
the process's own may be pageable, cold or a mapping: copied into a slot by the
processor, it is faulted in there, and the device only ever reads pinned memory.
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from weightload.arguments import check_counts, check_kinds
from weightload.aside import run_aside, torch_stream
from weightload.budget import check_room
from weightload.checkpoint.folder import Identity, Shard
from weightload.checkpoint.header import Header, Record
from weightload.cleanup import Cleanup, abandon
from weightload.device.copies import Copies
from weightload.device.destination import DriverDestination, TorchDestination
from weightload.device.driver import STREAM_NON_BLOCKING, Driver, real_driver
from weightload.device.pinned import Reservation
from weightload.device.profile import Device, parse_ordinal
from weightload.device.slots import Ring
from weightload.host.system import System
from weightload.loaded import Loaded
from weightload.plan import plan_batches
from weightload.report import LoadReport
from weightload.upload import Stop, Upload
from weightload.work import ShardWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from weightload.plan import Span
    from weightload.verify import BatchHasher
    from weightload.work import Count

SLOT_BYTES = 4 << 20
# Copying within memory is work for the processor, and saturates it early.
_THREADS_MAX = 8


class HostMemory(NamedTuple):
    """One piece of host memory, which stays as it is until it has been brought.

    Attributes:
        name: what it will be called.
        address: of its first byte.
        nbytes: its length, at least 1.
    """

    name: str
    address: int
    nbytes: int


class _HostCarrier:
    """Brings spans of memory through the ring; safe to use from several threads."""

    def __init__(
        self, work: ShardWork, sources: Sequence[int], ring: Ring, copies: Copies
    ) -> None:
        self.work = work
        self._sources = sources
        self._ring = ring
        self._copies = copies

    def bring(self, span: Span, _hasher: BatchHasher | None, count: Count) -> None:
        """Bring one span: it is on its way when this returns."""
        slot = self._ring.take()
        for piece in span.slices:
            source = self._sources[piece.tensor] + piece.tensor_offset
            # This lets go of Python's lock.
            ctypes.memmove(slot.address + piece.slot_offset, source, piece.nbytes)
        try:
            copies = self._copies.queue_from_slot(span, slot, self.work.addresses)
        except BaseException:
            self._ring.quarantine(slot)
            raise
        self._ring.submit(slot, self._copies.stream)
        count(span, 0, copies, "host")


def load_memory(
    memory: Sequence[HostMemory],
    *,
    device: str | int = "cuda:0",
    progress: Callable[[int, int], None] | None = None,
    driver: Any = None,  # noqa: ANN401 - the binding publishes no types
    threads: int | None = None,
    system: System | None = None,
) -> Loaded:
    """Bring pieces of host memory to a device.

    Args:
        memory: the pieces; names must differ.
        device: as for `weightload.load`.
        progress: as for `weightload.load`.
        driver: as for `weightload.load`.
        threads: as for `weightload.load`.
        system: as for `weightload.load`.

    Returns:
        Bytes by name, of dtype U8 and one dimension, with a report.

    Raises:
        DeviceError: there is no such device, or no driver.
        DeviceMemoryError: the bytes do not fit.
        DriverError: a driver call failed.
        UsageError: an argument is not one that this function takes.
    """
    check_counts(threads=(threads, 1))
    check_kinds(progress=progress, system=system)
    system = system or System()
    threads = threads or min(system.cpu_count(), _THREADS_MAX)
    report = LoadReport(threads=threads, tensors=len(memory))
    seam = real_driver() if driver is None else Driver(driver)
    ordinal = parse_ordinal(device)
    records = _records(memory)
    report.wanted_bytes = records[-1].end if records else 0
    theirs, stop = nullcontext() if driver is not None else torch_stream(ordinal), Stop()

    def work() -> Loaded:
        with theirs, report.phase("total"), Cleanup() as kept:
            gpu = Device(seam, ordinal)
            kept.undo(gpu.close)
            report.device, report.integrated = gpu.profile.name, gpu.profile.integrated
            destination = (TorchDestination if driver is None else DriverDestination)(gpu, records)
            slots = max(1, min(threads + 4, -(-report.wanted_bytes // SLOT_BYTES)))
            check_room(gpu.profile, system, report.wanted_bytes, slots * SLOT_BYTES)
            with gpu.current(), Cleanup() as staging:
                reservation = Reservation(gpu, system, slots, SLOT_BYTES)
                staging.undo(reservation.cancel)
                stream = int(seam.call("cuStreamCreate", STREAM_NON_BLOCKING))
                staging.undo(seam.call, "cuStreamDestroy", stream)
                kept.undo(destination.release)
                destination.allocate()
                destination.ready(stream)
                ring = Ring(seam, reservation.finish(), SLOT_BYTES)
                staging.undo(ring.close)
                _describe(report, ring, destination.slab_bytes)
                copies = Copies(
                    seam, stream, pinned=report.pinned_bytes > 0, spaced=destination.spaced
                )
                carrier = _HostCarrier(
                    _work(records, destination.addresses),
                    [piece.address for piece in memory],
                    ring,
                    copies,
                )
                try:
                    upload = Upload(gpu, copies, ring, report, progress=progress)
                    stop.attach(upload)
                    with report.phase("stream"):
                        upload.run([carrier], threads)
                except BaseException:
                    if copies.unfinished:
                        abandon(kept.pop_all())
                    raise
                tensors = destination.tensors()
                staging.close()
            # Nothing was asked of the operating system.
            report.read_bytes = 0
            return Loaded(tensors, report, {}, ExitStack() if driver is None else kept.pop_all())

    return run_aside(work, stop, Loaded.close)


def _records(memory: Sequence[HostMemory]) -> list[Record]:
    """The pieces end to end, as if they were one shard's."""
    records, position = [], 0
    for piece in memory:
        end = position + piece.nbytes
        records.append(Record(piece.name, "U8", (piece.nbytes,), position, end))
        position = end
    return records


def _work(records: Sequence[Record], addresses: Sequence[int]) -> ShardWork:
    total = records[-1].end if records else 0
    shard = Shard("host memory", -1, Identity(0, 0, total, 0), Header(tuple(records), {}, 0))
    batches = list(plan_batches(records, SLOT_BYTES, 1, whole_tensors=False))
    return ShardWork(shard, records, addresses, "host", None, batches)


def _describe(report: LoadReport, ring: Ring, slab_bytes: Sequence[int]) -> None:
    memory = ring.memory
    report.slot_count, report.slot_bytes = memory.slot_count, SLOT_BYTES
    report.ring_memory, report.pinned_bytes = memory.kind, memory.pinned_bytes
    report.fallbacks += memory.refusals
    report.device_bytes, report.slabs = sum(slab_bytes), len(slab_bytes)
