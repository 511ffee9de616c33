"""From the legs of a league to its table: rates, ratios to the first loader, peaks, weights."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

import msgspec

from loadproof.judge.statistics import Contrast, contrast
from loadproof.measure.messages import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadproof.measure.league import League
    from loadproof.measure.legs import Leg


class Standing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One loader's line.

    Attributes:
        name: The loader, with its options.
        median_s: Median load time; None when it was not timed to the end.
        rates_gbs: Every leg's bytes over its time, in GB/s.
        against_first: Log ratio of the first loader's time to this one's, by block: above zero
            is faster than the first; None for the first itself or an incomplete loader.
        host_peak_bytes: Largest anonymous plus shared memory of its process.
        available_drop_bytes: Largest drop of MemAvailable.
        weights: ``equal``, or how many tensors differ, or ``unknown``.
        failure: Why it has no time, else None.
    """

    name: str
    median_s: float | None
    rates_gbs: tuple[float, ...]
    against_first: Contrast | None
    host_peak_bytes: int | None
    available_drop_bytes: int | None
    weights: str
    failure: str | None


def stand(league: League, blocks: int, confidence: float) -> tuple[Standing, ...]:
    """Return the lines of a league, the fastest first, those without a time last.

    Args:
        league: What was seen.
        blocks: Blocks that were fixed beforehand.
        confidence: Of the interval of each ratio.
    """
    first = league.entries[0].name
    lines = []
    for entry in league.entries:
        legs = [leg for leg in league.legs if leg.purpose == "time" and leg.arm == entry.name]
        results = [leg.outcome for leg in legs if isinstance(leg.outcome, Result)]
        complete = blocks > 0 and len(results) == 2 * blocks
        weights = f"{len(entry.differences)} differ" if entry.differences else "equal"
        lines.append(
            Standing(
                name=entry.name,
                median_s=statistics.median(r.elapsed_s for r in results) if complete else None,
                rates_gbs=tuple(r.nbytes / r.elapsed_s / 1e9 for r in results),
                against_first=_against(league.legs, first, entry.name, blocks, confidence),
                host_peak_bytes=_peak(
                    [
                        (leg.memory.process_anonymous_bytes, leg.memory.process_shmem_bytes)
                        for leg in legs
                    ]
                ),
                available_drop_bytes=_peak(
                    [(leg.memory.system_available_drop_bytes,) for leg in legs]
                ),
                weights="unknown" if entry.failure and not results else weights,
                failure=entry.failure,
            )
        )
    return tuple(sorted(lines, key=lambda line: line.median_s or math.inf))


def _against(
    legs: Sequence[Leg], first: str, name: str, blocks: int, confidence: float
) -> Contrast | None:
    """Reduce each block to one log ratio, each loader's mean of two logs."""
    log_time: dict[tuple[int, str], list[float]] = {}
    for leg in legs:
        if leg.purpose == "time" and leg.block is not None and isinstance(leg.outcome, Result):
            log_time.setdefault((leg.block, leg.arm), []).append(math.log(leg.outcome.elapsed_s))
    pairs = [
        (log_time.get((block, first), []), log_time.get((block, name), []))
        for block in range(blocks)
    ]
    if first == name or not pairs or any(len(one) != 2 or len(two) != 2 for one, two in pairs):
        return None
    return contrast([(sum(one) - sum(two)) / 2 for one, two in pairs], confidence)


def _peak(rows: Sequence[tuple[int | None, ...]]) -> int | None:
    known = [sum(value or 0 for value in row) for row in rows if None not in row]
    return max(known, default=None)
