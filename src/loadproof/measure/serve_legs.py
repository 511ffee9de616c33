"""Serve legs, seen from the trial: whether there are any, their prompts, and how they compare.

Each loads once more in a fresh process and serves.  On a GPU they start with a cold page cache
and a long prompt comes first, right after the load, because a loader that gives pages early
back could move its cost there; the fake device serves a short prompt only.
"""

from __future__ import annotations

from itertools import starmap, zip_longest
from typing import TYPE_CHECKING, Literal

import msgspec

from loadproof.errors import ServingError
from loadproof.measure.controls import SERVED_BIT, Control
from loadproof.measure.ground_truth import shard_paths
from loadproof.measure.legs import NotRun
from loadproof.measure.messages import Failure, Serving
from loadproof.plan.arms import InstalledArm, named_loader
from loadproof.plan.schedule import BASELINE, CANDIDATE, REFERENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from loadproof.measure.ground_truth import TensorPlace
    from loadproof.measure.messages import Answer, Result, Served
    from loadproof.measure.trial import Trial

    RunLeg = Callable[..., Result | None]

# asked: it has to be possible.  if-cheap: done on the fake device where it costs seconds.
WantsServed = Literal["asked", "if-cheap", "no"]

SERVED_OUTPUT = "served output"
CANNOT_SERVE = "cannot-serve"
LONG_PROMPT_TOKENS = 32_768
_SHORT_PROMPT_TOKENS = 24
_NEW_TOKENS = 16
_CHEAP_BYTES_MAX = 1 << 30
_TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class ServingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """That there are serve legs, and how they serve.

    Attributes:
        reference: transformers as it is installed here.
        serving: What every leg is told; the reference's and the control's differ in one word.
        required: Whether a trial without served output is none.
    """

    reference: InstalledArm
    serving: Serving
    required: bool


def plan_serving(
    wanted: WantsServed,
    checkpoint: Path,
    places: Sequence[TensorPlace],
    *,
    device: str,
    seed: int,
    long_prompt_tokens: int = LONG_PROMPT_TOKENS,
) -> ServingPlan | NotRun:
    """Decide whether there are serve legs; without them, say why not.

    Args:
        wanted: Whether they are.
        checkpoint: Folder or file of safetensors.
        places: Its tensors.
        device: As for a trial.
        seed: Where the prompts' tokens come from.
        long_prompt_tokens: Length of the long prompt on a GPU.

    Raises:
        ServingError: They were asked for, and this checkpoint has no model to serve.
    """
    on_fake = device.partition(":")[0] == "fake"
    why = _why_not(wanted, checkpoint, places, on_fake=on_fake)
    if why is not None and wanted == "asked":
        raise ServingError(f"Served output was asked for, and {why}.")
    if why is not None:
        return NotRun(SERVED_OUTPUT, why)
    long = () if on_fake else (long_prompt_tokens,)
    return ServingPlan(
        reference=named_loader("transformers"),
        serving=Serving(
            folder=str(checkpoint),
            prompts=(*long, _SHORT_PROMPT_TOKENS),
            new_tokens=_NEW_TOKENS,
            seed=seed,
            dtype=_usual_dtype(places),
            cold=not on_fake,
        ),
        required=wanted == "asked",
    )


def serve(plan: ServingPlan | NotRun, trial: Trial, run_leg: RunLeg) -> bool:
    """Serve by the reference and by each arm.

    Args:
        plan: How, or why not.
        trial: What was served and what was not goes there.
        run_leg: Runs and records one leg.

    Returns:
        Whether the trial may go on: False when a leg ended without a result, unless that only
        says that this checkpoint cannot be served and nobody insisted.
    """
    if isinstance(plan, NotRun):
        trial.not_run.append(plan)
        return True
    for arm in (REFERENCE, BASELINE, CANDIDATE):
        result = run_leg(
            "serve",
            arm,
            serving=msgspec.structs.replace(plan.serving, reference=arm == REFERENCE),
        )
        if result is not None and result.served is not None:
            trial.served[arm] = result.served
            continue
        why = _cannot_serve(trial)
        if why is None:
            return False
        trial.not_run.append(NotRun(f"{SERVED_OUTPUT} of {arm}", why))
        # Where the baseline can be served and the candidate cannot, something is wrong.
        if plan.required or (arm == CANDIDATE and BASELINE in trial.served):
            return False
        if arm == REFERENCE:
            break
    return True


def served_differs(served: Mapping[str, Served]) -> bool:
    """Say whether an arm served something else than the reference."""
    return any(
        first_difference(served[REFERENCE], served[arm]) is not None
        for arm in (BASELINE, CANDIDATE)
        if arm in served
    )


def serve_spoilt(plan: ServingPlan | NotRun, trial: Trial, run_leg: RunLeg) -> bool:
    """Serve once more with one weight spoilt on the device; the output has to differ.

    Args:
        plan: As for ``serve``.
        trial: The control goes there.
        run_leg: As for ``serve``.

    Returns:
        False when the leg ended without a result.
    """
    if isinstance(plan, NotRun) or CANDIDATE not in trial.served:
        return True
    last = plan.serving.prompts[-1:]
    serving = msgspec.structs.replace(plan.serving, prompts=last, cold=False, plant=True)
    result = run_leg("serve-control", CANDIDATE, serving=serving)
    if result is None or result.served is None:
        why = _cannot_serve(trial)
        if why is not None:
            trial.not_run.append(NotRun(SERVED_BIT, why))
        return why is not None
    reference = trial.served[REFERENCE]
    seen = first_difference(
        msgspec.structs.replace(reference, answers=reference.answers[-1:]), result.served
    )
    trial.controls.append(
        Control(
            name=SERVED_BIT,
            planted=result.served.planted or "nothing",
            tensor=result.served.planted_in or "",
            blamed=(),
            seen=() if seen is None else (seen,),
            found=seen is not None,
        )
    )
    return True


def _cannot_serve(trial: Trial) -> str | None:
    """Return why the last leg cannot serve; None when it ended in another way."""
    outcome = trial.legs[-1].outcome
    if isinstance(outcome, Failure) and outcome.code == CANNOT_SERVE:
        return outcome.sentence
    return None


def first_difference(reference: Served, found: Served) -> str | None:
    """Say where served output first differs from the reference's; None when it is equal.

    Speed and place are no part of it.
    """
    if (reference.model, reference.dtype) != (found.model, found.dtype):
        return (
            f"{found.model} in {found.dtype} served, and not {reference.model} in "
            f"{reference.dtype}"
        )
    pairs = zip_longest(reference.answers, found.answers)
    return next((seen for seen in starmap(_answer_differs, pairs) if seen is not None), None)


def _answer_differs(wanted: Answer | None, seen: Answer | None) -> str | None:
    if wanted is None or seen is None:
        return "not the same number of prompts was answered"
    after = f"after a prompt of {wanted.prompt_tokens} tokens"
    if wanted.prompt_tokens != seen.prompt_tokens:
        return f"a prompt had {seen.prompt_tokens} tokens, and not {wanted.prompt_tokens}"
    tokens = enumerate(zip_longest(wanted.tokens, seen.tokens), start=1)
    outputs = zip_longest(wanted.outputs, seen.outputs)
    differing = [
        *(
            f"token {place} of {len(wanted.tokens)} {after} was {found}, and not {token}"
            for place, (token, found) in tokens
            if token != found
        ),
        *(
            f"the output {(found or output).name!r} {after} has other bytes"
            for output, found in outputs
            if output != found
        ),
    ]
    return differing[0] if differing else None


def _why_not(
    wanted: WantsServed, checkpoint: Path, places: Sequence[TensorPlace], *, on_fake: bool
) -> str | None:
    single = checkpoint / "model.safetensors"
    if wanted == "no":
        why = "it was not asked for; --served does it"
    elif not (checkpoint / "config.json").is_file():
        why = "the checkpoint has no config.json, so there is no model to serve"
    elif single.is_file() and single not in shard_paths(checkpoint):
        why = "transformers would load model.safetensors, which the index does not name"
    elif wanted == "asked":
        return None
    elif not on_fake:
        why = "three cold loads and a long prompt take long on a GPU; --served asks for them"
    elif sum(each.nbytes for each in places) > _CHEAP_BYTES_MAX:
        why = "a model of more than 1 GiB is slow on the CPU; --served asks for it all the same"
    else:
        return None
    return why


def _usual_dtype(places: Sequence[TensorPlace]) -> str:
    """Return torch's name of the floating dtype that holds the most bytes."""
    held = dict.fromkeys(_TORCH_NAMES, 0)
    for each in places:
        if each.dtype in held:
            held[each.dtype] += each.nbytes
    return _TORCH_NAMES[max(held, key=lambda dtype: (held[dtype], dtype == "F32"))]
