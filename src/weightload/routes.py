"""Which route for which shard, and why.

Reading past the page cache is best for bytes that are not in it and wasteful for
bytes that are, so `auto` looks at the measured residency of each shard. Where the
kernel will not say (a file of another owner), it reads through the cache, which is
right for warm files and never wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from weightload.errors import UsageError

if TYPE_CHECKING:
    from weightload.checkpoint.folder import Shard
    from weightload.host.system import System

Route = Literal["direct", "buffered"]
RouteChoice = Literal["auto", "direct", "buffered"]

# A cached page costs a memcpy and an uncached one a device read, several times
# slower: reading past the cache pays once most of the shard is not in it.
_RESIDENT_SHARE_FOR_BUFFERED = 0.5


@dataclass(frozen=True)
class RouteDecision:
    """One shard's route, and the reason in words."""

    shard: str
    route: Route
    reason: str


def check_route(choice: str) -> RouteChoice:
    """Check a caller's word for a route.

    Raises:
        UsageError: it is not one of the routes.
    """
    known = get_args(RouteChoice)
    if choice not in known:
        raise UsageError(f"{choice!r} is not a route; use one of {', '.join(known)}.")
    return choice  # type: ignore[return-value] # membership was checked just above


def decide(choice: RouteChoice, shard: Shard, system: System) -> RouteDecision:
    """Decide one shard's route."""
    if choice != "auto":
        return RouteDecision(shard.name, choice, "asked for")
    cached_pages = system.cached_pages(shard.descriptor)
    if cached_pages is None:
        return RouteDecision(shard.name, "buffered", "residency is not known")
    share = min(1.0, cached_pages * system.page_bytes / max(1, shard.identity.file_bytes))
    route: Route = "buffered" if share >= _RESIDENT_SHARE_FOR_BUFFERED else "direct"
    return RouteDecision(shard.name, route, f"{share:.0%} of it is in the page cache")
