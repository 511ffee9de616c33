"""Tying a process to the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
# Opened beforehand: between a fork and an exec nothing may wait for a lock.
_libc = ctypes.CDLL(None)


def end_with(parent: int) -> None:
    """Have the kernel end this process when its parent dies, however that dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It was gone before the line above.
        os._exit(1)
