"""The one way in: a checkpoint's path becomes tensors on a device.

The order of a load is fixed by what costs memory: open and check every file, plan,
reserve the ring, take the slabs, stream, then give the ring back before anything
is handed out. Whatever fails, everything that was taken is given back in the
opposite order, and the first error is the one that is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from weightload.budget import check_room
from weightload.checkpoint.folder import open_checkpoint
from weightload.checkpoint.selection import select
from weightload.cleanup import Cleanup, abandon
from weightload.device.destination import (
    CallerDestination,
    Destination,
    DriverDestination,
    TorchDestination,
)
from weightload.device.driver import STREAM_NON_BLOCKING, Driver, real_driver
from weightload.device.pinned import Reservation
from weightload.device.profile import Device, parse_ordinal
from weightload.device.slots import Ring
from weightload.errors import UsageError
from weightload.host.reads import DIRECT_ALIGNMENT_BYTES
from weightload.host.system import System
from weightload.plan import check_slot, plan_batches
from weightload.report import LoadReport
from weightload.routes import check_route, decide
from weightload.upload import ShardWork, Upload
from weightload.verify import Verifier, check_algorithm

if TYPE_CHECKING:
    import os

    from weightload.checkpoint.selection import Selection
    from weightload.routes import RouteChoice

# Smaller slots lose time to Python's lock, larger ones to pinning them.
SLOT_BYTES = 4 << 20
SLOT_COUNT_MAX = 24
# Reading is waiting, so even two cores keep a few reads under way.
_THREADS_MIN, _THREADS_MAX = 4, 12


class Loaded(Mapping[str, Any]):
    """The tensors of one load, by name.

    On a GPU the values are torch tensors on that device. With a driver given by the
    caller they are `DeviceTensor`, whose memory `close` frees.

    Attributes:
        report: what happened, in numbers.
        manifest: digest of each tensor's bytes, by name; empty without `verify`.
    """

    def __init__(
        self,
        tensors: dict[str, Any],
        report: LoadReport,
        manifest: dict[str, str],
        closing: ExitStack,
    ) -> None:
        self._tensors = tensors
        self.report = report
        self.manifest = manifest
        self._closing = closing

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - torch.Tensor or DeviceTensor
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the tensors; a second call does nothing.

        torch tensors that the caller kept stay valid; `DeviceTensor` memory is freed.
        """
        self._tensors = {}
        self._closing.close()


def load(  # noqa: PLR0913 - independent keywords, each with a default
    checkpoint: str | os.PathLike[str],
    *,
    device: str | int = "cuda:0",
    route: str = "auto",
    only: Sequence[str] | None = None,
    into: Mapping[str, Any] | None = None,
    verify: str | None = None,
    manifest: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    driver: Any = None,  # noqa: ANN401 - the binding publishes no types
    threads: int | None = None,
    slot_bytes: int = SLOT_BYTES,
    slot_count: int | None = None,
    system: System | None = None,
) -> Loaded:
    """Load a safetensors checkpoint onto a device.

    Args:
        checkpoint: a `.safetensors` file, or a folder with an index or with the shards.
        device: `cuda`, `cuda:1`, or the ordinal.
        route: `auto`, `direct` or `buffered`.
        only: names or shell patterns of the tensors to load; nothing else is read.
        into: tensors of the caller's own, by name, on that device, contiguous, of the
            checkpoint's dtype and shape; exactly these are loaded, in place.
        verify: `sha256` hashes every tensor's bytes as they pass.
        manifest: expected digests by name; implies `verify="sha256"`.
        progress: called as `progress(done_bytes, wanted_bytes)` from reader threads, one
            call at a time.
        driver: an object of `cuda.bindings.driver`'s shape, such as a `FakeCuda`, which
            then also owns the tensors' memory; None takes the real driver and torch.
        threads: reader threads; None chooses from the processors at hand.
        slot_bytes: capacity of one slot, a multiple of 4096.
        slot_count: slots in the ring; None takes two per thread.
        system: the operating system's seam; None takes the real one.

    Returns:
        A mapping of names to tensors, every byte in place, with a report.

    Raises:
        CheckpointError: the files are not a whole checkpoint.
        ReadError: bytes could not be read.
        DeviceError: there is no such device, or no driver.
        DeviceMemoryError: the weights do not fit.
        DriverError: a driver call failed.
        VerificationError: a tensor's bytes are not those of the manifest.
        UsageError: an argument is not one that this function takes.
    """
    system = system or System()
    threads = threads or min(max(system.cpu_count(), _THREADS_MIN), _THREADS_MAX)
    slot_count = slot_count or min(2 * threads, SLOT_COUNT_MAX)
    if threads < 1 or slot_count < 1:
        raise UsageError("threads and slot_count must be at least 1; leave them out to choose.")
    if verify is not None:
        check_algorithm(verify)
    run = _Run(
        system=system,
        seam=real_driver() if driver is None else Driver(driver),
        ordinal=parse_ordinal(device),
        route=check_route(route),
        threads=threads,
        slot_bytes=slot_bytes,
        slot_count=slot_count,
        from_torch=driver is None,
        progress=progress,
        report=LoadReport(threads=threads),
        verifier=Verifier(manifest) if verify or manifest is not None else None,
    )
    return run.load(checkpoint, only, into)


@dataclass
class _Run:
    """One call of `load`, with its arguments checked."""

    system: System
    seam: Driver
    ordinal: int
    route: RouteChoice
    threads: int
    slot_bytes: int
    slot_count: int
    from_torch: bool
    progress: Callable[[int, int], None] | None
    report: LoadReport
    verifier: Verifier | None

    def load(
        self,
        checkpoint: str | os.PathLike[str],
        only: Sequence[str] | None,
        into: Mapping[str, Any] | None,
    ) -> Loaded:
        report = self.report
        with report.phase("total"), Cleanup() as kept:
            with report.phase("open"):
                files = open_checkpoint(checkpoint)
            with files:
                report.strays = files.strays
                selection = select(files, only, into)
                with report.phase("device"):
                    gpu = Device(self.seam, self.ordinal)
                    kept.undo(gpu.close)
                with gpu.current(), Cleanup() as staging:
                    destination = self._destination(gpu, selection, into)
                    tensors = self._upload(gpu, selection, destination, kept, staging)
                    with report.phase("close"):
                        for part in selection.shards:
                            part.shard.check_unchanged()
                        staging.close()
                digests = self.verifier.finish(selection.records) if self.verifier else {}
            # torch's tensors keep their own memory and its hold on the context; memory
            # from the driver lives until the caller closes it.
            closing = ExitStack() if self.from_torch else kept.pop_all()
            return Loaded(tensors, report, digests, closing)

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
        kept: Cleanup,
        staging: Cleanup,
    ) -> dict[str, Any]:
        """Stream every wanted byte; returns the tensors."""
        report, call = self.report, self.seam.call
        wanted_bytes, slot_bytes = selection.wanted_bytes, self.slot_bytes
        slots = min(self.slot_count, max(1, -(-wanted_bytes // slot_bytes)))
        check_slot(slot_bytes, DIRECT_ALIGNMENT_BYTES)
        check_room(gpu.profile, self.system, wanted_bytes, slots * slot_bytes)
        with report.phase("reserve"):
            reservation = Reservation(gpu, self.system, slots, slot_bytes, DIRECT_ALIGNMENT_BYTES)
            staging.undo(reservation.cancel)
        with report.phase("allocate"):
            stream = int(call("cuStreamCreate", STREAM_NON_BLOCKING))
            staging.undo(call, "cuStreamDestroy", stream)
            kept.undo(destination.release)
            destination.allocate()
            destination.ready(stream)
            work = self._work(selection, destination)
        with report.phase("reserve"):
            ring = Ring(self.seam, reservation.finish(), slot_bytes)
            staging.undo(ring.close)
        self._describe(gpu, selection, destination, ring)
        upload = Upload(gpu, ring, stream, self.system, report, self.verifier, self.progress)
        with report.phase("stream"):
            try:
                with upload.running(work, self.threads, staging):
                    tensors = destination.tensors()
                call("cuStreamSynchronize", stream)
            except BaseException:
                if upload.unfinished:
                    abandon(kept.pop_all())
                raise
        return tensors

    def _work(self, selection: Selection, destination: Destination) -> list[ShardWork]:
        """Give each shard its route, its plan and its tensors' addresses."""
        addresses = iter(destination.addresses)
        work = []
        for shard, records in selection.shards:
            decision = decide(self.route, shard, self.system)
            self.report.decisions.append(decision)
            batches = plan_batches(
                records,
                self.slot_bytes,
                DIRECT_ALIGNMENT_BYTES,
                whole_tensors=self.verifier is not None,
            )
            ours = list(islice(addresses, len(records)))
            work.append(ShardWork(shard, records, ours, decision.route, batches))
        return work

    def _describe(
        self, gpu: Device, selection: Selection, destination: Destination, ring: Ring
    ) -> None:
        """Fill in what the report says of the parts, once they are known."""
        report, memory = self.report, ring.memory
        report.device, report.integrated = gpu.profile.name, gpu.profile.integrated
        report.shards = len(selection.shards)
        report.tensors = sum(len(part.records) for part in selection.shards)
        report.wanted_bytes = selection.wanted_bytes
        report.slot_count, report.slot_bytes = memory.slot_count, self.slot_bytes
        report.ring_memory, report.pinned_bytes = memory.kind, memory.pinned_bytes
        report.fallbacks += memory.refusals
        report.device_bytes = sum(destination.slab_bytes)
        report.slabs = len(destination.slab_bytes)
