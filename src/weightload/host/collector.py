"""Python's garbage collector, held off while a great many objects are made at once.

Every few hundred new objects it looks for cycles among them, and now and then among all
objects of the process. A header of 60,000 tensors makes none, and took twice as long.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def collector_held_off() -> Iterator[None]:
    """Hold the collector off in the body, and leave it as it was found."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
