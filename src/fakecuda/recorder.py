"""A recorder around any driver: the same journal, whoever does the work.

Wrapped around the real binding it writes what a program asked of a real GPU; that
journal and the fake's for the same program can be compared.
"""

import threading
from collections.abc import Callable
from typing import Any

from fakecuda.hazards import caller_site
from fakecuda.journal import Journal
from fakecuda.surface import SURFACE


class Recorder:
    """Passes every call on and writes it down.

    Args:
        cu: `cuda.bindings.driver`, or a `FakeCuda`.

    Attributes:
        journal: What was called.
    """

    def __init__(self, cu: Any) -> None:
        self.journal = Journal()
        self._cu = cu
        self._count = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        """Enumerations and constants as they are; entry points of the table recorded."""
        target = getattr(self._cu, name)
        if name not in SURFACE:
            return target
        recorded = self._recorded(name, target)
        setattr(self, name, recorded)
        return recorded

    def _recorded(
        self, name: str, target: Callable[..., tuple[Any, ...]]
    ) -> Callable[..., tuple[Any, ...]]:
        def call(*args: Any) -> tuple[Any, ...]:
            result = target(*args)
            plain = tuple(_plain(value) for value in result)
            # The order written is the order in which calls returned.
            with self._lock:
                self._count += 1
                numbers = tuple(int(value) for value in args)
                self.journal.called(self._count, name, numbers, plain, caller_site())
            return result

        return call


def _plain(value: Any) -> Any:
    """Handles as integers; bytes, floats and None as they are."""
    if value is None or isinstance(value, (bytes, float)):
        return value
    return int(value)
