"""Whether a receipt says only what follows from what it carries.

A receipt without a signature is worth what a reader can work out again.  So every word in it that
can be derived is derived from its legs, checks and controls, by the function that made it, and a
receipt that says anything else is refused.
"""

from __future__ import annotations

import math
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from loadproof.judge.conclusion import Evidence, conclude_from
from loadproof.measure.controls import SERVED_BIT
from loadproof.measure.digest import Manifest, TensorDigest
from loadproof.measure.ground_truth import DTYPE_BITS
from loadproof.measure.messages import Result
from loadproof.plan.schedule import AGAIN, BASELINE, CANDIDATE, DELAYED, REFERENCE
from loadproof.report.privacy import without_paths

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadproof.measure.legs import Leg
    from loadproof.measure.messages import DeviceFacts
    from loadproof.report.receipt import Predicate, Statement, TensorLine

# Whose code each arm runs, by the name that a receipt gives it.
_CODE_OF = {
    BASELINE: BASELINE,
    AGAIN: BASELINE,
    DELAYED: BASELINE,
    CANDIDATE: CANDIDATE,
    REFERENCE: REFERENCE,
}

# The parts of a conclusion, the causes before their effects, as a refusal names them.
_PARTS = {
    "weights": "the word on the weights",
    "served": "the word on the served output",
    "coverage": "the coverage",
    "verdict": "the verdict on time",
    "answer": "the answer",
    "reasons": "the list of reasons",
}


def contradiction(statement: Statement, listed_max: int) -> str | None:
    """Return the first thing that does not follow from the rest of a receipt, or None.

    Args:
        statement: The receipt.
        listed_max: Most tensors that a receipt lists whether or not they differ.
    """
    predicate = statement.predicate
    # One after the other: each may rely on what those before it have found to be there.
    found = chain(
        _about_subjects(statement),
        _about_tensors(statement, listed_max),
        _about_device(predicate),
        _about_legs(predicate),
        _about_weights(statement),
        _about_controls(predicate),
        _about_conclusion(predicate),
    )
    return next(found, None)


def device_class(device: DeviceFacts | None) -> str:
    """Name the class of hardware, from attributes and never from the name alone."""
    if device is None:
        return "unknown"
    if device.fake:
        return "rehearsal"
    is_gb10 = device.capability == (12, 1) and device.integrated and device.host_page_tables
    return "gb10" if is_gb10 else f"cuda:{device.name}"


def class_of_legs(legs: Sequence[Leg]) -> str:
    """Name the class of hardware that all legs ran on; legs that disagree have none."""
    facts = set(_device_facts(legs))
    return device_class(facts.pop() if len(facts) == 1 else None)


def device_of_legs(legs: Sequence[Leg]) -> DeviceFacts | None:
    """Return what the device of the first leg that got that far is."""
    return next(_device_facts(legs), None)


def _device_facts(legs: Sequence[Leg]) -> Iterator[DeviceFacts]:
    return (leg.outcome.device for leg in legs if isinstance(leg.outcome, Result))


def _about_subjects(statement: Statement) -> Iterator[str]:
    """Compare the subjects with the arms."""
    arms = statement.predicate.arms
    if [each.name for each in statement.subject] != [
        "weights",
        "loader:baseline",
        "loader:candidate",
    ] or not {BASELINE, CANDIDATE} <= arms.keys():
        yield "its subjects are not the weights, the baseline and the candidate"
        return
    for subject, name in zip(statement.subject[1:], (BASELINE, CANDIDATE), strict=True):
        if arms[name].digest != f"sha256:{subject.digest.sha256}":
            yield f"the digest of {subject.name!r} is not that of arm {name}"


def _about_tensors(statement: Statement, listed_max: int) -> Iterator[str]:
    """Compare the list of tensors with its rule, their number, their bytes and their digest."""
    predicate = statement.predicate
    lines = predicate.tensor_lines
    first, more = lines[:listed_max], [line.name for line in lines[listed_max:]]
    due = min(predicate.tensors, listed_max)
    if len(first) != due or len(lines) > predicate.tensors:
        yield f"{len(lines)} tensors are listed, of {predicate.tensors}, of which {due} have to be"
    if not all(one.name < other.name for one, other in pairwise(lines)):
        yield "the tensors that are listed are not sorted by name, each once"
    if more != _differing(predicate, {line.name for line in first})[:listed_max]:
        yield "the tensors that are listed lack one that differs, or have one more than those"
    if any(line.nbytes != _nbytes(line) for line in lines):
        yield "one of the tensors that are listed has another length than its dtype and shape give"
    listed = Manifest(tuple(TensorDigest(**msgspec.structs.asdict(line)) for line in lines))
    is_whole = len(lines) == predicate.tensors
    if is_whole and listed.digest() != statement.subject[0].digest.sha256:
        yield "the tensors that are listed do not have the digest given for all weights"
    left = predicate.checkpoint_bytes - listed.nbytes()
    if left < 0 or (is_whole and left):
        yield "the tensors that are listed do not have the checkpoint's length"


def _differing(predicate: Predicate, listed: set[str]) -> list[str]:
    """Return the checkpoint's tensors that a check says differ and that are not listed."""
    return sorted(
        {
            found.tensor
            for check in predicate.weights
            for found in check.differences
            if found.kind != "unexpected"
        }
        - listed
    )


def _nbytes(line: TensorLine) -> int | None:
    """Return the bytes that a tensor's dtype and shape take; None for an unknown dtype."""
    bits = DTYPE_BITS.get(line.dtype)
    return None if bits is None else bits * math.prod(line.shape) // 8


def _about_device(predicate: Predicate) -> Iterator[str]:
    """Compare the device with what the legs say that they ran on."""
    if predicate.device != device_of_legs(predicate.legs):
        yield "the device's facts are not those that its legs give"
    if predicate.device_class != class_of_legs(predicate.legs):
        yield "the device class is not that of the facts that its legs give"


def _about_legs(predicate: Predicate) -> Iterator[str]:
    """Compare the code that every leg ran with the code of its arm."""
    for leg in predicate.legs:
        arm = predicate.arms.get(_CODE_OF.get(leg.arm, ""))
        if arm is None:
            yield f"a {leg.purpose} leg is of {leg.arm!r}, which is no arm of it"
        elif isinstance(leg.outcome, Result) and leg.outcome.digest != arm.digest:
            yield f"a {leg.purpose} leg of {leg.arm} ran other code than the arm's digest names"


def _about_weights(statement: Statement) -> Iterator[str]:
    """Compare the checks of the weights with the hash legs, one by one, and with the subject."""
    predicate = statement.predicate
    hashed = [
        (leg.arm, leg.outcome.hazards, leg.outcome.poisoned_bytes)
        for leg in predicate.legs
        if leg.purpose == "hash" and isinstance(leg.outcome, Result)
    ]
    if hashed != [(each.arm, each.hazards, each.poisoned_bytes) for each in predicate.weights]:
        yield "the checks of the weights are not those of its hash legs"
    truth = statement.subject[0].digest.sha256
    if any((each.manifest != truth) != bool(each.differences) for each in predicate.weights):
        yield "a check of the weights names other differences than its digest shows"


def _about_controls(predicate: Predicate) -> Iterator[str]:
    """Compare what became of each control with what it blamed."""
    for each in predicate.controls:
        if each.found and each.name != SERVED_BIT and each.blamed != (each.tensor,):
            yield f"control {each.name!r} is said to be found and did not blame its own tensor"


def _about_conclusion(predicate: Predicate) -> Iterator[str]:
    """Judge the evidence again, and name the part of the conclusion that is another."""
    evidence = Evidence(
        policy=predicate.policy,
        blocks=predicate.blocks,
        cache=predicate.cache,
        sizes=tuple(_sizes(predicate)),
        legs=predicate.legs,
        weights=predicate.weights,
        controls=predicate.controls,
        same_arms=predicate.arms[BASELINE].is_same_code(predicate.arms[CANDIDATE]),
    )
    stated = predicate.conclusion
    again = conclude_from(evidence, stated.requirement, stated.coverage.changed_routes)
    # What a receipt quotes has lost its paths; what is worked out from it loses them as well.
    said, due = _plain(stated), _plain(again)
    for part, name in _PARTS.items():
        if said[part] == due[part]:
            continue
        is_other = part == "verdict" and stated.verdict.outcome != again.verdict.outcome
        word = f", {stated.verdict.outcome!r}," if is_other else ""
        why = again.reasons[0].sentence.rstrip(".")
        yield f"{name}{word} does not follow from its legs and controls, which say: {why}"


def _plain(conclusion: object) -> Any:  # noqa: ANN401 -- any JSON
    return without_paths(msgspec.to_builtins(conclusion))


def _sizes(predicate: Predicate) -> Iterator[int]:
    """Yield every listed tensor's length, and what is left to the others as at most two.

    Only the sum counts, whether any length is above zero or one, and whether there are two of
    them: what all tensors after the first 2,000 hardly ever decide.
    """
    yield from (line.nbytes for line in predicate.tensor_lines)
    left = predicate.checkpoint_bytes - sum(line.nbytes for line in predicate.tensor_lines)
    half = left // 2 if predicate.tensors - len(predicate.tensor_lines) > 1 else 0
    yield from (left - half, half)
