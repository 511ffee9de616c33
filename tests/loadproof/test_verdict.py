"""The verdict: each word needs its evidence, and everything else is inconclusive."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadproof.judge.verdict import (
    Reason,
    TimeSample,
    Verdict,
    judge_requirement,
    judge_time,
    time_change,
)
from loadproof.plan.policy import Policy, load_policy
from loadproof.plan.schedule import ARMS, mirrored_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

POLICY = load_policy("gpu")
EXACT = {"A": 0.0, "A'": 0.0, "S": math.log(1.03)}


def samples(
    candidate: float,
    *,
    noise: float = 0.005,
    blocks: int = POLICY.blocks,
    seed: int = 1,
    effects: dict[str, float] | None = None,
    extra: Callable[[int], float] = lambda _: 0.0,
) -> list[TimeSample]:
    """Draw a trial: log time is the arm's effect plus noise plus what the place adds."""
    generator = random.Random(seed)
    log_effect = EXACT | {"B": candidate} | (effects or {})
    return [
        TimeSample(
            turn.block,
            turn.half,
            turn.arm,
            math.exp(log_effect[turn.arm] + generator.gauss(0, noise) + extra(place)),
        )
        for place, turn in enumerate(mirrored_blocks(ARMS, blocks, seed))
    ]


def judge(drawn: list[TimeSample], policy: Policy = POLICY, blocks: int = 8) -> Verdict:
    """Judge without controls or doubts."""
    return judge_time(policy, blocks, drawn)


def codes(verdict: Verdict) -> set[str]:
    """The codes of a verdict's reasons."""
    return {reason.code for reason in verdict.reasons}


@pytest.mark.parametrize(
    ("log_time", "outcome"),
    [
        (-0.10, "gain"),
        (-0.04, "gain"),
        (0.0, "no-gain"),
        (0.05, "regression"),
        (0.3, "regression"),
    ],
)
def test_a_clear_effect_has_its_word(log_time: float, outcome: str) -> None:
    """Faster is a gain, equal is no gain, slower is a regression."""
    verdict = judge(samples(log_time))
    assert (verdict.outcome, codes(verdict)) == (outcome, {outcome})
    assert verdict.sound


def drawn_from(gains: dict[str, list[float]]) -> list[TimeSample]:
    """Make samples whose contrast in each block is exactly the number given."""
    effects = {"A": [0.0] * 8, "S": [-0.3] * 8} | gains
    return [
        TimeSample(block, half, arm, math.exp(-effects[arm][block]))
        for block in range(8)
        for half in (0, 1)
        for arm in ARMS
    ]


WIDE = [-0.04, 0.04, -0.03, 0.03, -0.035, 0.035, -0.02, 0.02]


@pytest.mark.parametrize("sign", [1, -1])
def test_an_effect_inside_the_band_of_the_same_code_has_no_word(sign: int) -> None:
    """An estimate beyond the margin is no gain, and no regression, within what A' does."""
    steady = [sign * 0.03] * 8
    verdict = judge(drawn_from({"A'": WIDE, "B": steady}))
    assert verdict.contrasts["A'"].high > 0.03
    assert verdict.sound
    assert verdict.outcome in {"inconclusive", "no-gain"}
    alone = judge(drawn_from({"A'": [0.0] * 8, "B": steady}))
    assert alone.outcome == ("gain" if sign > 0 else "regression")


def test_an_interval_that_reaches_the_margin_is_not_no_gain() -> None:
    """A small estimate does not exclude a gain that the interval allows."""
    verdict = judge(drawn_from({"A'": [0.0] * 8, "B": WIDE}))
    assert abs(verdict.contrasts["B"].estimate) < 0.01
    assert (verdict.outcome, codes(verdict)) == ("inconclusive", {"interval-too-wide"})
    assert verdict.sound


@pytest.mark.parametrize("sign", [1, -1])
def test_an_effect_below_the_margin_has_no_word(sign: int) -> None:
    """A certain effect of half the margin is neither a gain nor a regression."""
    verdict = judge(drawn_from({"A'": [0.0] * 8, "B": [sign * 0.01] * 8}))
    assert verdict.outcome == "no-gain"


def test_a_drift_gives_no_gain() -> None:
    """Half a percent slower with every leg says nothing about the candidate."""
    verdict = judge(samples(0.0, extra=lambda place: 0.005 * place))
    assert verdict.outcome == "no-gain"


def test_the_first_of_each_pair_being_slow_is_no_regression() -> None:
    """A bias by place falls on every arm alike."""
    verdict = judge(samples(0.0, extra=lambda place: 0.2 if place % 2 == 0 else 0.0))
    assert verdict.outcome in {"no-gain", "inconclusive"}


@pytest.mark.parametrize("effect", [-0.3, 0.0, 0.3])
@pytest.mark.parametrize(
    ("break_it", "code"),
    [
        (lambda drawn: drawn[:-1], "samples-incomplete"),
        (lambda _: [], "samples-incomplete"),
        (lambda drawn: [*drawn, drawn[0]], "samples-incomplete"),
        (lambda drawn: [*drawn[:-1], drawn[0]], "samples-incomplete"),
        (
            lambda drawn: [msgspec.structs.replace(drawn[0], arm="C"), *drawn[1:]],
            "samples-incomplete",
        ),
        (
            lambda drawn: [msgspec.structs.replace(drawn[0], elapsed_s=math.nan), *drawn[1:]],
            "samples-invalid",
        ),
        (
            lambda drawn: [msgspec.structs.replace(drawn[0], elapsed_s=math.inf), *drawn[1:]],
            "samples-invalid",
        ),
        (
            lambda drawn: [msgspec.structs.replace(drawn[0], elapsed_s=0.0), *drawn[1:]],
            "samples-invalid",
        ),
    ],
)
def test_samples_that_are_not_the_schedules_are_inconclusive(
    effect: float, break_it: Callable[[list[TimeSample]], list[TimeSample]], code: str
) -> None:
    """A missing, doubled, foreign or senseless sample ends in no verdict, whatever the effect."""
    verdict = judge(break_it(samples(effect)))
    assert (verdict.outcome, verdict.sound) == ("inconclusive", False)
    assert code in codes(verdict)


def test_too_few_blocks_are_inconclusive_by_design() -> None:
    """Five blocks cannot give a 95 % interval, however clear the effect."""
    verdict = judge(samples(-0.5, blocks=5), blocks=5)
    assert verdict.outcome == "inconclusive"
    assert "blocks-too-few" in codes(verdict)


def test_a_delay_that_is_not_seen_is_inconclusive() -> None:
    """Without the planted delay in the samples, the trial cannot be believed."""
    verdict = judge(samples(-0.1, effects={"S": 0.0}))
    assert (verdict.outcome, codes(verdict)) == ("inconclusive", {"delay-missed"})


def test_the_same_code_that_differs_is_inconclusive() -> None:
    """A clear difference between A and A' forbids a verdict on B."""
    verdict = judge(samples(-0.1, effects={"A'": 0.1}))
    assert verdict.outcome == "inconclusive"
    assert "same-code-differs" in codes(verdict)


def test_a_doubt_or_a_missing_control_is_inconclusive() -> None:
    """What measuring saw, and a control that was not found, outrank a clear effect."""
    doubt = Reason("hazard", "The fake saw a race.")
    found = judge_time(POLICY, 8, samples(-0.1), doubts=[doubt])
    assert (found.outcome, found.reasons[0]) == ("inconclusive", doubt)
    required = frozenset({"device-bit"})
    missing = judge_time(POLICY, 8, samples(-0.1), controls_required=required)
    assert (missing.outcome, codes(missing)) == ("inconclusive", {"control-missing"})
    seen = judge_time(POLICY, 8, samples(-0.1), controls_required=required, controls_seen=required)
    assert seen.outcome == "gain"


@pytest.mark.parametrize(
    ("log_time", "noise", "no_regression", "gain"),
    [
        (-0.10, 0.005, "proven", "proven"),
        (0.0, 0.002, "proven", "refuted"),
        (0.10, 0.005, "refuted", "refuted"),
    ],
)
def test_requirements(log_time: float, noise: float, no_regression: str, gain: str) -> None:
    """A requirement is proven, refuted, or neither."""
    verdict = judge(samples(log_time, noise=noise))
    assert judge_requirement("no-regression", verdict, POLICY) == no_regression
    assert judge_requirement("gain", verdict, POLICY) == gain


def test_an_unsound_trial_proves_nothing() -> None:
    """A requirement is inconclusive when the trial is."""
    verdict = judge(samples(-0.1, effects={"S": 0.0}))
    assert judge_requirement("gain", verdict, POLICY) == "inconclusive"
    assert judge_requirement("no-regression", verdict, POLICY) == "inconclusive"


def test_no_gain_with_room_for_a_regression_proves_nothing() -> None:
    """An interval that reaches below the margin on the slow side is not 'no regression'."""
    wide = judge(samples(0.015, noise=0.008, seed=4))
    assert wide.sound
    assert wide.outcome == "no-gain"
    assert judge_requirement("no-regression", wide, POLICY) == "inconclusive"


@given(
    st.lists(
        st.builds(
            TimeSample,
            st.integers(-1, 7),
            st.integers(-1, 2),
            st.sampled_from([*ARMS, "C", ""]),
            st.floats(),
        ),
        max_size=70,
    )
)
@settings(max_examples=100)
def test_arbitrary_samples_never_raise_and_never_gain(drawn: list[TimeSample]) -> None:
    """Nonsense is inconclusive: the function fails closed."""
    assert judge(drawn).outcome == "inconclusive"


def test_times_are_told_as_changes_of_load_time() -> None:
    """A contrast of log(1.2) slower reads as 20 % more time."""
    assert time_change(-math.log(1.2)) == "+20.0 %"
    assert time_change(math.log(2)) == "-50.0 %"
