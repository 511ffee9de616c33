"""From the samples of a trial to a verdict: pure, and closed by default.

The verdict is about time only.  ``gain``, ``no-gain`` and ``regression`` each need positive
evidence, and every check of the trial on itself has to pass first: enough blocks, complete and
sane samples, identical code (A', and B where it is no other) that looks identical, a planted
delay (S) that is seen, the required controls, and no doubt raised while measuring.  Anything
else is ``inconclusive``, with the reason.  Whether a requirement (no regression, a gain) is met is
a second, separate question, since "not worse than the margin" can be proven where "no gain"
cannot.

All contrasts are log ratios of the baseline's time to the arm's: above zero is faster.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

from loadproof.judge.statistics import Contrast, contrast
from loadproof.plan.policy import BLOCKS_MIN
from loadproof.plan.schedule import AGAIN, ARMS, BASELINE, CANDIDATE, DELAYED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from loadproof.plan.policy import Policy

Outcome = Literal["gain", "no-gain", "regression", "inconclusive"]
Requirement = Literal["no-regression", "gain"]
Answer = Literal["proven", "refuted", "inconclusive"]


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a verdict is what it is.

    Attributes:
        code: A stable word for programs.
        sentence: The same for people, with the figures.
    """

    code: str
    sentence: str


class TimeSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The load time of one leg, and where in the schedule it ran."""

    block: int
    half: int
    arm: str
    elapsed_s: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trial says about time.

    Attributes:
        outcome: One of the four words.
        sound: Whether the trial passed every check on itself; False makes it inconclusive.
        reasons: Why, the most important first.
        contrasts: A', B and S against A; empty when the samples do not allow them.
    """

    outcome: Outcome
    sound: bool
    reasons: tuple[Reason, ...]
    contrasts: dict[str, Contrast]


def time_change(log_ratio: float) -> str:
    """Format a contrast as the change of load time, such as ``+20.0 %`` for a slower arm."""
    return f"{100 * math.expm1(-log_ratio):+.1f} %"


def time_range(found: Contrast) -> str:
    """Format a contrast's interval as changes of load time, the faster end first."""
    return f"{time_change(found.high)} to {time_change(found.low)}"


def judge_time(
    policy: Policy,
    blocks: int,
    samples: Sequence[TimeSample],
    *,
    controls_seen: frozenset[str] = frozenset(),
    controls_required: frozenset[str] = frozenset(),
    doubts: Sequence[Reason] = (),
    same_arms: bool = False,
) -> Verdict:
    """Judge the time of the candidate (B) against the baseline (A).

    Args:
        policy: The margins.
        blocks: How many blocks were fixed before the first leg.
        samples: Every timing leg's sample; nothing dropped, nothing run again.
        controls_seen: Controls that were planted and found.
        controls_required: Controls without which there is no verdict.
        doubts: What measuring itself saw that forbids a verdict on time.
        same_arms: Whether the candidate is the baseline's own code with its options, so that
            no difference between them can be a gain or a regression.
    """
    refusals = [*doubts, *_incomplete(blocks, samples)]
    refusals += [
        Reason("control-missing", f"The control {name!r} was not planted and found.")
        for name in sorted(controls_required - controls_seen)
    ]
    if any(reason.code.startswith("samples-") for reason in refusals):
        return Verdict(outcome="inconclusive", sound=False, reasons=tuple(refusals), contrasts={})
    contrasts = _contrasts(blocks, samples, policy.confidence)
    refusals += _self_checks(policy, blocks, contrasts)
    outcome, reason = _compare(contrasts[CANDIDATE], contrasts[AGAIN], policy.margin_log_ratio)
    if same_arms and outcome in {"gain", "regression"}:
        refusals = refusals or [_same_code_differs(CANDIDATE, contrasts[CANDIDATE])]
    if refusals:
        return Verdict(
            outcome="inconclusive", sound=False, reasons=tuple(refusals), contrasts=contrasts
        )
    return Verdict(outcome=outcome, sound=True, reasons=(reason,), contrasts=contrasts)


def judge_requirement(requirement: Requirement, verdict: Verdict, policy: Policy) -> Answer:
    """Say whether the trial proves or refutes what was required of the candidate."""
    if not verdict.sound:
        return "inconclusive"
    if requirement == "gain":
        answers: dict[Outcome, Answer] = {
            "gain": "proven",
            "no-gain": "refuted",
            "regression": "refuted",
        }
        return answers.get(verdict.outcome, "inconclusive")
    if verdict.outcome == "regression":
        return "refuted"
    not_worse = verdict.contrasts[CANDIDATE].low > -policy.margin_log_ratio
    return "proven" if not_worse else "inconclusive"


def _incomplete(blocks: int, samples: Sequence[TimeSample]) -> list[Reason]:
    """Refuse a set of samples that is not exactly the schedule's, or not made of times."""
    reasons = []
    expected = {(block, half, arm) for block in range(blocks) for half in (0, 1) for arm in ARMS}
    seen = [(each.block, each.half, each.arm) for each in samples]
    if not seen or set(seen) != expected or len(seen) != len(expected):
        sentence = f"{len(seen)} of {len(expected)} timing legs have a sample."
        if len(seen) >= len(expected):
            sentence = f"The {len(seen)} samples are not those of the schedule."
        reasons.append(Reason("samples-incomplete", sentence))
    insane = [each for each in samples if not (0 < each.elapsed_s < math.inf)]
    if insane:
        sentence = f"{len(insane)} samples are not a positive, finite time."
        reasons.append(Reason("samples-invalid", sentence))
    return reasons


def _contrasts(
    blocks: int, samples: Sequence[TimeSample], confidence: float
) -> dict[str, Contrast]:
    """Reduce each arm to one log ratio a block (mean of its two legs' logs), against A."""
    log_time: dict[tuple[int, str], float] = {}
    for each in samples:
        key = (each.block, each.arm)
        log_time[key] = log_time.get(key, 0.0) + math.log(each.elapsed_s) / 2
    return {
        arm: contrast(
            [log_time[block, BASELINE] - log_time[block, arm] for block in range(blocks)],
            confidence,
        )
        for arm in (AGAIN, CANDIDATE, DELAYED)
    }


def _self_checks(policy: Policy, blocks: int, contrasts: Mapping[str, Contrast]) -> list[Reason]:
    """Ask whether this trial could have told a difference from none."""
    reasons = []
    margin, again, delayed = policy.margin_log_ratio, contrasts[AGAIN], contrasts[DELAYED]
    if blocks < BLOCKS_MIN or again.confidence < policy.confidence:
        sentence = (
            f"{blocks} blocks cannot give an exact {policy.confidence:.0%} interval; "
            f"use at least {BLOCKS_MIN}."
        )
        reasons.append(Reason("blocks-too-few", sentence))
    excludes_zero = again.low > 0 or again.high < 0
    if excludes_zero and abs(again.estimate) >= margin:
        reasons.append(_same_code_differs(AGAIN, again))
    if not _is_slower(delayed, again, margin):
        sentence = (
            f"A planted delay of {policy.planted_delay_fraction:.0%} was not told from the same "
            f"code again (seen: {time_range(delayed)} of load time): too noisy."
        )
        reasons.append(Reason("delay-missed", sentence))
    return reasons


def _same_code_differs(arm: str, found: Contrast) -> Reason:
    return Reason(
        "same-code-differs",
        f"The same code with the same options, run as {BASELINE} and as {arm}, differed by "
        f"{time_change(found.estimate)}: something else than the candidate moves the time.",
    )


def _is_faster(arm: Contrast, again: Contrast, margin: float) -> bool:
    return arm.low > again.high and arm.estimate >= margin


def _is_slower(arm: Contrast, again: Contrast, margin: float) -> bool:
    return arm.high < again.low and arm.estimate <= -margin


def _compare(candidate: Contrast, again: Contrast, margin: float) -> tuple[Outcome, Reason]:
    """Choose the word, once the trial is known to be sound."""
    seen = (
        f"The candidate's load time changed by {time_change(candidate.estimate)} "
        f"({time_range(candidate)})"
    )
    if _is_faster(candidate, again, margin):
        return "gain", Reason(
            "gain", f"{seen}: faster than the same code again, and by more than the margin."
        )
    if _is_slower(candidate, again, margin):
        return "regression", Reason(
            "regression", f"{seen}: slower than the same code again, and by more than the margin."
        )
    if candidate.high < margin:
        return "no-gain", Reason(
            "no-gain", f"{seen}: a gain of the margin, {time_change(margin)}, is excluded."
        )
    return "inconclusive", Reason(
        "interval-too-wide", f"{seen}: the interval allows a gain and does not prove one."
    )
