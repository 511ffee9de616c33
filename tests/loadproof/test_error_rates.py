"""The verdict qualified: how often it is wrong, in thousands of trials whose truth is known.

Every trial is drawn with the schedule that a real one would have, judged by the function that
judges real ones, and counted.  The bounds are exact (Clopper and Pearson, 95 %, one-sided), so
the number of trials, and not luck, decides whether a rate counts as small.
"""

from __future__ import annotations

import itertools
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from scipy.stats import beta

from fixtures.summary import TABLES
from loadproof.judge.verdict import TimeSample, judge_time
from loadproof.plan.policy import load_policy
from loadproof.plan.schedule import ARMS, DELAYED, Turn, mirrored_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

Place = np.ndarray[Any, Any]

POLICY = load_policy("gpu")
NOISE = 0.01
TRIALS = 1000
ALLOWED = 0.05
MARGIN = POLICY.margin_log_ratio


class Counted(NamedTuple):
    """How the trials of one cell ended."""

    noise: str
    effect: float
    outcomes: dict[str, int]

    def rate(self, outcome: str) -> float:
        """The share of trials that ended with this word."""
        return self.outcomes.get(outcome, 0) / TRIALS

    def upper(self, outcome: str) -> float:
        """The exact 95 % upper bound of that share."""
        hits = self.outcomes.get(outcome, 0)
        return float(beta.ppf(0.95, hits + 1, TRIALS - hits)) if hits < TRIALS else 1.0


def _independent(generator: np.random.Generator, turns: tuple[Turn, ...]) -> Place:
    return generator.normal(0, NOISE, len(turns))


def _drift(generator: np.random.Generator, turns: tuple[Turn, ...]) -> Place:
    slope = generator.normal(0, 0.10) * np.linspace(0, 1, len(turns))
    return _independent(generator, turns) + slope


def _curved(generator: np.random.Generator, turns: tuple[Turn, ...]) -> Place:
    warm_up = generator.normal(0, 0.10) * np.exp(-np.arange(len(turns)) / 10)
    return _independent(generator, turns) + warm_up


def _autocorrelated(generator: np.random.Generator, turns: tuple[Turn, ...]) -> Place:
    steps = generator.normal(0, NOISE * math.sqrt(1 - 0.8**2), len(turns))
    state = generator.normal(0, NOISE)
    places = []
    for step in steps:
        state = 0.8 * state + step
        places.append(state)
    return np.array(places)


def _step(generator: np.random.Generator, turns: tuple[Turn, ...]) -> Place:
    at = generator.integers(0, len(turns))
    height = float(generator.normal(0, 0.05))
    return np.asarray(_independent(generator, turns) + height * (np.arange(len(turns)) >= at))


def _spikes(generator: np.random.Generator, turns: tuple[Turn, ...]) -> Place:
    hit = generator.random(len(turns)) < 0.05
    extra = hit * generator.exponential(0.2, len(turns))
    return np.asarray(_independent(generator, turns) + extra)


def _periodic(period: int) -> Callable[[np.random.Generator, tuple[Turn, ...]], Place]:
    def draw(generator: np.random.Generator, turns: tuple[Turn, ...]) -> Place:
        phase = (np.arange(len(turns)) + generator.integers(0, period)) % period
        return np.asarray(_independent(generator, turns) + 0.03 * (phase == 0))

    return draw


def _carry_over(generator: np.random.Generator, turns: tuple[Turn, ...]) -> Place:
    """A leg after a delayed one is slower: something of it is left behind."""
    after = np.array([False, *[turn.arm == DELAYED for turn in turns[:-1]]])
    return _independent(generator, turns) + 0.01 * after


NOISES: dict[str, Callable[[np.random.Generator, tuple[Turn, ...]], Place]] = {
    "independent": _independent,
    "linear drift": _drift,
    "warm-up": _curved,
    "autocorrelated 0.8": _autocorrelated,
    "one step": _step,
    "spikes": _spikes,
    "period 2": _periodic(2),
    "period 4": _periodic(4),
    "carry-over": _carry_over,
}
EFFECTS = {"equal": 0.0, "at the margin": MARGIN, "1.5 margins": 1.5 * MARGIN, "slower": -MARGIN}


@cache
def _turns(seed: int) -> tuple[Turn, ...]:
    """The schedule that a real trial of this seed would have; every cell runs the same ones."""
    return mirrored_blocks(ARMS, POLICY.blocks, seed)


def _count(noise: str, effect: float) -> Counted:
    """Draw and judge all trials of a cell; ``effect`` is the log ratio by which B is faster."""
    generator = np.random.default_rng([list(NOISES).index(noise), round(1e6 * (effect + 1))])
    log_effect = {"A": 0.0, "A'": 0.0, "B": -effect}
    log_effect["S"] = math.log1p(POLICY.planted_delay_fraction)
    outcomes: dict[str, int] = {}
    for seed in range(TRIALS):
        turns = _turns(seed)
        effects = np.array([log_effect[turn.arm] for turn in turns])
        times = np.exp(effects + NOISES[noise](generator, turns)).tolist()
        samples = [TimeSample(*turn, time) for turn, time in zip(turns, times, strict=True)]
        outcome = judge_time(POLICY, POLICY.blocks, samples).outcome
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return Counted(noise, effect, outcomes)


def _rows(table: list[Counted]) -> list[str]:
    """The table of rates: one row per noise, as the documentation shows it."""
    by_cell = {(each.noise, each.effect): each for each in table}
    rows = ["| noise | false gain, at most | missed margin, at most | finds 1.5 margins |"]
    rows += ["| --- | --- | --- | --- |"]
    for noise in NOISES:
        false_gain = by_cell[noise, 0.0].upper("gain")
        missed = by_cell[noise, MARGIN].upper("no-gain")
        power = by_cell[noise, 1.5 * MARGIN].rate("gain")
        rows.append(f"| {noise} | {false_gain:.3f} | {missed:.3f} | {power:.2f} |")
    return rows


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> list[Counted]:
    """Every noise with every effect, once; the rates go to the end of the output."""
    counted = [
        _count(noise, effect) for noise, effect in itertools.product(NOISES, EFFECTS.values())
    ]
    title = f"verdict error rates ({TRIALS} trials a cell, {POLICY.blocks} blocks)"
    request.config.stash.setdefault(TABLES, {})[title] = "\n".join(_rows(counted))
    return counted


def test_it_seldom_claims_a_gain_that_is_not_there(table: list[Counted]) -> None:
    """Under every noise the upper bound of the false-gain rate is at most 0.05."""
    bounds = {(each.noise, each.effect): each.upper("gain") for each in table if each.effect <= 0}
    assert len(bounds) == 2 * len(NOISES)
    assert not {cell: bound for cell, bound in bounds.items() if bound > ALLOWED}


def test_it_seldom_denies_a_gain_of_the_margin(table: list[Counted]) -> None:
    """Under every noise the upper bound of no-gain at the margin is at most 0.05."""
    bounds = {each.noise: each.upper("no-gain") for each in table if each.effect == MARGIN}
    assert len(bounds) == len(NOISES)
    assert not {noise: bound for noise, bound in bounds.items() if bound > ALLOWED}


def test_it_sees_one_and_a_half_margins_in_quiet(table: list[Counted]) -> None:
    """A judge that never says gain would pass the tests above; this one finds it."""
    found = {(each.noise, each.effect): each.rate("gain") for each in table}
    assert found["independent", 1.5 * MARGIN] > 0.9
    assert found["linear drift", 1.5 * MARGIN] > 0.9


def test_the_documented_rates_are_these(table: list[Counted]) -> None:
    """The table in the documentation is the one that was just counted, within chance."""
    text = Path(__file__).parents[2].joinpath("docs", "qualifying.md").read_text("utf-8")
    documented = {
        cells[1].strip(): [float(cell) for cell in cells[2:5]]
        for cells in (line.split("|") for line in text.splitlines())
        if len(cells) == 6 and cells[1].strip() in NOISES
    }
    counted = {
        cells[1].strip(): [float(cell) for cell in cells[2:5]]
        for cells in (row.split("|") for row in _rows(table)[2:])
    }
    assert counted.keys() == documented.keys()
    for noise, figures in counted.items():
        assert figures == pytest.approx(documented[noise], abs=0.05), noise
