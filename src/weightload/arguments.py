"""What callers give, looked at before anything is opened: one sentence for a slip."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from weightload.errors import UsageError
from weightload.host.system import System
from weightload.release import ReleaseQueue

# What the arguments are that are no numbers, as a type and in words.
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "checkpoint": ((str, os.PathLike), "the path of a file or a folder"),
    "path": ((str, os.PathLike), "the path of a folder, or a repository's id"),
    "only": ((Collection,), "a list of names or patterns"),
    "allow": ((Collection,), "a list of names or patterns"),
    "into": ((Mapping,), "a mapping of names to tensors"),
    "manifest": ((Mapping,), "a mapping of names to digests"),
    "progress": ((Callable,), "a function of two numbers"),  # type: ignore[dict-item]
    "release": ((ReleaseQueue, bool), "True, False, None or a ReleaseQueue"),
    "system": ((System,), "a weightload.System"),
}
# These are nothing if they are None; the others are then left to whoever takes them.
_REQUIRED = {"checkpoint", "path", "allow"}


def check_counts(**arguments: tuple[Any, int]) -> None:
    """Check that arguments are whole numbers, or None where a number is chosen.

    Args:
        arguments: by name, the value and the least that it may be.

    Raises:
        UsageError: one is not.
    """
    for name, (value, least) in arguments.items():
        if value is None and name in {"threads", "slot_count"}:
            continue
        # A bool is an int to Python and a slip to a caller.
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UsageError(
                f"{name} is {value!r}, and has to be a whole number of at least {least}."
            )


def check_kinds(**arguments: Any) -> None:  # noqa: ANN401 - not checked yet
    """Check what the arguments are that are no numbers.

    Args:
        arguments: by their names in `KINDS`.

    Raises:
        UsageError: one is of another kind.
    """
    for name, value in arguments.items():
        kinds, words = KINDS[name]
        if not isinstance(value, kinds) and (value is not None or name in _REQUIRED):
            raise UsageError(f"{name} is {value!r}, and has to be {words}.")
