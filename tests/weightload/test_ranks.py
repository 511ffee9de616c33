"""The load-ready exchange, with threads and with processes as ranks."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed

import weightload

if TYPE_CHECKING:
    from pathlib import Path

# Any: torch does not declare its stores as exported.
distributed: Any = torch.distributed
RANKS = 3


def exchange(store: Any, rank: int, timeout_s: float = 30.0) -> weightload.LoadReady:
    """One rank's side of the exchange."""
    return weightload.LoadReady(store, rank, RANKS, name="main", timeout_s=timeout_s)


def test_nobody_passes_before_the_slowest() -> None:
    """No rank returns before every rank has called."""
    store = distributed.HashStore()
    passed: list[int] = []
    late = threading.Event()

    def rank(number: int) -> list[int]:
        if number == RANKS - 1:
            late.wait(30)
        before = list(passed)
        exchange(store, number)()
        passed.append(number)
        return before

    with ThreadPoolExecutor(RANKS) as pool:
        calls = [pool.submit(rank, number) for number in range(RANKS)]
        late.set()
        results = [call.result(30) for call in calls]
    assert results[-1] == []
    assert sorted(passed) == list(range(RANKS))


def test_a_missing_rank_is_named() -> None:
    """A time-out says which ranks it waited for."""
    store = distributed.HashStore()
    with pytest.raises(weightload.RankError, match=r"rank 1, 2 was not ready.*'main'"):
        exchange(store, 0, timeout_s=0.05)()


def test_a_failed_rank_is_the_error_everywhere() -> None:
    """The others stop at once, with that rank's own words."""
    store = distributed.HashStore()
    exchange(store, 1).fail(ValueError("shard 7 is cut"))
    for rank in (0, 2):
        with pytest.raises(
            weightload.RankError, match=r"rank 1 failed.*ValueError: shard 7 is cut"
        ):
            exchange(store, rank)()


def _process(path: str, rank: int) -> None:
    store = distributed.FileStore(path, RANKS)
    store.set_timeout(timedelta(seconds=30))
    exchange(store, rank)()


def test_processes_as_ranks(tmp_path: Path) -> None:
    """Over a store that processes share, all of them pass."""
    context = multiprocessing.get_context("spawn")
    path = str(tmp_path / "store")
    processes = [context.Process(target=_process, args=(path, rank)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * RANKS
