"""Giving things back in order, without losing the first error.

After a CUDA context is lost every clean-up call fails as well. A plain ExitStack
would then raise the last of those failures; here they become notes on the error
that came first.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from weightload.errors import WeightloadError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


# Held until the process ends, so that Python does not free what a device may still touch.
_ABANDONED: list[object] = []


def abandon(resource: object) -> None:
    """Leave a resource as it is for good, on purpose."""
    _ABANDONED.append(resource)


class Cleanup(ExitStack):
    """An ExitStack whose undo steps never hide an earlier error."""

    def undo(self, step: Callable[..., object], *arguments: object) -> None:
        """Register a step, run in reverse order of registration."""

        def leave(
            _kind: type[BaseException] | None,
            first: BaseException | None,
            _trace: TracebackType | None,
        ) -> bool:
            try:
                step(*arguments)
            except WeightloadError as late:
                if first is None:
                    raise
                first.add_note(f"while cleaning up: {late}")
            return False

        self.push(leave)
