"""Layers, for reading ahead: consecutive tensors whose names carry the same number."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from weightload.checkpoint.header import Record

_NUMBERED = re.compile(r"^(.*?\.\d+)(?:\.|$)")


class Interval(NamedTuple):
    """One layer's bytes in one shard: position of the shard, first byte, first byte after."""

    shard: int
    start: int
    end: int


def layer_intervals(shards: Iterable[Iterable[Record]]) -> list[Interval]:
    """Cut the shards' tensors into layers, in loading order.

    Tensors with no number in their names (embeddings, norms, heads) form layers of their
    own, as long as they lie side by side.
    """
    intervals: list[Interval] = []
    for position, records in enumerate(shards):
        layer: str | None = None
        for record in records:
            match = _NUMBERED.match(record.name)
            name = match[1] if match else ""
            last = intervals[-1] if intervals else None
            if last is not None and last.shard == position and name == layer:
                intervals[-1] = last._replace(end=record.end)
            else:
                intervals.append(Interval(position, record.start, record.end))
            layer = name
    return intervals
