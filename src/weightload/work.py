"""One shard's part of a load, as the threads are given it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightload.checkpoint.folder import Shard
    from weightload.checkpoint.header import Record
    from weightload.plan import Span
    from weightload.routes import Route


class ShardWork(NamedTuple):
    """What to bring, how, and where to.

    Attributes:
        shard: the open file.
        records: its wanted tensors, in the order of their bytes.
        addresses: device address of each one's first byte.
        route: how to read it.
        direct_alignment: what direct reads need, in bytes; None where there are none.
        batches: what to read; each batch by one thread, in order.
    """

    shard: Shard
    records: Sequence[Record]
    addresses: Sequence[int]
    route: Route
    direct_alignment: int | None
    batches: Sequence[Sequence[Span]]


class Count(Protocol):
    """Counts what was brought."""

    def __call__(self, span: Span, reads: int, copies: int, route: Route) -> None:
        """Count one span, the calls that it took, and the route that its bytes came by."""
