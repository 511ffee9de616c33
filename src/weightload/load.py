"""The one way in: a checkpoint's path becomes tensors on a device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from weightload.arguments import check_counts, check_kinds, check_names, check_tensors
from weightload.aside import run_aside, torch_stream
from weightload.device.driver import Driver, real_driver
from weightload.device.pinned import RING_ALIGNMENT_BYTES
from weightload.device.profile import parse_ordinal
from weightload.host.system import System
from weightload.loaded import Loaded
from weightload.plan import check_slot
from weightload.report import LoadReport
from weightload.routes import check_route
from weightload.run import Run
from weightload.verify import Verifier, check_algorithm, check_manifest

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from weightload.release import ReleaseQueue


# Smaller slots lose time to Python's lock, larger ones to pinning them.
SLOT_BYTES = 4 << 20
# Slots beyond one per reader keep the copy engine fed; more only cost their pinning.
SPARE_SLOTS = 4
READ_AHEAD_BYTES = 1 << 30
# Reading is waiting, so even two cores keep a few reads under way;
# twelve fill the link of an H200, and more only queue for Python's lock.
_THREADS_MIN, _THREADS_MAX = 4, 12


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
    read_ahead: int = 0,
    read_ahead_bytes: int = READ_AHEAD_BYTES,
    release: ReleaseQueue | bool | None = None,
    measure_limits: bool = False,
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
        route: `auto`, or one of `direct`, `buffered`, `pageable`, `touch`, `readonly-map`
            and `registered-map`.
        only: names or shell patterns of the tensors to load; nothing else is read.
        into: tensors of the caller's own, by name, on that device, contiguous, of the
            checkpoint's dtype and shape; exactly these are loaded, in place.
        verify: `sha256` hashes every tensor's bytes as they pass.
        manifest: expected digests by name, each 64 hexadecimal digits; implies
            `verify="sha256"`. A name that the checkpoint lacks is a difference, unless `only`
            or `into` selects.
        progress: called as `progress(done_bytes, wanted_bytes)` from reader threads, one
            call at a time.
        read_ahead: layers to read into the page cache ahead of the upload; 0 reads none.
        read_ahead_bytes: most bytes to read ahead.
        release: True gives the shards' pages back at the end, False does not; None does
            on integrated devices, whose weights need the room. A `ReleaseQueue` does
            it later, when all ranks and all loads are done.
        measure_limits: measure the link's and the files' rates after the load, with the
            load's own ring, and report the fraction reached.
        driver: an object of `cuda.bindings.driver`'s shape, such as a `FakeCuda`, which
            then also owns the tensors' memory; None takes the real driver and torch.
        threads: reader threads; None chooses from the processors at hand.
        slot_bytes: capacity of one slot, a multiple of 64 KiB, at most 1 GiB.
        slot_count: slots in the ring; None takes four more than threads.
        system: the operating system's seam; None takes the real one.

    Returns:
        A mapping of names to tensors, every byte in place, with a report.

    Raises:
        CheckpointError: the files are not a whole checkpoint.
        ReadError: bytes could not be read.
        DeviceError: there is no such device, or no driver.
        DeviceMemoryError: the weights do not fit.
        DriverError: a driver call failed.
        VerificationError: tensors are not those of the manifest.
        UsageError: an argument is not one that this function takes.
    """
    check_counts(
        threads=(threads, 1),
        slot_count=(slot_count, 1),
        slot_bytes=(slot_bytes, 1),
        read_ahead=(read_ahead, 0),
        read_ahead_bytes=(read_ahead_bytes, 0),
    )
    check_kinds(
        checkpoint=checkpoint,
        only=only,
        into=into,
        manifest=manifest,
        progress=progress,
        release=release,
        system=system,
    )
    check_names(only=only)
    check_tensors(into or {})
    system = system or System()
    hashing = verify is not None or manifest is not None
    threads = threads or min(max(system.cpu_count(), _THREADS_MIN), _THREADS_MAX)
    slot_count = slot_count or threads + SPARE_SLOTS
    check_slot(slot_bytes, RING_ALIGNMENT_BYTES)
    check_route(route)
    if verify is not None:
        check_algorithm(verify)
    expected = None if manifest is None else check_manifest(manifest)
    run = Run(
        system=system,
        seam=real_driver() if driver is None else Driver(driver),
        ordinal=parse_ordinal(device),
        route=route,
        threads=threads,
        slot_bytes=slot_bytes,
        slot_count=slot_count,
        from_torch=driver is None,
        progress=progress,
        report=LoadReport(threads=threads),
        read_ahead=read_ahead,
        read_ahead_bytes=read_ahead_bytes,
        release=release,
        measure_limits=measure_limits,
        verifier=Verifier(expected) if hashing else None,
    )
    theirs = nullcontext() if driver is not None else torch_stream(run.ordinal)

    def work() -> Loaded:
        with theirs:
            return run.load(checkpoint, only, into)

    return run_aside(work, run.stop, Loaded.close)
