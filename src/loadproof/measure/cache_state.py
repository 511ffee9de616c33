"""The page-cache state of a checkpoint: prepared before a leg, then looked at and recorded.

The state is what the kernel says, never what was intended.  The kernel says it only to the
owner of a file: ``cachestat`` refuses others and ``mincore`` tells them that everything is
resident, so for a file of somebody else's the state is ``unknown``.

Sources: cachestat (Linux 6.5, ``include/uapi/linux/mman.h``), mincore(2).
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_SYS_CACHESTAT = 451  # the same number on every architecture
_WARM_FRACTION = 0.99
_COLD_FRACTION = 0.01
_CHUNK_BYTES = 8 << 20

State = Literal["warm", "cold", "mixed", "unknown"]


class CacheState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of a checkpoint was in the page cache.

    Attributes:
        state: ``warm`` from 99 % on, ``cold`` up to 1 %, ``mixed`` between.
        resident_bytes: What was resident, in whole pages; None when it is unknown.
        total_bytes: Length of all files.
        why: Why the state is unknown, else None.
    """

    state: State
    resident_bytes: int | None
    total_bytes: int
    why: str | None = None


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def warm(paths: Iterable[Path]) -> None:
    """Read every file once, so that a leg finds it in the page cache."""
    buffer = bytearray(_CHUNK_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def look(paths: Iterable[Path]) -> CacheState:
    """Ask the kernel how much of these files is in the page cache now."""
    total, resident = 0, 0
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            total += status.st_size
            if os.geteuid() not in {0, status.st_uid}:
                return _unknown(total, "the files belong to another user")
            counted = _cachestat_pages(descriptor)
        finally:
            os.close(descriptor)
        if counted is None:
            return _unknown(total, "this kernel has no cachestat for these files")
        resident += min(counted * os.sysconf("SC_PAGE_SIZE"), status.st_size)
    fraction = resident / total if total else 1.0
    state: State = "mixed"
    if fraction >= _WARM_FRACTION:
        state = "warm"
    elif fraction <= _COLD_FRACTION:
        state = "cold"
    return CacheState(state=state, resident_bytes=resident, total_bytes=total)


def _unknown(total_bytes: int, why: str) -> CacheState:
    return CacheState(state="unknown", resident_bytes=None, total_bytes=total_bytes, why=why)


def _cachestat_pages(descriptor: int) -> int | None:
    libc = ctypes.CDLL(None, use_errno=True)
    whole_file, counts = _Range(0, 0), _Counts()
    refused = libc.syscall(
        _SYS_CACHESTAT, descriptor, ctypes.byref(whole_file), ctypes.byref(counts), 0
    )
    return None if refused else int(counts.cached)
