"""What differs between two receipts, in words that do not depend on their order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadproof.report.receipt import Statement

# Raw samples differ in every run; what they come to is compared.
_LEFT_OUT = ("legs", "seed")


def changes(old: Statement, new: Statement) -> list[tuple[str, str, str]]:
    """Return every field that differs: its path, the old value and the new one."""
    left, right = msgspec.to_builtins(old), msgspec.to_builtins(new)
    for each in (left, right):
        for name in _LEFT_OUT:
            del each["predicate"][name]
        for contrast in each["predicate"]["conclusion"]["verdict"]["contrasts"].values():
            del contrast["per_block"]
    return list(_changes("", left, right))


def _changes(path: str, left: Any, right: Any) -> Iterator[tuple[str, str, str]]:  # noqa: ANN401
    if isinstance(left, dict) and isinstance(right, dict):
        for key in sorted(left.keys() | right.keys()):
            yield from _changes(f"{path}.{key}", left.get(key), right.get(key))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        for place in range(max(len(left), len(right))):
            one = left[place] if place < len(left) else None
            other = right[place] if place < len(right) else None
            yield from _changes(f"{path}[{place}]", one, other)
    elif left != right:
        yield path.lstrip("."), _short(left), _short(right)


def _short(value: Any) -> str:  # noqa: ANN401 -- any JSON
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."
