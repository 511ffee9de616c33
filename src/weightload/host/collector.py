"""Python's garbage collector, held off while a great many objects are made at once.

Every few hundred new objects it looks for cycles among them, and now and then among all
objects of the process. A header of 60,000 tensors makes none, and took twice as long.
"""

from __future__ import annotations

import gc
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Holding:
    """Who holds the collector off, in the whole process, and how the first one found it."""

    lock = threading.Lock()
    holders = 0
    found_enabled = False


@contextmanager
def collector_held_off() -> Iterator[None]:
    """Hold the collector off in the body; the last of several leaves it as the first found it."""
    with _Holding.lock:
        if not _Holding.holders:
            _Holding.found_enabled = gc.isenabled()
            gc.disable()
        _Holding.holders += 1
    try:
        yield
    finally:
        with _Holding.lock:
            _Holding.holders -= 1
            if not _Holding.holders and _Holding.found_enabled:
                gc.enable()
