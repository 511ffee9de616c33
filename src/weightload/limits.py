"""The limits of this machine, measured right after a load with the load's own ring.

A rate means little without the rate that was possible: the link's, and the disk's or
the page cache's by the same threads into the same slots.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from queue import SimpleQueue
from typing import TYPE_CHECKING

from weightload.host.reads import ShardReader
from weightload.plan import plan_spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightload.device.copies import Copies
    from weightload.device.slots import Ring
    from weightload.host.system import System
    from weightload.plan import Span
    from weightload.work import ShardWork

_COPIED_BYTES = 1 << 30
_READ_BYTES_MAX = 2 << 30


def host_to_device_gbs(ring: Ring, copies: Copies) -> float:
    """Copies of the whole ring, over and over, in GB/s."""
    memory = ring.memory
    nbytes = memory.slot_count * ring.slot_bytes
    target = int(copies.call("cuMemAlloc", nbytes))
    try:
        rounds = max(2, _COPIED_BYTES // nbytes)
        begun = time.perf_counter()
        for _ in range(rounds):
            copies.call("cuMemcpyHtoDAsync", target, memory.address, nbytes, copies.stream)
        copies.finish()
        return rounds * nbytes / (time.perf_counter() - begun) / 1e9
    finally:
        if not copies.unfinished:
            copies.call("cuMemFree", target)


def reads_gbs(
    work: Sequence[ShardWork], ring: Ring, system: System, threads: int
) -> dict[str, float]:
    """The first 2 GiB of the load read once more by each shard's route, in GB/s by route."""
    slots: SimpleQueue[memoryview] = SimpleQueue()
    for slot in ring.slots:
        slots.put(slot.bytes_view)
    rates: dict[str, float] = {}
    for route in {item.route for item in work}:
        jobs = list(_jobs([item for item in work if item.route == route], ring.slot_bytes))
        opened: dict[int, ShardReader] = {}
        direct: list[int] = []
        for item, _ in jobs:
            if id(item) not in opened:
                opened[id(item)] = _reader(item, system, direct)

        def read(job: tuple[ShardWork, Span], opened: dict[int, ShardReader] = opened) -> int:
            target = slots.get()
            opened[id(job[0])].fill(job[1], target)
            slots.put(target)
            return job[1].wanted_end

        begun = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            nbytes = sum(pool.map(read, jobs))
        rates[route] = nbytes / (time.perf_counter() - begun) / 1e9
        for descriptor in direct:
            system.close(descriptor)
    return rates


def _jobs(work: Sequence[ShardWork], slot_bytes: int) -> chain[tuple[ShardWork, Span]]:
    """Spans of the first bytes, each with its shard."""
    left = _READ_BYTES_MAX
    jobs = []
    for item in work:
        for span in plan_spans(item.records, slot_bytes, item.direct_alignment or 4096):
            if left <= 0:
                break
            jobs.append((item, span))
            left -= span.nbytes
    return chain(jobs)


def _reader(item: ShardWork, system: System, direct: list[int]) -> ShardReader:
    if item.route == "direct" and item.direct_alignment is not None:
        direct.append(system.open_direct(item.shard.descriptor))
        return ShardReader(system, item.shard, direct[-1], item.direct_alignment)
    return ShardReader(system, item.shard, item.shard.descriptor, None)
