"""The operating system as the loader sees it: the calls it makes, and no others.

A seam like the driver's: tests script it with a subclass (short reads, EIO, a
refused O_DIRECT, scripted residency), and the list of methods is the complete list of what the
loader asks of Linux.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from typing import NamedTuple

# cachestat(2), Linux 6.5; the number is the same on every architecture
# (include/uapi/asm-generic/unistd.h).
_SYS_CACHESTAT = 451
# statx(2), Linux 6.1 for the alignment of direct input (include/uapi/linux/stat.h).
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_DIO_MEMORY_WORD = 152 // 4
# Devices commonly ask for 512; 4096 also satisfies drives with 4 KiB sectors.
_DIRECT_ALIGNMENT_BYTES = 4096


class _CachestatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


class Memory(NamedTuple):
    """System memory in bytes, from /proc/meminfo."""

    total: int
    available: int


class System:
    """The real Linux."""

    page_bytes = mmap.PAGESIZE

    def direct_alignment(self, descriptor: int) -> int | None:
        """What O_DIRECT needs of offsets, lengths and addresses on this file, in bytes.

        Returns:
            At least 4096, which also suits kernels and file systems that do not say;
            None where the file system says that it has no direct input.
        """
        answer = (ctypes.c_uint32 * 64)()
        result = ctypes.CDLL(None).statx(
            ctypes.c_int(descriptor),
            ctypes.c_char_p(b""),
            ctypes.c_int(_AT_EMPTY_PATH),
            ctypes.c_uint(_STATX_DIOALIGN),
            ctypes.byref(answer),
        )
        if result or not answer[0] & _STATX_DIOALIGN:
            return _DIRECT_ALIGNMENT_BYTES
        memory, offset = answer[_DIO_MEMORY_WORD], answer[_DIO_MEMORY_WORD + 1]
        return max(memory, offset, _DIRECT_ALIGNMENT_BYTES) if memory and offset else None

    def open_direct(self, descriptor: int) -> int:
        """Open the file behind `descriptor` once more, past the page cache.

        Opening by descriptor keeps the inode even when the path was replaced.

        Raises:
            OSError: the file system refuses O_DIRECT.
        """
        return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def read(self, descriptor: int, target: memoryview, offset: int) -> int:
        """Read into `target` from a file offset; returns the bytes that arrived.

        One call may deliver less than asked, and never more than 0x7ffff000 bytes.
        Python retries EINTR itself (PEP 475).
        """
        return os.preadv(descriptor, [target], offset)

    def advise_unneeded(self, descriptor: int) -> None:
        """Ask the kernel to drop the file's clean, unmapped pages from its cache."""
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, descriptor: int) -> None:
        """Close a descriptor that `open_direct` returned."""
        os.close(descriptor)

    def cached_pages(self, descriptor: int) -> int | None:
        """Pages of the file in the page cache, or None where the kernel will not say.

        cachestat is exact for the file's owner and refuses others; mincore would tell
        a non-owner that every page is resident, so it is not asked.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        stat = _Cachestat()
        whole_file = _CachestatRange(0, 0)
        result = libc.syscall(
            ctypes.c_long(_SYS_CACHESTAT),
            ctypes.c_uint(descriptor),
            ctypes.byref(whole_file),
            ctypes.byref(stat),
            ctypes.c_uint(0),
        )
        return None if result else int(stat.cached)

    def advise(self, mapping: mmap.mmap, advice: int) -> None:
        """Advise the kernel on a whole mapping; advice that it does not know is no error."""
        with suppress(OSError):
            mapping.madvise(advice)

    def populate(self, address: int, nbytes: int) -> None:
        """Fault in memory by filling it with zeros, without holding Python's lock.

        A fault locks its own area alone (Linux 6.4), where MADV_POPULATE_WRITE locks all of
        the process's memory from beginning to end: threads could not start meanwhile, and
        the driver could not allocate.
        """
        ctypes.memset(address, 0, nbytes)

    def memory(self) -> Memory:
        """Total and available memory now."""
        fields: dict[str, int] = {}
        with open("/proc/meminfo", encoding="ascii") as lines:  # noqa: PTH123 - not a path of ours
            for line in lines:
                name, _, value = line.partition(":")
                fields[name] = int(value.split()[0]) * 1024
        return Memory(fields["MemTotal"], fields["MemAvailable"])

    def cpu_count(self) -> int:
        """Processors that this process may use."""
        return len(os.sched_getaffinity(0))
