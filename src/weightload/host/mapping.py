"""A read-only view of a whole file, for the routes that copy straight from it.

The mapping is shared and read-only, never private and writable: pinning or copying
from the latter has been seen to turn every page into anonymous memory, twice the
model. A file that shrinks under a mapping kills the process on access, which no
mapping route can prevent; the routes through slots cannot be hurt that way.
"""

from __future__ import annotations

import ctypes
import mmap

_PROT_READ, _MAP_SHARED = mmap.PROT_READ, mmap.MAP_SHARED


class FileMapping:
    """One mapped file.

    Attributes:
        address: of the file's first byte; a multiple of the page size.
        nbytes: the file's length.
        bytes_view: the file's bytes, read-only.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Map the file; its descriptor may be closed afterwards.

        Raises:
            OSError: the file system cannot map files.
        """
        self.nbytes = nbytes
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        address = self._libc.mmap(
            None,
            ctypes.c_size_t(nbytes),
            ctypes.c_int(_PROT_READ),
            ctypes.c_int(_MAP_SHARED),
            ctypes.c_int(descriptor),
            ctypes.c_long(0),
        )
        if address in {None, ctypes.c_void_p(-1).value}:
            number = ctypes.get_errno()
            raise OSError(number, f"mmap failed with errno {number}")
        self.address: int = address
        self._closed = False
        buffer = (ctypes.c_ubyte * nbytes).from_address(address)
        self.bytes_view = memoryview(buffer).cast("B").toreadonly()

    def touch(self, start: int, end: int) -> int:
        """Read one byte of every page; returns the number of pages."""
        return len(self.bytes_view[start : end : mmap.PAGESIZE].tobytes())

    def close(self) -> None:
        """Unmap; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._libc.munmap(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes))
