"""The limits of this machine, measured in the same run as the loaders that they bound."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightload.checkpoint.folder import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CHUNK_BYTES = 4 << 20
_COPY_BYTES = 64 << 20
_COPIES = 128


def _rate(nbytes: int, begun: float) -> float:
    """Bytes per second since `begun`, in GB/s."""
    return nbytes / (time.perf_counter() - begun) / 1e9


def _in_threads(count: int, work: Iterable[Any], do: Callable[[int, Any], int]) -> float:
    """Spread work over threads; returns GB/s over what `do(thread, item)` returned in bytes."""
    waiting, lock, totals = iter(work), threading.Lock(), [0] * count

    def drain(number: int) -> None:
        while True:
            with lock:
                item = next(waiting, None)
            if item is None:
                return
            totals[number] += do(number, item)

    threads = [threading.Thread(target=drain, args=(number,)) for number in range(count)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _rate(sum(totals), begun)


def host_to_device(cu: Any) -> float:  # noqa: ANN401 - the binding publishes no types
    """Copies of 64 MiB from pinned memory on one stream, in GB/s."""
    _, pinned = cu.cuMemHostAlloc(_COPY_BYTES, 1)
    _, device = cu.cuMemAlloc(_COPY_BYTES)
    _, stream = cu.cuStreamCreate(1)
    ctypes.memset(int(pinned), 7, _COPY_BYTES)
    cu.cuMemcpyHtoDAsync(device, int(pinned), _COPY_BYTES, stream)
    cu.cuStreamSynchronize(stream)
    begun = time.perf_counter()
    for _ in range(_COPIES):
        cu.cuMemcpyHtoDAsync(device, int(pinned), _COPY_BYTES, stream)
    cu.cuStreamSynchronize(stream)
    rate = _rate(_COPIES * _COPY_BYTES, begun)
    cu.cuMemFree(device)
    cu.cuMemFreeHost(int(pinned))
    cu.cuStreamDestroy(stream)
    return rate


def file_reads(folder: Path, threads: int, *, direct: bool) -> float:
    """Every shard read once in 4 MiB pieces by several threads, in GB/s."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    files = [(os.open(path, flags), path.stat().st_size) for path in shards(folder)]
    raw = [ctypes.create_string_buffer(CHUNK_BYTES + 4096) for _ in range(threads)]
    targets = []
    for buffer in raw:
        address = -(-ctypes.addressof(buffer) // 4096) * 4096
        targets.append(memoryview((ctypes.c_ubyte * CHUNK_BYTES).from_address(address)).cast("B"))
    work = [
        (descriptor, offset)
        for descriptor, file_bytes in files
        for offset in range(0, file_bytes, CHUNK_BYTES)
    ]
    rate = _in_threads(
        threads, work, lambda number, item: os.preadv(item[0], [targets[number]], item[1])
    )
    for descriptor, _ in files:
        os.close(descriptor)
    return rate


def hashing(threads: int) -> float:
    """SHA-256 over random bytes in memory by several threads, in GB/s."""
    content = os.urandom(CHUNK_BYTES)

    def do(_number: int, _item: int) -> int:
        hashlib.sha256(content).digest()
        return CHUNK_BYTES

    return _in_threads(threads, range(64 * threads), do)


def hashing_tensors_s(folder: Path, threads: int) -> float:
    """SHA-256 of tensors of a checkpoint's sizes, from memory, largest first, in seconds.

    A digest is one chain that no second thread can share, so the largest tensor's may take
    longer than all the others on the other cores.
    """
    with open_checkpoint(folder) as files:
        sizes = [record.nbytes for each in files.shards for record in each.header.records]
    content = memoryview(os.urandom(16 * CHUNK_BYTES))

    def do(_number: int, nbytes: int) -> int:
        digest = hashlib.sha256()
        for offset in range(0, nbytes, CHUNK_BYTES):
            first = offset % len(content)
            digest.update(content[first : first + min(CHUNK_BYTES, nbytes - offset)])
        digest.digest()
        return nbytes

    rate = _in_threads(threads, sorted(sizes, reverse=True), do)
    return sum(sizes) / rate / 1e9


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder."""
    return sorted(Path(folder).glob("*.safetensors"))
