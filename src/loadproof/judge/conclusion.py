"""The whole answer: weights, controls and time together, and the exit status they mean.

Wrong bytes and a missed control outrank every time.  After them comes whether the requirement
is proven or refuted; everything else is inconclusive.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Literal

import msgspec

from loadproof.judge.coverage import Coverage, cover
from loadproof.judge.served import ServedWord, judge_served
from loadproof.judge.verdict import (
    Reason,
    Requirement,
    TimeSample,
    Verdict,
    judge_requirement,
    judge_time,
)
from loadproof.measure.cache_state import Wanted
from loadproof.measure.controls import (
    DEVICE_BIT,
    DUPLICATED_CHUNK,
    FILE_BIT,
    SERVED_BIT,
    SWAPPED_CHUNKS,
    Control,
)
from loadproof.measure.legs import Leg, WeightsCheck
from loadproof.measure.messages import Failure, Result
from loadproof.measure.serve_legs import CANNOT_SERVE
from loadproof.plan.policy import Policy
from loadproof.plan.schedule import BASELINE, CANDIDATE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadproof.measure.trial import Trial, TrialPlan

WeightsWord = Literal["equal", "differ", "unknown"]
FinalAnswer = Literal["proven", "refuted", "inconclusive", "failed"]

# What the command line ends with.
EXIT_STATUS: dict[FinalAnswer, int] = {"proven": 0, "refuted": 1, "inconclusive": 3, "failed": 4}

_NAMES_SHOWN_MAX = 3


class Conclusion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trial comes to.

    Attributes:
        answer: Whether the requirement is proven; ``failed`` for weights or a control.
        requirement: What was required.
        weights: Whether both arms delivered the files' bytes.
        served: Whether both serve what transformers serves from the files.
        verdict: What can be said about time.
        coverage: Bytes by route.
        reasons: Why, the most important first.
    """

    answer: FinalAnswer
    requirement: Requirement
    weights: WeightsWord
    verdict: Verdict
    coverage: Coverage
    reasons: tuple[Reason, ...]
    served: ServedWord = "not-run"


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """All that a conclusion follows from; a receipt carries every part of it.

    Attributes:
        policy: The rules.
        blocks: Mirrored blocks that were fixed beforehand.
        cache: The page-cache state that every leg was to start from.
        sizes: Lengths of the checkpoint's tensors, in bytes.
        legs: Every leg in order.
        weights: One check per hash leg.
        controls: The planted faults and what became of them.
        same_arms: Whether both arms are the same code with the same options.
    """

    policy: Policy
    blocks: int
    cache: Wanted
    sizes: tuple[int, ...]
    legs: tuple[Leg, ...]
    weights: tuple[WeightsCheck, ...]
    controls: tuple[Control, ...]
    same_arms: bool


def conclude(
    plan: TrialPlan, trial: Trial, requirement: Requirement, changed_routes: Sequence[str] = ()
) -> Conclusion:
    """Judge a trial against a requirement."""
    evidence = Evidence(
        policy=plan.policy,
        blocks=plan.blocks,
        cache=plan.cache,
        sizes=tuple(each.nbytes for each in plan.truth.tensors),
        legs=tuple(trial.legs),
        weights=tuple(trial.weights),
        controls=tuple(trial.controls),
        same_arms=plan.baseline.arm.is_same_code(plan.candidate.arm),
    )
    return conclude_from(evidence, requirement, changed_routes)


def conclude_from(
    evidence: Evidence, requirement: Requirement, changed_routes: Sequence[str] = ()
) -> Conclusion:
    """Judge evidence against a requirement: the same evidence always gives the same conclusion."""
    coverage = cover(evidence.legs, CANDIDATE, changed_routes)
    served, served_failures = judge_served(evidence.legs)
    failures = [
        *_weight_failures(evidence),
        *_audit_failures(evidence),
        *served_failures,
        *_copied_pages(evidence),
    ]
    verdict = judge_time(
        evidence.policy,
        evidence.blocks,
        list(samples(evidence.legs)),
        controls_seen=frozenset(each.name for each in evidence.controls if each.found),
        controls_required=required_controls(evidence.sizes),
        # What did not load the files, does not serve them, or paid for its time with a second
        # copy in memory, has no time that could be called a gain.
        doubts=[*failures, *_doubts(evidence), *_coverage_doubts(evidence, coverage)],
        same_arms=evidence.same_arms,
    )
    failures += _control_failures(evidence)
    weights = _weights_word(evidence)
    answer: FinalAnswer = "failed"
    if not failures:
        answer = judge_requirement(requirement, verdict, evidence.policy)
        if answer == "proven" and weights != "equal":
            answer = "inconclusive"
    return Conclusion(
        answer=answer,
        requirement=requirement,
        weights=weights,
        served=served,
        verdict=verdict,
        coverage=coverage,
        # A failure says it all; what could not be measured after it is in the verdict.
        reasons=tuple(failures) or verdict.reasons,
    )


def required_controls(sizes: Sequence[int]) -> frozenset[str]:
    """Name the controls that tensors of these lengths have room for; each has to be found."""
    filled = [size for size in sizes if size]
    required = {DEVICE_BIT, FILE_BIT} if filled else set()
    if any(size > 1 for size in filled):
        required.add(SWAPPED_CHUNKS)
    if len(filled) > 1:
        required.add(DUPLICATED_CHUNK)
    return frozenset(required)


def samples(legs: Sequence[Leg]) -> Iterator[TimeSample]:
    """Yield the load time of every timing leg that has one."""
    for leg in legs:
        timed = leg.purpose == "time" and leg.block is not None and leg.half is not None
        if timed and isinstance(leg.outcome, Result):
            yield TimeSample(leg.block or 0, leg.half or 0, leg.arm, leg.outcome.elapsed_s)


def _weights_word(evidence: Evidence) -> WeightsWord:
    if any(each.differences for each in evidence.weights) or any(_audit_failures(evidence)):
        return "differ"
    hashed = Counter(each.arm for each in evidence.weights)
    wanted = dict.fromkeys((BASELINE, CANDIDATE), evidence.policy.hash_legs)
    return "equal" if hashed == wanted else "unknown"


def _weight_failures(evidence: Evidence) -> Iterator[Reason]:
    """Name every arm whose device bytes are wrong, or whose load raced to get them right."""
    told = set()
    for each in evidence.weights:
        if each.differences and (each.arm, "weights-differ") not in told:
            told.add((each.arm, "weights-differ"))
            names = [repr(difference.tensor) for difference in each.differences]
            more = len(names) - _NAMES_SHOWN_MAX
            shown = ", ".join(names[:_NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
            yield Reason(
                "weights-differ",
                f"Arm {each.arm} put other bytes on the device than the files hold, in "
                f"{len(names)} tensors: {shown}.",
            )
        if each.hazards and (each.arm, "hazard") not in told:
            told.add((each.arm, "hazard"))
            yield Reason("hazard", f"Arm {each.arm}: {_first(each.hazards)}")


def _audit_failures(evidence: Evidence) -> Iterator[Reason]:
    """Name the first arm whose timing legs did not load what the files hold."""
    for leg in evidence.legs:
        if leg.purpose == "time" and isinstance(leg.outcome, Result) and leg.outcome.audit_wrong:
            yield Reason(
                "audit-failed",
                f"A timing leg of {leg.arm} had other bytes on the device than the files hold, "
                f"first in tensor {leg.outcome.audit_wrong[0]!r}: what was timed was no load.",
            )
            return


def _control_failures(evidence: Evidence) -> Iterator[Reason]:
    for each in evidence.controls:
        if not each.found and each.name == SERVED_BIT:
            yield Reason(
                "control-missed",
                f"Control {each.name!r} was planted in tensor {each.tensor!r}, and the served "
                "output did not change.",
            )
        elif not each.found:
            blamed = ", ".join(map(repr, each.blamed)) or "nothing"
            yield Reason(
                "control-missed",
                f"Control {each.name!r} was planted in tensor {each.tensor!r}, and the hash leg "
                f"blamed {blamed}.",
            )


def _copied_pages(evidence: Evidence) -> Iterator[Reason]:
    """Name a candidate whose mappings of the files turned into private copies: memory twice."""
    copied = max(
        (
            leg.memory.checkpoint_anonymous_bytes or 0
            for leg in evidence.legs
            if leg.arm == CANDIDATE
        ),
        default=0,
    )
    if copied:
        yield Reason(
            "pages-copied",
            f"Arm {CANDIDATE} turned {copied:,} bytes of its mappings of the files into private "
            "copies, so the checkpoint was in memory twice.",
        )


def _doubts(evidence: Evidence) -> Iterator[Reason]:
    """Find what was seen while measuring that forbids a verdict on time."""
    yield from _leg_doubts(evidence)
    yield from _surrounding_doubts(evidence)


def _leg_doubts(evidence: Evidence) -> Iterator[Reason]:
    """Doubts about what the legs themselves did."""
    for leg in evidence.legs:
        if isinstance(leg.outcome, Failure) and leg.outcome.code != CANNOT_SERVE:
            yield Reason(
                leg.outcome.code, f"A {leg.purpose} leg of {leg.arm}: {leg.outcome.sentence}"
            )
    results = [
        (leg.arm, leg.outcome)
        for leg in evidence.legs
        if leg.purpose == "time" and isinstance(leg.outcome, Result)
    ]
    if any(result.device_to_host_copies for _, result in results):
        yield Reason("timed-read-back", "A timing leg copied from the device to the host.")
    raced = next(
        (
            (leg.purpose, leg.arm, leg.outcome.hazards)
            for leg in evidence.legs
            if leg.purpose in {"time", "serve"}
            and isinstance(leg.outcome, Result)
            and leg.outcome.hazards
        ),
        None,
    )
    if raced:
        yield Reason("hazard", f"A {raced[0]} leg of {raced[1]}: {_first(raced[2])}")
    unaudited = [arm for arm, result in results if not result.audited_bytes]
    nbytes = sum(evidence.sizes)
    if unaudited and nbytes:
        yield Reason(
            "not-audited", f"A timing leg of {unaudited[0]} was not read back afterwards."
        )
    if any(result.nbytes != nbytes for _, result in results):
        yield Reason("bytes-missing", "A timing leg delivered fewer or more bytes than the files.")
    if len({result.harness for _, result in results}) > 1:
        yield Reason("harness-changed", "The harness itself changed while the trial ran.")
    yield from _identity_doubts(results)
    if len({leg.outcome.device for leg in evidence.legs if isinstance(leg.outcome, Result)}) > 1:
        yield Reason("device-changed", "The device or its driver changed while the trial ran.")


def _identity_doubts(results: Sequence[tuple[str, Result]]) -> Iterator[Reason]:
    """Doubts about what programs say of themselves: one version an arm, one environment in all."""
    told = [
        (arm == CANDIDATE, each.identity) for arm, each in results if each.identity is not None
    ]
    versions = {(side, each.name, each.version) for side, each in told}
    environments = {msgspec.json.encode(each.environment, order="sorted") for _, each in told}
    if len(environments) > 1 or len(versions) > len({side for side, _ in told}):
        yield Reason(
            "environment-changed",
            "The loader named another environment, or another version of itself, in one timing "
            "leg than in another.",
        )


def _surrounding_doubts(evidence: Evidence) -> Iterator[Reason]:
    """Doubts about what surrounded the legs: the page cache and the machine."""
    states = {leg.cache.state for leg in evidence.legs if leg.purpose == "time"}
    if len(states) > 1:
        listed = ", ".join(sorted(states))
        yield Reason("cache-differs", f"Legs started from different page-cache states: {listed}.")
    if evidence.cache == "cold" and states - {"cold"}:
        why = next(
            (leg.cache.why for leg in evidence.legs if leg.cache.why), "pages stayed resident"
        )
        yield Reason("cache-unproven", f"Not every leg is proven to have started cold: {why}.")
    marked = [leg for leg in evidence.legs if leg.purpose == "time" and leg.conditions.marks]
    if marked:
        yield Reason(
            "conditions",
            f"{len(marked)} timing legs ran outside the policy's band, first one of "
            f"{marked[0].arm}: {marked[0].conditions.marks[0]}.",
        )


def _coverage_doubts(evidence: Evidence, coverage: Coverage) -> Iterator[Reason]:
    if not coverage.changed_routes or not evidence.blocks:
        return
    named = ", ".join(coverage.changed_routes)
    if coverage.fraction is None:
        yield Reason(
            "coverage-unknown", f"The loader does not say how many bytes went by {named}."
        )
    elif coverage.fraction < evidence.policy.coverage_min:
        yield Reason(
            "coverage-low",
            f"Only {coverage.fraction:.0%} of the bytes went by {named}: the trial measures a "
            "path that the change does not touch.",
        )


def _first(hazards: Sequence[str]) -> str:
    """Return the first line of the first hazard, and how many more there are."""
    more = f" (and {len(hazards) - 1} more hazards)" if hazards[1:] else ""
    return hazards[0].splitlines()[0].rstrip(".") + more + "."
