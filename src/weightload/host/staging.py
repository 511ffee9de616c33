"""Memory for the ring before it is pinned: huge pages, filled by several threads.

Letting the driver allocate pinned memory takes it 4 KiB page by page on one
thread. On an H200 machine 96 MiB took 60 ms that way and 13 ms to free; filling
huge pages here and registering them took 10 ms in the background, 2 ms in the
foreground and 2 ms to give back.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightload.host.system import System

_HUGE_PAGE_BYTES = 2 << 20
# On an H200 machine 64 MiB took 14 ms with one, 9 with two, 5 with four.
_FILLERS_MAX = 4


class Staging:
    """Private anonymous memory that fills in the background, aligned to a huge page.

    Attributes:
        address: of the first byte.
        nbytes: usable length.
    """

    def __init__(self, system: System, nbytes: int) -> None:
        self.nbytes = nbytes
        self._mapping = mmap.mmap(
            -1, nbytes + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            system.advise(self._mapping, advice)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.address = -(-base // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        pieces = min(system.cpu_count(), _FILLERS_MAX)
        share = -(-nbytes // pieces // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self._fillers = [
            threading.Thread(
                target=system.populate,
                args=(self.address + start, min(share, nbytes - start)),
                name="weightload-staging",
            )
            for start in range(0, nbytes, share)
        ]
        for filler in self._fillers:
            filler.start()

    def wait(self) -> None:
        """Wait until every page is there."""
        for filler in self._fillers:
            filler.join()

    def close(self) -> None:
        """Unmap the memory; a second call does nothing."""
        self.wait()
        self._mapping.close()
