"""One leg of the speed table: a process that prepares, loads once and says how long.

The clock starts with everything imported and the CUDA context made, in every arm, and
stops after the device is synchronised with the tensors in hand.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from cuda.bindings import driver as cu

import weightload
from loadproof.loaders import PEERS
from qualification.limits import (
    file_reads,
    hashing,
    hashing_tensors_s,
    host_to_device,
    shards,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

DEVICE = "cuda:0"
_PEER_MODULES = {
    "instanttensor": "instanttensor",
    "fastsafetensors": "fastsafetensors",
    "runai": "runai_model_streamer",
    "touch": "gb10_load_llm",
}


def _prepare(cache: str, folder: Path) -> None:
    """Put the files into the page cache, where they are not yet, or take them out of it."""
    if cache == "warm" and (_resident_share(folder) or 0) >= 0.999:
        return
    buffer = bytearray(64 << 20)
    for path in shards(folder):
        descriptor = os.open(path, os.O_RDONLY)
        if cache == "cold":
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            offset = 0
            while got := os.preadv(descriptor, [buffer], offset):
                offset += got
        os.close(descriptor)


def _resident_share(folder: Path) -> float | None:
    """Share of the checkpoint in the page cache, by cachestat; None if it is not known."""
    system = weightload.System()
    cached = total = 0
    for path in shards(folder):
        descriptor = os.open(path, os.O_RDONLY)
        pages = system.cached_pages(descriptor)
        os.close(descriptor)
        if pages is None:
            return None
        cached += pages * system.page_bytes
        total += path.stat().st_size
    return min(1.0, cached / total)


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def _io_read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def _limits(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    if spec["section"] == "cold":
        return {"disk_gbs": file_reads(folder, 12, direct=True)}
    result = {"host_to_device_gbs": host_to_device(cu)}
    if spec["section"] == "verify":
        cores = len(os.sched_getaffinity(0))
        return result | {
            "hashing_gbs": hashing(cores),
            "hashing_one_thread_gbs": hashing(1),
            "hashing_tensors_s": hashing_tensors_s(folder, cores),
        }
    return result | {"page_cache_gbs": file_reads(folder, 12, direct=False)}


class _LeastFree:
    """The least free device memory while something runs, sampled every millisecond."""

    def __init__(self) -> None:
        self.before_bytes = self.least_bytes = torch.cuda.mem_get_info()[0]
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample)
        self._sampler.start()

    def _sample(self) -> None:
        while not self._stop.wait(0.001):
            self.least_bytes = min(self.least_bytes, torch.cuda.mem_get_info()[0])

    def taken_bytes(self) -> int:
        self._stop.set()
        self._sampler.join()
        return self.before_bytes - self.least_bytes


def _timed_load(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    ours = spec["arm"] not in PEERS
    if not ours and spec["arm"] in _PEER_MODULES:
        __import__(_PEER_MODULES[spec["arm"]])
    least_free = _LeastFree() if spec["section"] == "memory" else None
    # Resets the high-water mark of resident memory (proc(5)).
    Path("/proc/self/clear_refs").write_text("5")
    resident_before_bytes, read_before_bytes = _status_bytes("VmRSS"), _io_read_bytes()
    begun = time.perf_counter()
    if ours:
        tensors: Any = weightload.load(folder, device=DEVICE, **spec["options"])
    else:
        tensors = PEERS[spec["arm"]].load(folder, DEVICE)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    result = {
        "seconds": seconds,
        "tensors": len(tensors),
        "nbytes": nbytes,
        "gbs": nbytes / seconds / 1e9,
        "host_growth_bytes": _status_bytes("VmHWM") - resident_before_bytes,
        "disk_read_bytes": _io_read_bytes() - read_before_bytes,
    }
    if least_free is not None:
        result["device_beyond_weights_bytes"] = least_free.taken_bytes() - nbytes
    if ours:
        result["report"] = tensors.report.to_dict()
    return result


def run_leg(spec: dict[str, Any], answer: Connection) -> None:
    """Run one leg and send its result, or the error that ended it."""
    if spec.get("site"):
        sys.path.insert(0, spec["site"])
    folder = Path(spec["folder"])
    torch.empty(1, device=DEVICE)
    torch.cuda.synchronize()
    _prepare(spec["cache"], folder)
    resident = _resident_share(folder)
    try:
        result = _limits(spec, folder) if spec["arm"] == "limits" else _timed_load(spec, folder)
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result
        result = {"failed": f"{type(error).__name__}: {error}"}
    answer.send(result | {"resident_share": resident} | _facts())
    answer.close()
    # Peers' threads and pools must not turn a finished leg into a hang.
    os._exit(0)


def _facts() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "driver": int(cu.cuDriverGetVersion()[1]),
        "kernel": os.uname().release,
        "cores": len(os.sched_getaffinity(0)),
    }
