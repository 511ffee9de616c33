"""The one way in: a checkpoint's path becomes tensors on a device.

The order of a load is fixed by what costs memory: open and check every file, plan,
reserve the ring, take the slabs, stream, then give the ring back before anything
is handed out. Whatever fails, everything that was taken is given back in the
opposite order, and the first error is the one that is raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING, Any, Self

from weightload.checkpoint.folder import open_checkpoint
from weightload.cleanup import Cleanup
from weightload.device.destination import DriverDestination, TorchDestination
from weightload.device.driver import STREAM_NON_BLOCKING, Driver, real_driver
from weightload.device.profile import Device, parse_ordinal
from weightload.device.slots import Ring
from weightload.errors import UsageError
from weightload.host.reads import DIRECT_ALIGNMENT_BYTES
from weightload.host.system import System
from weightload.plan import plan_spans
from weightload.report import LoadReport
from weightload.routes import check_route, decide
from weightload.upload import ShardWork, Upload

if TYPE_CHECKING:
    import os

    from weightload.checkpoint.folder import Checkpoint
    from weightload.checkpoint.header import Record
    from weightload.device.destination import Destination
    from weightload.plan import Span
    from weightload.routes import RouteDecision

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
    """

    def __init__(self, tensors: dict[str, Any], report: LoadReport, closing: ExitStack) -> None:
        self._tensors = tensors
        self.report = report
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


def load(
    checkpoint: str | os.PathLike[str],
    *,
    device: str | int = "cuda:0",
    route: str = "auto",
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
        DriverError: a driver call failed.
        UsageError: an argument is not one that this function takes.
    """
    choice = check_route(route)
    system = system or System()
    report = LoadReport()
    threads = threads or min(max(system.cpu_count(), _THREADS_MIN), _THREADS_MAX)
    slot_count = slot_count or min(2 * threads, SLOT_COUNT_MAX)
    if threads < 1 or slot_count < 1:
        raise UsageError("threads and slot_count must be at least 1; leave them out to choose.")
    with report.phase("total"), Cleanup() as kept:
        with report.phase("open"):
            files = kept.enter_context(open_checkpoint(checkpoint))
            seam = real_driver() if driver is None else Driver(driver)
            gpu = Device(seam, parse_ordinal(device))
            kept.undo(gpu.close)
        with gpu.current(), Cleanup() as staging:
            with report.phase("plan"):
                records = [record for _, record in files.records()]
                spans = [
                    plan_spans(shard.header.records, slot_bytes, DIRECT_ALIGNMENT_BYTES)
                    for shard in files.shards
                ]
                destination = _destination(gpu, records, from_torch=driver is None)
            stream = int(seam.call("cuStreamCreate", STREAM_NON_BLOCKING))
            staging.undo(seam.call, "cuStreamDestroy", stream)
            with report.phase("reserve"):
                ring = Ring(seam, slot_count, slot_bytes, DIRECT_ALIGNMENT_BYTES)
                staging.undo(ring.close)
            with report.phase("allocate"):
                kept.undo(destination.release)
                destination.allocate()
                destination.ready(stream)
            decisions = [decide(choice, shard, system) for shard in files.shards]
            report.decisions = decisions
            work = _work(files, decisions, spans, destination)
            with report.phase("stream"):
                Upload(gpu, ring, stream, system, report).run(work, threads, staging)
                for shard in files.shards:
                    shard.check_unchanged()
            with report.phase("close"):
                tensors = destination.tensors()
                _describe(report, gpu, files, destination, ring)
                report.threads = threads
                staging.close()
                files.close()
        if driver is None:
            # torch owns the memory from here on, and its own hold on the context.
            return Loaded(tensors, report, ExitStack())
        return Loaded(tensors, report, kept.pop_all())


def _destination(gpu: Device, records: list[Record], *, from_torch: bool) -> Destination:
    return TorchDestination(gpu, records) if from_torch else DriverDestination(gpu, records)


def _work(
    files: Checkpoint,
    decisions: list[RouteDecision],
    spans: list[list[Span]],
    destination: Destination,
) -> list[ShardWork]:
    """Pair each shard with its route, its spans and its tensors' addresses."""
    addresses = iter(destination.addresses)
    return [
        ShardWork(
            shard, decision.route, planned, list(islice(addresses, len(shard.header.records)))
        )
        for shard, decision, planned in zip(files.shards, decisions, spans, strict=True)
    ]


def _describe(
    report: LoadReport, gpu: Device, files: Checkpoint, destination: Destination, ring: Ring
) -> None:
    """Fill in what the report says of the parts, once they are known."""
    report.device = gpu.profile.name
    report.integrated = gpu.profile.integrated
    report.shards = len(files.shards)
    report.strays = files.strays
    report.tensors = len(destination.addresses)
    report.wanted_bytes = sum(record.nbytes for _, record in files.records())
    report.slot_count, report.slot_bytes = ring.slot_count, ring.slot_bytes
    report.pinned, report.pinned_bytes = ring.pinned, ring.pinned_bytes
    report.fallbacks += ring.refusals
    report.device_bytes = sum(destination.layout.slab_bytes)
    report.slabs = len(destination.layout.slab_bytes)
