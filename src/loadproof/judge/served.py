"""Whether both arms serve what transformers serves from the files: pure, from the legs alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from loadproof.judge.verdict import Reason
from loadproof.measure.messages import Failure, Result
from loadproof.measure.serve_legs import CANNOT_SERVE, first_difference
from loadproof.plan.schedule import BASELINE, CANDIDATE, REFERENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadproof.measure.legs import Leg
    from loadproof.measure.messages import Served

ServedWord = Literal["equal", "differs", "not-run"]


def judge_served(legs: Sequence[Leg]) -> tuple[ServedWord, list[Reason]]:
    """Compare what the serve legs served; a reason for each arm that differs.

    A candidate that cannot be served although the baseline can be differs from it too.
    """
    outcomes = {leg.arm: leg.outcome for leg in legs if leg.purpose == "serve"}
    served = {arm: _served(outcome) for arm, outcome in outcomes.items()}
    reference, baseline = served.get(REFERENCE), served.get(BASELINE)
    if reference is None:
        return "not-run", []
    reasons = []
    for arm in (BASELINE, CANDIDATE):
        found = served.get(arm)
        seen = None if found is None else first_difference(reference, found)
        if seen is not None:
            sentence = f"Arm {arm} does not serve what transformers does from the files: {seen}."
            reasons.append(Reason("served-differs", sentence))
    refused = outcomes.get(CANDIDATE)
    if baseline is not None and isinstance(refused, Failure) and refused.code == CANNOT_SERVE:
        sentence = f"Arm {BASELINE} can be served and arm {CANDIDATE} cannot: {refused.sentence}"
        reasons.append(Reason("served-differs", sentence))
    if reasons:
        return "differs", reasons
    complete = None not in {served.get(arm) for arm in (BASELINE, CANDIDATE)}
    return ("equal" if complete else "not-run"), []


def _served(outcome: Result | Failure) -> Served | None:
    return outcome.served if isinstance(outcome, Result) else None
