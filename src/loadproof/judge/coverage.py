"""How much of the load went through the code that changed.

A faster path that most bytes do not take cannot be judged by the time of the whole load, and a
receipt that times another path than the one under review has misled people before.  When the
change's routes are stated, the bytes that took them are counted from the loader's own report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from loadproof.measure.messages import Result

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadproof.measure.legs import Leg


class Coverage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bytes by route in one arm's timing legs.

    Attributes:
        route_bytes: Bytes per route, over all timing legs of the arm.
        changed_routes: The routes that the change touches; empty when nobody said.
        fraction: Bytes by the changed routes over all delivered; None when nobody said which,
            or when the loader does not report its routes.
    """

    route_bytes: dict[str, int]
    changed_routes: tuple[str, ...]
    fraction: float | None


def _told(report: dict[str, Any] | None) -> Iterator[tuple[str, int]]:
    """Yield what a loader's report says of its routes; it may say anything under that name."""
    told = (report or {}).get("route_bytes")
    for route, count in told.items() if isinstance(told, dict) else ():
        if isinstance(count, int):
            yield route, count


def cover(legs: Sequence[Leg], arm: str, changed_routes: Sequence[str]) -> Coverage:
    """Count the bytes of an arm's timing legs by route."""
    route_bytes: dict[str, int] = {}
    delivered = 0
    for leg in legs:
        if leg.purpose != "time" or leg.arm != arm or not isinstance(leg.outcome, Result):
            continue
        delivered += leg.outcome.nbytes
        for route, count in _told(leg.outcome.report):
            route_bytes[route] = route_bytes.get(route, 0) + count
    changed = sum(route_bytes.get(route, 0) for route in changed_routes)
    known = bool(changed_routes) and bool(route_bytes) and delivered > 0
    return Coverage(
        route_bytes=route_bytes,
        changed_routes=tuple(changed_routes),
        fraction=changed / delivered if known else None,
    )
