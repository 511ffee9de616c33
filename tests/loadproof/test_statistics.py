"""The exact statistics, against scipy's and against brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from loadproof.judge.statistics import contrast, sign_flip_p, signed_rank_counts

VALUES = st.lists(st.floats(-1, 1, allow_subnormal=False), min_size=1, max_size=10)


@pytest.mark.parametrize("n", range(1, 11))
def test_the_signed_rank_distribution_is_every_sign_pattern(n: int) -> None:
    """Counting by dynamic programming equals listing all 2**n patterns."""
    counts = [0] * (n * (n + 1) // 2 + 1)
    for signs in itertools.product((0, 1), repeat=n):
        counts[sum(rank * sign for rank, sign in enumerate(signs, start=1))] += 1
    assert counts == signed_rank_counts(n)


# Sums that differ by less than rounding count as equal, and scipy draws that line elsewhere.
GRID = st.lists(st.integers(-1000, 1000).map(lambda n: n / 1000), min_size=2, max_size=10)


@given(GRID)
@settings(max_examples=60)
def test_sign_flips_agree_with_scipy(values: list[float]) -> None:
    """The exact p-value equals that of scipy's exact permutation test."""
    expected = stats.permutation_test(
        (np.array(values),), np.sum, permutation_type="samples", n_resamples=np.inf
    ).pvalue
    assert sign_flip_p(values) == pytest.approx(min(expected, 1.0))


@pytest.mark.parametrize(
    ("n", "confidence"), [(6, 0.96875), (8, 0.9609375), (12, 0.95751953125), (20, 0.9515590668)]
)
def test_the_interval_has_the_tabled_confidence(n: int, confidence: float) -> None:
    """The exact confidences are those of published tables of the signed-rank test."""
    found = contrast([float(value) for value in range(n)], 0.95)
    assert found.confidence == pytest.approx(confidence)


def test_five_blocks_cannot_reach_95_percent() -> None:
    """The widest interval of five blocks has 93.75 %, and says so."""
    assert contrast([1.0, 2.0, 3.0, 4.0, 5.0], 0.95).confidence == 0.9375


@given(values=VALUES, shift=st.floats(-1, 1))
def test_a_shift_moves_estimate_and_interval(values: list[float], shift: float) -> None:
    """Estimate and interval are equivariant, and ordered."""
    plain = contrast(values, 0.95)
    moved = contrast([value + shift for value in values], 0.95)
    assert plain.low <= plain.estimate <= plain.high
    for name in ("low", "estimate", "high"):
        assert getattr(moved, name) == pytest.approx(getattr(plain, name) + shift, abs=1e-9)


def test_the_interval_covers_as_often_as_it_says() -> None:
    """Over many draws of a skew-free heavy-tailed law, the coverage is the exact confidence."""
    generator = np.random.default_rng(5)
    trials, hits = 2000, 0
    for _ in range(trials):
        found = contrast(list(generator.standard_t(2, 8)), 0.95)
        hits += found.low <= 0 <= found.high
    low, high = stats.binomtest(hits, trials).proportion_ci(0.999)
    assert low <= 0.9609375 <= high


def test_nothing_is_no_contrast() -> None:
    """An empty contrast is refused rather than zero."""
    with pytest.raises(ValueError, match="at least one"):
        contrast([], 0.95)
    assert math.isclose(contrast([0.5], 0.95).estimate, 0.5)
