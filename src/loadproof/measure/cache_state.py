"""The page-cache state of a checkpoint: prepared before a leg, proven, and proven again after.

The state is what the kernel says, never what was intended.  The kernel says it only to the
owner of a file: ``cachestat`` (where there is one) refuses others and ``mincore`` tells them
that everything is resident, so for a file of somebody else's the state is ``unknown``.  On an
overlay file system ``cachestat`` counts the pages of an inode that holds none, so there
``mincore`` is asked.  What lives in memory only (tmpfs, ramfs) can never be cold.

A leg that claims to have started cold must also have fetched the bytes from storage, by the
kernel's own count; otherwise its state becomes ``unknown``.

Sources: cachestat (Linux 6.5, ``include/uapi/linux/mman.h``), mincore(2), statfs(2) for the
file systems' magic numbers, posix_fadvise(2).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_SYS_CACHESTAT = 451  # the same number on every architecture
_WARM_FRACTION = 0.99
_COLD_FRACTION = 0.01
# A cold load reads every byte from storage once; headers may have been read just before.
_READ_FRACTION = 0.98
_CHUNK_BYTES = 8 << 20
_EVICTIONS_MAX = 3
_OVERLAY_MAGIC = 0x794C7630
_MEMORY_MAGICS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
_STATFS_BYTES = 512

State = Literal["warm", "cold", "mixed", "unknown"]
Wanted = Literal["warm", "cold", "as-is"]


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


def prepare(paths: Iterable[Path], wanted: Wanted) -> CacheState:
    """Bring files into the state that is wanted, as far as it goes, and say what they are in."""
    files = list(paths)
    state = look(files)
    if wanted == "warm" and state.state != "warm":
        warm(files)
        state = look(files)
    if wanted != "cold":
        return state
    for _ in range(_EVICTIONS_MAX):
        evict(files)
        state = look(files)
        if state.state != "mixed":
            break
    in_memory = next((name for name in map(_memory_file_system, files) if name), None)
    if in_memory is not None:
        return _unknown(state.total_bytes, f"{in_memory} has no storage to be cold from")
    return state


def reprove(before: CacheState, wanted: Wanted, read_bytes: int | None) -> CacheState:
    """Check a cold state by what the leg then fetched from storage.

    Args:
        before: What was proven before the leg.
        wanted: What had been asked for.
        read_bytes: What the kernel counted as fetched from storage for the leg's process.
    """
    if wanted != "cold" or before.state != "cold":
        return before
    if read_bytes is None:
        return _unknown(before.total_bytes, "the kernel does not count what a process reads")
    if read_bytes < _READ_FRACTION * before.total_bytes:
        return _unknown(
            before.total_bytes,
            f"only {read_bytes:,} of {before.total_bytes:,} bytes came from storage",
        )
    return before


def warm(paths: Iterable[Path]) -> None:
    """Read every file once, so that a leg finds it in the page cache."""
    buffer = bytearray(_CHUNK_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def evict(paths: Iterable[Path]) -> None:
    """Ask the kernel to drop every file's pages, written back first so that it can."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # A read-only file system has nothing to write back.
                os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


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
            counted = None if _magic(path) == _OVERLAY_MAGIC else _cachestat_pages(descriptor)
            if counted is None:
                counted = _mincore_pages(descriptor, status.st_size)
        finally:
            os.close(descriptor)
        if counted is None:
            return _unknown(total, "this kernel does not say what it holds of these files")
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


def _memory_file_system(path: Path) -> str | None:
    return _MEMORY_MAGICS.get(_magic(path))


def _magic(path: Path) -> int:
    """Return the magic number of the file system that a file lies on; 0 when it is not told."""
    buffer = (ctypes.c_long * (_STATFS_BYTES // ctypes.sizeof(ctypes.c_long)))()
    refused = ctypes.CDLL(None).statfs(os.fsencode(path), ctypes.byref(buffer))
    return 0 if refused else buffer[0] & 0xFFFFFFFF


def _mincore_pages(descriptor: int, nbytes: int) -> int | None:
    """Count resident pages through a mapping that touches none of them."""
    if not nbytes:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address in {None, ctypes.c_void_p(-1).value}:
        return None
    pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    refused = libc.mincore(address, nbytes, pages)
    libc.munmap(address, nbytes)
    return None if refused else sum(bytes(pages).translate(_LOWEST_BITS))


_LOWEST_BITS = bytes(value & 1 for value in range(256))


def _cachestat_pages(descriptor: int) -> int | None:
    libc = ctypes.CDLL(None, use_errno=True)
    whole_file, counts = _Range(0, 0), _Counts()
    refused = libc.syscall(
        _SYS_CACHESTAT, descriptor, ctypes.byref(whole_file), ctypes.byref(counts), 0
    )
    return None if refused else int(counts.cached)
