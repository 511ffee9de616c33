"""Memory peaks of a leg, watched from outside.

The parent samples the leg's process and the whole system every 20 ms from a thread, so that a
loader which blocks, or holds its interpreter's lock, is still seen.  The kernel's own
high-water mark stands beside the samples.  What cannot be had is None and named, never 0; a
sampler that was kept waiting counts a gap and stretches no time over it.

On unified memory the process figures miss what the driver allocated: there the drop of
MemAvailable is the figure, and the others say what it was made of.

Sources: proc_pid_status(5) for Vm* and Rss*, proc_meminfo(5), proc_pid_io(5).
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERVAL_S = 0.02
# Waking this late means that the machine was not watched for a while.
GAP_S = 5 * INTERVAL_S

_PROCESS_FIELDS = {
    "VmRSS": "process_rss_bytes",
    "RssAnon": "process_anonymous_bytes",
    "RssFile": "process_file_bytes",
    "RssShmem": "process_shmem_bytes",
}
_SYSTEM_FIELDS = {
    "Cached": "system_cached_rise_bytes",
    "Shmem": "system_shmem_rise_bytes",
    "AnonPages": "system_anonymous_rise_bytes",
}
_CURVE_POINTS_MAX = 256
# smaps takes the process's own lock, so it is read seldom, and never in a timing leg.
_MAPPINGS_INTERVAL_S = 0.1


class CurvePoint(msgspec.Struct, frozen=True, array_like=True):
    """One sample: seconds since the leg began, then bytes (None where there was no figure)."""

    at_s: float
    available_drop: int | None
    cached_rise: int | None
    process_anonymous: int | None
    process_shmem: int | None
    process_file: int | None


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
        system_anonymous_rise_bytes: Largest rise of AnonPages since then.
        checkpoint_anonymous_bytes: Most anonymous memory in mappings of the checkpoint's files:
            private pages that turned into copies.  None in timing legs, which are not looked
            into that closely.
        samples: How many times both were read.
        gap_max_s: Longest time between two samples.
        gaps: How often that was more than five times the interval.
        curve: The samples themselves, thinned; only where a reader will see them.
        absent: Each None above, and why.
    """

    process_rss_bytes: int | None = None
    process_anonymous_bytes: int | None = None
    process_file_bytes: int | None = None
    process_shmem_bytes: int | None = None
    system_available_drop_bytes: int | None = None
    system_cached_rise_bytes: int | None = None
    system_shmem_rise_bytes: int | None = None
    system_anonymous_rise_bytes: int | None = None
    checkpoint_anonymous_bytes: int | None = None
    samples: int
    gap_max_s: float
    gaps: int = 0
    curve: tuple[CurvePoint, ...] = ()
    absent: dict[str, str] = {}


def read_fields(path: str) -> dict[str, int]:
    """Return the fields of a ``Name: 123 kB`` file of /proc in bytes; empty when it is gone."""
    try:
        text = Path(path).read_text("ascii", "replace")
    except OSError:
        return {}
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[2:] == ["kB"]}


def high_water_bytes(pid: int) -> int | None:
    """Return the kernel's high-water mark of a process's resident memory."""
    return read_fields(f"/proc/{pid}/status").get("VmHWM")


def storage_read_bytes(pid: int) -> int | None:
    """Return how many bytes the kernel fetched from storage for a process so far."""
    try:
        rows = Path(f"/proc/{pid}/io").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(row.split()[1]) for row in rows if row.startswith("read_bytes:")), None)


def anonymous_bytes(pid: int, file_names: Sequence[str]) -> int | None:
    """Sum the anonymous memory in a process's mappings of files with these names."""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    total, inside = 0, False
    for line in lines:
        head = line.split(maxsplit=5)
        if head and "-" in head[0] and not head[0].endswith(":"):
            inside = head[5:] != [] and head[5].rpartition("/")[2] in file_names
        elif inside and line.startswith("Anonymous:"):
            total += int(line.split()[1]) * 1024
    return total


class MemorySampler:
    """Samples one process and the system until it is stopped; made just before the leg starts."""

    def __init__(self, mapped_files: Sequence[str] = ()) -> None:
        """Read the base line.

        Args:
            mapped_files: Names of the checkpoint's files, to watch their mappings for private
                copies; empty for a timing leg.
        """
        self._base = read_fields("/proc/meminfo")
        self._mapped_files = mapped_files
        self._peaks: dict[str, int] = {}
        self._curve: list[CurvePoint] = []
        self._stride = 1
        self._samples = 0
        self._gap_max_s = 0.0
        self._gaps = 0
        self._begun = self._mappings_at = time.monotonic()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = self._sampled_pid = 0

    def start(self, pid: int) -> None:
        """Begin sampling the process with this id."""
        self._pid = self._sampled_pid = pid
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def turn_to(self, pid: int) -> None:
        """Sample another process from now on; what the first one took is forgotten."""
        self._pid = pid

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
        if "checkpoint_anonymous_bytes" not in self._peaks:
            absent["checkpoint_anonymous_bytes"] = (
                "the kernel shows no mappings of this process"
                if self._mapped_files
                else "a timing leg's mappings are not read, since that takes the leg's own lock"
            )
        return MemoryPeaks(
            **self._peaks,
            samples=self._samples,
            gap_max_s=self._gap_max_s,
            gaps=self._gaps,
            curve=tuple(self._curve),
            absent=absent,
        )

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            pid = self._pid
            if pid != self._sampled_pid:
                self._sampled_pid = pid
                self._forget_the_process()
            self._sample(pid)
            now = time.monotonic()
            self._gap_max_s = max(self._gap_max_s, now - last)
            self._gaps += now - last > GAP_S
            last = now
            if self._done.wait(INTERVAL_S):
                return

    def _sample(self, pid: int) -> None:
        process = read_fields(f"/proc/{pid}/status")
        system = read_fields("/proc/meminfo")
        for field, name in _PROCESS_FIELDS.items():
            self._raise(name, process.get(field))
        for field, name in _SYSTEM_FIELDS.items():
            self._raise(name, self._rise(system, field))
        rise = self._rise(system, "MemAvailable")
        drop = None if rise is None else -rise
        self._raise("system_available_drop_bytes", drop)
        now = time.monotonic()
        if self._mapped_files and now >= self._mappings_at:
            copied = anonymous_bytes(pid, self._mapped_files)
            self._raise("checkpoint_anonymous_bytes", copied)
            self._mappings_at = now + _MAPPINGS_INTERVAL_S
        if self._samples % self._stride == 0:
            self._keep(
                CurvePoint(
                    now - self._begun,
                    drop,
                    self._rise(system, "Cached"),
                    process.get("RssAnon"),
                    process.get("RssShmem"),
                    process.get("RssFile"),
                )
            )
        self._samples += 1

    def _forget_the_process(self) -> None:
        for name in (*_PROCESS_FIELDS.values(), "checkpoint_anonymous_bytes"):
            self._peaks.pop(name, None)
        self._curve.clear()

    def _keep(self, point: CurvePoint) -> None:
        """Add to the curve; when it is full, every second point goes and the stride doubles."""
        self._curve.append(point)
        if len(self._curve) >= _CURVE_POINTS_MAX:
            del self._curve[1::2]
            self._stride *= 2

    def _rise(self, system: dict[str, int], field: str) -> int | None:
        if field not in system or field not in self._base:
            return None
        return system[field] - self._base[field]

    def _raise(self, name: str, value: int | None) -> None:
        if value is not None:
            self._peaks[name] = max(value, self._peaks.get(name, value))
