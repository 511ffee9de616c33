"""The journal: every call and every piece of work that ran, in order."""

import threading
from typing import Any

from fakecuda.hazards import Site


class Journal:
    """What happened, cheap to write and rendered when asked for."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []

    def called(
        self, number: int, name: str, args: tuple[Any, ...], result: tuple[Any, ...], site: Site
    ) -> None:
        """Write down a call."""
        self.entries.append((number, threading.get_ident(), name, args, result, site))

    def ran(self, op: Any, start: int, count: int) -> None:
        """Write down a piece of work that the device did."""
        self.entries.append((op.call, op.kind, start, count))
