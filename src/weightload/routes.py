"""Which route for which shard, and why.

Reading past the page cache is best for bytes that are not in it and wasteful for
bytes that are, so `auto` looks at the measured residency of each shard. Where the
kernel will not say (a file of another owner), it reads through the cache, which is
right for warm files and never wrong. The other routes are taken only when asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from weightload.errors import UsageError

if TYPE_CHECKING:
    from weightload.checkpoint.folder import Shard
    from weightload.device.profile import DeviceProfile
    from weightload.host.system import System

# How bytes come. `host` is not for asking: it is how a model that is in memory is moved.
Route = Literal[
    "direct", "buffered", "pageable", "touch", "readonly-map", "registered-map", "host"
]
ROUTES: tuple[Route, ...] = tuple(route for route in get_args(Route) if route != "host")
AUTO = "auto"

# Routes whose bytes pass through the ring, and those that copy from a mapping.
STAGED_ROUTES: frozenset[Route] = frozenset({"direct", "buffered", "pageable"})

# A cached page costs a memcpy and an uncached one a device read, several times
# slower: reading past the cache pays once most of the shard is not in it.
_RESIDENT_SHARE_FOR_BUFFERED = 0.5


@dataclass(frozen=True)
class RouteDecision:
    """One shard's route, and the reason in words."""

    shard: str
    route: Route
    reason: str


def check_route(choice: str) -> None:
    """Check a caller's word for a route.

    Raises:
        UsageError: it is not one of the routes.
    """
    # A tuple: what cannot be hashed is no route either.
    if choice not in (AUTO, *ROUTES):
        raise UsageError(f"{choice!r} is not a route; use one of {AUTO}, {', '.join(ROUTES)}.")


def check_device(choice: str, profile: DeviceProfile) -> None:
    """Check that a device can take a mapping route.

    Raises:
        UsageError: it cannot.
    """
    if choice == "readonly-map" and not profile.host_page_tables:
        raise UsageError(
            f"{profile.name} does not read memory through the host's page tables, so "
            f"readonly-map would only be a pageable copy; use registered-map or auto."
        )
    if choice == "registered-map" and not profile.read_only_register:
        raise UsageError(
            f"{profile.name} cannot register read-only memory, which registered-map needs; "
            f"use auto."
        )


def decide(choice: str, shard: Shard, system: System) -> RouteDecision:
    """Decide one shard's route; `choice` is `auto` or a route."""
    if choice != AUTO:
        return RouteDecision(shard.name, cast("Route", choice), "asked for")
    cached_pages = system.cached_pages(shard.descriptor)
    if cached_pages is None:
        return RouteDecision(shard.name, "buffered", "residency is not known")
    share = min(1.0, cached_pages * system.page_bytes / max(1, shard.identity.file_bytes))
    route: Route = "buffered" if share >= _RESIDENT_SHARE_FOR_BUFFERED else "direct"
    return RouteDecision(shard.name, route, f"{share:.0%} of it is in the page cache")
