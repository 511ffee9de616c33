"""Exact small-sample statistics over one number per block.

A trial has a handful of blocks, so nothing here is asymptotic: the signed-rank interval comes
from the exact null distribution, counted by dynamic programming, and the sign-flip test counts
every sign pattern.  Both ask only that a block's contrast be symmetric about its centre, which
mirrored blocks of a same-against-same comparison give.

Sources: Hodges and Lehmann (1963) for the estimate; Hollander, Wolfe and Chicken,
*Nonparametric Statistical Methods*, section 3.3, for the interval from Walsh averages.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from functools import cache
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


class Contrast(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one arm differs from the baseline, as log ratios: above zero is faster.

    Attributes:
        estimate: Hodges-Lehmann estimate.
        low: Lower end of the interval.
        high: Upper end of the interval.
        confidence: Exact confidence of the interval, at least what was asked for.
        p_sign_flip: Two-sided exact p of "no difference", by flipping signs of whole blocks.
        per_block: The contrast of each block, in the order in which they ran.
    """

    estimate: float
    low: float
    high: float
    confidence: float
    p_sign_flip: float
    per_block: tuple[float, ...]


def signed_rank_counts(n: int) -> list[int]:
    """Return, for each rank sum 0 .. n(n+1)/2, how many of the 2**n sign patterns give it."""
    counts = [1]
    for rank in range(1, n + 1):
        grown = counts + [0] * rank
        for total, count in enumerate(counts):
            grown[total + rank] += count
        counts = grown
    return counts


@cache
def _interval_depth(n: int, confidence: float) -> tuple[int, float]:
    """Return how many extreme Walsh averages each end drops, and the exact confidence kept.

    A depth of 0 keeps all of them, which is the best ``n`` values can do; its confidence may
    then be below what was asked for, and the caller must not use it.
    """
    counts = signed_rank_counts(n)
    tail_allowed = (1.0 - confidence) / 2.0
    tail, depth = 0, 0
    while depth < len(counts) // 2 and (tail + counts[depth]) / 2**n <= tail_allowed:
        tail += counts[depth]
        depth += 1
    # Dropping ``depth - 1`` averages at each end leaves P(T <= depth - 1) in each tail.
    return max(depth - 1, 0), 1.0 - 2.0 * (tail if depth else counts[0]) / 2**n


def sign_flip_p(values: Sequence[float]) -> float:
    """Return the exact two-sided p-value of the mean being zero under sign flips.

    All 2**n patterns are counted without listing them: each half of the values has 2**(n/2)
    signed sums, and for a sum of the left half a bisection counts the right half's that reach.
    """
    # Rounding must not make the observed pattern look larger than itself in another order.
    threshold = abs(sum(values)) * (1.0 - 1e-12)
    if threshold == 0:
        return 1.0
    middle = len(values) // 2
    left, right = _signed_sums(values[:middle]), sorted(_signed_sums(values[middle:]))
    hits = sum(
        len(right)
        - bisect_left(right, threshold - total)
        + bisect_right(right, -threshold - total)
        for total in left
    )
    return hits / (len(left) * len(right))


def _signed_sums(values: Sequence[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums = [total + value for total in sums] + [total - value for total in sums]
    return sums


def contrast(values: Sequence[float], confidence: float) -> Contrast:
    """Estimate the centre of per-block contrasts, with its exact interval.

    Args:
        values: One log ratio per block; at least one.
        confidence: Two-sided confidence wanted.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("a contrast needs at least one block")
    walsh = sorted((one + other) / 2 for one, other in combinations_with_replacement(values, 2))
    depth, exact = _interval_depth(len(values), confidence)
    return Contrast(
        estimate=statistics.median(walsh),
        low=walsh[depth],
        high=walsh[-1 - depth],
        confidence=exact,
        p_sign_flip=sign_flip_p(values),
        per_block=tuple(values),
    )
