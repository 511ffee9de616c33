"""Memory peaks of a leg, watched from outside.

The parent samples the leg's process and the whole system every 20 ms from a thread, so that a
loader which blocks, or holds its interpreter's lock, is still seen.  The kernel's own
high-water mark stands beside the samples.  What cannot be had is None and named, never 0.

Sources: proc_pid_status(5) for Vm* and Rss*, proc_meminfo(5), proc_pid_io(5).
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec

INTERVAL_S = 0.02
# Waking this late means that the machine was not watched for a while.
GAP_S = 5 * INTERVAL_S

_PROCESS_FIELDS = {
    "VmRSS": "process_rss_bytes",
    "RssAnon": "process_anonymous_bytes",
    "RssFile": "process_file_bytes",
    "RssShmem": "process_shmem_bytes",
}
_SYSTEM_FIELDS = {"Cached": "system_cached_rise_bytes", "Shmem": "system_shmem_rise_bytes"}


class MemoryPeaks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most that was seen at any sample; a figure that could not be had is None.

    Attributes:
        process_rss_bytes: Resident memory of the leg's process.
        process_anonymous_bytes: Its anonymous part.
        process_file_bytes: Its file-backed part.
        process_shmem_bytes: Its shared part (on the fake, pinned and device memory are in here).
        system_available_drop_bytes: Largest drop of MemAvailable since just before the leg.
        system_cached_rise_bytes: Largest rise of Cached since then.
        system_shmem_rise_bytes: Largest rise of Shmem since then.
        samples: How many times both were read.
        gap_max_s: Longest time between two samples.
        absent: Each None above, and why.
    """

    process_rss_bytes: int | None = None
    process_anonymous_bytes: int | None = None
    process_file_bytes: int | None = None
    process_shmem_bytes: int | None = None
    system_available_drop_bytes: int | None = None
    system_cached_rise_bytes: int | None = None
    system_shmem_rise_bytes: int | None = None
    samples: int
    gap_max_s: float
    absent: dict[str, str] = {}


def read_fields(path: str) -> dict[str, int]:
    """Return the fields of a ``Name: 123 kB`` file of /proc in bytes; empty when it is gone."""
    try:
        text = Path(path).read_text("ascii", "replace")
    except OSError:
        return {}
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[2:] == ["kB"]}


def high_water_bytes() -> int | None:
    """Return the kernel's high-water mark of this process's resident memory."""
    return read_fields("/proc/self/status").get("VmHWM")


def storage_read_bytes() -> int | None:
    """Return how many bytes the kernel fetched from storage for this process so far."""
    try:
        rows = Path("/proc/self/io").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(row.split()[1]) for row in rows if row.startswith("read_bytes:")), None)


class MemorySampler:
    """Samples one process and the system until it is stopped; made just before the leg starts."""

    def __init__(self) -> None:
        self._base = read_fields("/proc/meminfo")
        self._peaks: dict[str, int] = {}
        self._samples = 0
        self._gap_max_s = 0.0
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, pid: int) -> None:
        """Begin sampling the process with this id."""
        self._thread = threading.Thread(target=self._watch, args=(pid,), daemon=True)
        self._thread.start()

    def stop(self) -> MemoryPeaks:
        """End sampling and return the peaks."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        figures = [*_PROCESS_FIELDS.values(), *_SYSTEM_FIELDS.values()]
        figures.append("system_available_drop_bytes")
        absent = {
            name: "the kernel gave no such figure, or the leg ended before the first sample"
            for name in figures
            if name not in self._peaks
        }
        return MemoryPeaks(
            **self._peaks, samples=self._samples, gap_max_s=self._gap_max_s, absent=absent
        )

    def _watch(self, pid: int) -> None:
        last = time.monotonic()
        while True:
            self._sample(pid)
            now = time.monotonic()
            self._gap_max_s = max(self._gap_max_s, now - last)
            last = now
            if self._done.wait(INTERVAL_S):
                return

    def _sample(self, pid: int) -> None:
        process = read_fields(f"/proc/{pid}/status")
        system = read_fields("/proc/meminfo")
        for field, name in _PROCESS_FIELDS.items():
            self._raise(name, process.get(field))
        for field, name in _SYSTEM_FIELDS.items():
            if field in system and field in self._base:
                self._raise(name, system[field] - self._base[field])
        if "MemAvailable" in system and "MemAvailable" in self._base:
            drop = self._base["MemAvailable"] - system["MemAvailable"]
            self._raise("system_available_drop_bytes", drop)
        self._samples += 1

    def _raise(self, name: str, value: int | None) -> None:
        if value is not None:
            self._peaks[name] = max(value, self._peaks.get(name, value))
