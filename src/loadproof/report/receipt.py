"""The receipt: one JSON file that says what was compared, on what, and what came of it.

It is an in-toto Statement (version 1) whose subjects are the weights and the two loaders, and
whose predicate carries the raw samples, the seed, the policy, the environment, the controls
and what was not run.  Without a signature it is *hashed*: it binds what it speaks of by digest
and says nothing about who wrote it.

Source: https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from loadproof.errors import ReceiptError
from loadproof.judge.conclusion import EXIT_STATUS, Conclusion
from loadproof.measure.cache_state import Wanted
from loadproof.measure.controls import Control
from loadproof.measure.environment import Environment
from loadproof.measure.legs import Leg, NotRun, WeightsCheck
from loadproof.measure.messages import DeviceFacts, Result
from loadproof.measure.serve_legs import ServingPlan
from loadproof.plan.arms import Arm
from loadproof.plan.policy import BLOCKS_MAX, Policy
from loadproof.plan.schedule import REFERENCE
from loadproof.report.consistency import class_of_legs, contradiction, device_of_legs
from loadproof.report.privacy import first_private_text, without_paths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loadproof.measure.trial import Trial, TrialPlan

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE: Final = "urn:loadproof:receipt:v1"

# Some 400 kB of a receipt; a checkpoint with more tensors is listed in part.
TENSORS_LISTED_MAX = 2000

# More could not be judged in a moment, nor, in a receipt that somebody made up, in any time.
_Blocks = Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_MAX)]
_Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class DigestSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A subject's digest."""

    sha256: _Sha256


class Subject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that a receipt speaks of."""

    name: str
    digest: DigestSet


class TensorLine(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """One tensor as the files hold it, in the fewest words: an array in this order.

    Attributes:
        name: The tensor's name.
        dtype: The safetensors dtype name.
        shape: Elements along each axis.
        nbytes: Length in bytes.
        sha256: Hex SHA-256 of the raw bytes.
        crc32: CRC-32 of the same bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: _Sha256
    crc32: int


class Predicate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a trial was and what came of it.

    Attributes:
        integrity: ``hashed``: nobody signed this.
        device_class: ``rehearsal`` (the fake), ``cuda:<name>``, ``gb10`` or ``unknown``
            (no leg got as far as the device, or they were not all on the same one).
        exit_status: What the command line ended with.
        conclusion: Answer, verdict, weights, coverage and reasons.
        weights: One check per hash leg.
        controls: The planted faults.
        policy: The rules, by value.
        policy_digest: And by digest.
        blocks: Mirrored blocks that were fixed beforehand.
        seed: Where order and controls came from.
        arms: The code behind A (also A' and S), behind B, and behind the reference of the served
            output where there was one.
        cache: The page-cache state that every leg was to start from.
        options: Keyword arguments of both arms' loaders.
        device: What the device of the first leg is; None when no leg got that far.
        environment: Machine and software.
        tensors: Tensors of the checkpoint.
        checkpoint_bytes: Their bytes.
        tensor_lines: Each of them; where there are more than ``TENSORS_LISTED_MAX``, as many of
            the first by name, and as many of those that differ on a device.
        legs: Every leg in order, with its raw samples.
        not_run: What was left out, and why.
    """

    integrity: Literal["hashed"]
    device_class: str
    exit_status: int
    conclusion: Conclusion
    weights: tuple[WeightsCheck, ...]
    controls: tuple[Control, ...]
    policy: Policy
    policy_digest: str
    blocks: _Blocks
    seed: int
    arms: dict[str, Arm]
    cache: Wanted
    options: dict[str, Any]
    device: DeviceFacts | None
    environment: Environment
    tensors: int
    checkpoint_bytes: int
    legs: tuple[Leg, ...]
    not_run: tuple[NotRun, ...]
    tensor_lines: tuple[TensorLine, ...] = ()


class Statement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The in-toto envelope around a predicate."""

    type_: Literal["https://in-toto.io/Statement/v1"] = msgspec.field(name="_type")
    subject: tuple[Subject, ...]
    predicate_type: Literal["urn:loadproof:receipt:v1"] = msgspec.field(name="predicateType")
    predicate: Predicate


def make_receipt(
    plan: TrialPlan, trial: Trial, conclusion: Conclusion, environment: Environment
) -> Statement:
    """Put a trial and its conclusion into a statement that is free of paths.

    Raises:
        ReceiptError: Something that names a place on this machine would be in it.
    """
    baseline, candidate = plan.baseline.arm, plan.candidate.arm
    statement = Statement(
        type_=STATEMENT_TYPE,
        subject=(
            Subject(name="weights", digest=DigestSet(sha256=plan.truth.digest())),
            Subject(name="loader:baseline", digest=_digest_set(baseline)),
            Subject(name="loader:candidate", digest=_digest_set(candidate)),
        ),
        predicate_type=PREDICATE_TYPE,
        predicate=Predicate(
            integrity="hashed",
            device_class=class_of_legs(trial.legs),
            exit_status=EXIT_STATUS[conclusion.answer],
            conclusion=conclusion,
            weights=tuple(trial.weights),
            controls=tuple(trial.controls),
            policy=plan.policy,
            policy_digest=plan.policy.digest(),
            blocks=plan.blocks,
            seed=plan.seed,
            arms={"A": baseline, "B": candidate, **_reference(plan)},
            cache=plan.cache,
            options=plan.options,
            device=device_of_legs(trial.legs),
            environment=environment,
            tensors=len(plan.truth.tensors),
            checkpoint_bytes=plan.truth.nbytes(),
            legs=tuple(trial.legs),
            not_run=(*trial.not_run, *_not_shown(plan, trial)),
            tensor_lines=tuple(_tensor_lines(plan, trial)),
        ),
    )
    cleaned = without_paths(msgspec.to_builtins(statement))
    return _checked(msgspec.convert(cleaned, Statement))


def encode(statement: Statement) -> bytes:
    """Return a receipt's text: JSON, two spaces deep, with a last newline."""
    return msgspec.json.format(msgspec.json.encode(statement), indent=2) + b"\n"


def decode(text: bytes) -> Statement:
    """Read a receipt strictly.

    Raises:
        ReceiptError: It is not a receipt, lacks a field, has one too many, or names a place on
            the machine that wrote it.
    """
    try:
        statement = msgspec.json.decode(text, type=Statement)
    except msgspec.DecodeError as error:
        raise ReceiptError(f"This is not a valid receipt: {error}.") from error
    return _checked(statement)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema that every receipt matches, made from the classes above."""
    return msgspec.json.schema(Statement)


def _digest_set(arm: Arm) -> DigestSet:
    return DigestSet(sha256=arm.digest.removeprefix("sha256:"))


def _reference(plan: TrialPlan) -> dict[str, Arm]:
    if isinstance(plan.serving, NotRun):
        return {}
    return {REFERENCE: plan.serving.reference.arm}


def _tensor_lines(plan: TrialPlan, trial: Trial) -> Iterator[TensorLine]:
    """Yield the tensors that are listed, sorted by name."""
    wrong = {each.tensor for check in trial.weights for each in check.differences}
    first = plan.truth.tensors[:TENSORS_LISTED_MAX]
    more = [each for each in plan.truth.tensors[TENSORS_LISTED_MAX:] if each.name in wrong]
    for each in (*first, *more[:TENSORS_LISTED_MAX]):
        yield TensorLine(
            name=each.name,
            dtype=each.dtype,
            shape=each.shape,
            nbytes=each.nbytes,
            sha256=each.sha256,
            crc32=each.crc32,
        )


def _not_shown(plan: TrialPlan, trial: Trial) -> tuple[NotRun, ...]:
    """Say which claims this trial cannot support, because of where and how it ran."""
    found = class_of_legs(trial.legs)
    missing = [*_not_on_hardware(trial, found)]
    if any(each.arm.command is not None for each in (plan.baseline, plan.candidate)):
        missing.append(
            NotRun(
                "races, and copies off the device while it was timed",
                "a program loads in a process of its own, which nothing watches from inside",
            )
        )
    missing += _not_served(plan, trial, found)
    if plan.cache != "cold":
        missing.append(NotRun("a cold page cache", f"the legs were to start {plan.cache}"))
    unknown = next((leg.cache.why for leg in trial.legs if leg.cache.state == "unknown"), None)
    if unknown is not None:
        missing.append(NotRun("a proven page-cache state", unknown))
    missing += [*_partly_audited(plan, trial), *_ring_never_full(trial)]
    bare = [each for each in trial.weights if (each.poisoned_bytes or 0) < plan.truth.nbytes()]
    if bare:
        missing.append(
            NotRun(
                "a destination filled with a pattern before every hash leg",
                f"{len(bare)} of them put weights into memory that was not ours to fill",
            )
        )
    refused = next(
        (
            leg.conditions.gpu.absent["clock_mhz_max"]
            for leg in trial.legs
            if "clock_mhz_max" in leg.conditions.gpu.absent
        ),
        None,
    )
    if refused is not None:
        missing.append(NotRun("the GPU's clocks, power and temperature", refused))
    return tuple(missing)


def _not_on_hardware(trial: Trial, found: str) -> Iterator[NotRun]:
    """Say of which hardware a trial of this class says nothing."""
    if found == "unknown":
        why = "its legs did not all run on one and the same device"
        if device_of_legs(trial.legs) is None:
            why = "no leg came so far as to say what it ran on"
        yield NotRun("anything about a GPU", why)
    elif found == "rehearsal":
        yield NotRun("time on a GPU", "no GPU: copies ran in host memory")
    if found not in {"unknown", "gb10"}:
        yield NotRun("anything about a GB10", "no GB10: this trial ran elsewhere")


def _partly_audited(plan: TrialPlan, trial: Trial) -> Iterator[NotRun]:
    """Say how little of what was timed was read back, when it was not all of it."""
    read = [
        leg.outcome.audited_bytes
        for leg in trial.legs
        if isinstance(leg.outcome, Result) and leg.outcome.audited_bytes is not None
    ]
    if read and min(read) < plan.truth.nbytes():
        yield NotRun(
            "the bytes of every tensor after every timing leg",
            f"each leg read back a random sample, at least {min(read):,} of "
            f"{plan.truth.nbytes():,} bytes",
        )


def _ring_never_full(trial: Trial) -> Iterator[NotRun]:
    """Say when a hash leg need not have shown that a slot is settled before it is used again."""
    for leg in trial.legs:
        report = leg.outcome.report if isinstance(leg.outcome, Result) else None
        reads, slots = (report or {}).get("reads"), (report or {}).get("slot_count")
        if leg.purpose != "hash" or not isinstance(reads, int) or not isinstance(slots, int):
            continue
        if 0 < reads <= slots:
            yield NotRun(
                "a slot that is settled and used again",
                f"{leg.arm} had {slots} slots for {reads} reads, so no slot need have been used "
                "twice; take a larger checkpoint, or a smaller ring, such as by the option "
                "slot_count=2 of both arms",
            )
            return


def _not_served(plan: TrialPlan, trial: Trial, found: str) -> list[NotRun]:
    """Say what the serve legs, where there were any, did not show."""
    what = "a long prompt right after a cold load"
    if not isinstance(plan.serving, ServingPlan) or not trial.served:
        return []
    if found == "rehearsal":
        return [NotRun(what, "no GPU: on the fake device the model runs on the CPU")]
    warm = [leg for leg in trial.legs if leg.purpose == "serve" and leg.cache.state != "cold"]
    return [
        NotRun(what, f"the leg of {leg.arm} started {leg.cache.state}: {leg.cache.why}")
        for leg in warm[:1]
    ]


def _checked(statement: Statement) -> Statement:
    """Refuse what the types cannot: private text, and figures that contradict each other.

    Raises:
        ReceiptError: Such a thing is in it.
    """
    found = first_private_text(msgspec.to_builtins(statement))
    predicate = statement.predicate
    if found is not None:
        problem: str | None = f"{found!r} names a place on a machine"
    elif predicate.policy_digest != predicate.policy.digest():
        problem = "the policy does not have the digest that is given for it"
    elif predicate.exit_status != EXIT_STATUS[predicate.conclusion.answer]:
        problem = "the exit status is not that of the answer"
    else:
        problem = contradiction(statement, TENSORS_LISTED_MAX)
    if problem is not None:
        raise ReceiptError(f"This is not a valid receipt: {problem}.")
    return statement
