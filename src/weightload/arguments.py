"""What callers give, looked at before anything is opened: one sentence for a slip."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from weightload.errors import UsageError
from weightload.host.system import System
from weightload.release import ReleaseQueue

# What the arguments are that are no numbers, as a type and in words.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
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
_PATHS = {"checkpoint", "path"}
# These are nothing if they are None; the others are then left to whoever takes them.
_REQUIRED = _PATHS | {"allow"}


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
        arguments: by their names in `_KINDS`.

    Raises:
        UsageError: one is of another kind.
    """
    for name, value in arguments.items():
        kinds, words = _KINDS[name]
        if not isinstance(value, kinds) and (value is not None or name in _REQUIRED):
            raise UsageError(f"{name} is {value!r}, and has to be {words}.")
        if name in _PATHS and "\0" in str(value):
            raise UsageError(f"{name} is {value!r}; no path has a zero byte in it.")


def check_names(**arguments: Collection[Any] | None) -> None:
    """Check that what lists names holds nothing else.

    Args:
        arguments: by their names in `_KINDS`, or None.

    Raises:
        UsageError: one holds something else.
    """
    for name, listed in arguments.items():
        for each in listed or ():
            if not isinstance(each, str):
                raise UsageError(f"{name} has {each!r} in it, and has to be {_KINDS[name][1]}.")


def check_tensors(into: Mapping[Any, Any]) -> None:
    """Check that a mapping's values are tensors.

    Raises:
        UsageError: one is not.
    """
    for name, tensor in into.items():
        # What a torch tensor has as well; torch itself may not be here.
        if not (callable(getattr(tensor, "data_ptr", None)) and hasattr(tensor, "dtype")):
            raise UsageError(f"into[{name!r}] is {tensor!r}, and has to be a tensor.")
