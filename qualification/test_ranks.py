"""Two ranks on two GPUs: the pages stay in the page cache until the slower one has loaded.

With one GPU both ranks use it; what the test prints says which it was.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import weightload
from fixtures.checkpoints import decoder, in_shards, write_checkpoint
from loadproof.measure.ground_truth import file_manifest, tensor_places

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event
    from pathlib import Path

    from loadproof.gate import DeviceClass

RANKS = 2
WAIT_S = 120

pytestmark = pytest.mark.timeout(600)


class Seen(NamedTuple):
    """What one rank saw."""

    rank: int
    device: str
    resident_before_bytes: int | None
    resident_after_release_bytes: int | None
    digests: dict[str, str]


def _rank(rank: int, folder: str, store_path: str, placed: Event, answers: Any) -> None:  # noqa: ANN401 - a queue of multiprocessing's
    import torch.distributed  # noqa: PLC0415 - a process of its own

    device = f"cuda:{rank % torch.cuda.device_count()}"
    # Any: torch does not declare its stores as exported.
    distributed: Any = torch.distributed
    store = distributed.FileStore(store_path, RANKS)
    store.set_timeout(timedelta(seconds=WAIT_S))
    ready = weightload.LoadReady(store, rank, RANKS, name="main", timeout_s=WAIT_S)
    with weightload.ReleaseQueue(exchanges=[ready]) as queue:
        if rank:
            # The slow rank begins when the other has placed its weights and wants to release.
            assert placed.wait(WAIT_S)
        loaded = weightload.load(folder, device=device, route="buffered", release=queue)
        digests = {
            name: hashlib.sha256(tensor.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in loaded.items()
        }
        placed.set()
    released = queue.released
    after = None if released is None else released.resident_after_bytes
    answers.put(Seen(rank, device, loaded.report.resident_before_bytes, after, digests))


def test_pages_stay_until_the_slow_rank_has_loaded(
    device_class: DeviceClass, tmp_path: Path
) -> None:
    """The fast rank releases nothing under the slow one, and both have every byte."""
    assert device_class in {"gb10", "cuda"}
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, in_shards(decoder(4, 1024, 4096, 8000), 2), seed=4)
    # Pages that still have to be written cannot be released.
    os.sync()
    truth = file_manifest(tensor_places(folder))
    context = multiprocessing.get_context("spawn")
    placed, answers = context.Event(), context.Queue()
    processes = [
        context.Process(
            target=_rank, args=(rank, str(folder), str(tmp_path / "store"), placed, answers)
        )
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        fast, slow = sorted(answers.get(timeout=WAIT_S) for _ in range(RANKS))
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    print(f"rank 0 on {fast.device}, rank 1 on {slow.device}")
    for seen in (fast, slow):
        assert seen.digests == {each.name: each.sha256 for each in truth.tensors}
    # Just written, the files are in the page cache; they still were when the slow rank began.
    assert slow.resident_before_bytes == fast.resident_before_bytes
    assert fast.resident_before_bytes is not None
    assert fast.resident_before_bytes >= truth.nbytes()
    assert slow.resident_after_release_bytes is not None
    assert slow.resident_after_release_bytes < truth.nbytes() // 100
