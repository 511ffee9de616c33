"""One qualification from end to end: plan, measure, judge, report.

Everything that a person can get wrong is checked before an arm is installed, and that before the
first leg: the policy, the checkpoint (by the independent reader), the device, where the receipt
goes and the key that signs it, both revisions or loaders, the routes.  The arms live in a
temporary folder that is gone afterwards, however this ends.
"""

from __future__ import annotations

import secrets
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadproof.errors import ArmError, DeviceError, ServingError
from loadproof.judge.conclusion import conclude
from loadproof.judge.verdict import Requirement
from loadproof.measure.cache_state import Wanted
from loadproof.measure.device import require_device
from loadproof.measure.environment import describe_environment
from loadproof.measure.ground_truth import (
    file_manifest,
    require_weights,
    shard_paths,
    tensor_places,
)
from loadproof.measure.messages import Failure, Result
from loadproof.measure.serve_legs import (
    CANNOT_SERVE,
    LONG_PROMPT_TOKENS,
    ServingPlan,
    WantsServed,
    plan_serving,
)
from loadproof.measure.trial import Trial, TrialPlan, run_trial
from loadproof.plan.arms import (
    InstalledArm,
    choose,
    install,
    named_loader,
    require_route,
    split_options,
)
from loadproof.plan.policy import load_policy
from loadproof.plan.project import OURS, read_project
from loadproof.plan.revisions import Repository
from loadproof.plan.scratch import scratch_folder
from loadproof.report.envelope import require_key, sign
from loadproof.report.files import require_writable, write_run
from loadproof.report.markdown import render
from loadproof.report.page import render_page
from loadproof.report.privacy import Private, private_here, require_public_names
from loadproof.report.receipt import Statement, encode, make_receipt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from loadproof.judge.conclusion import Conclusion
    from loadproof.plan.arms import Arm
    from loadproof.plan.project import Project
    from loadproof.plan.revisions import Revision

RECEIPT_NAME = "receipt.json"
REPORT_NAME = "report.md"
PAGE_NAME = "report.html"
FAILED_LEG_NAME = "failed-leg.txt"
# The receipt first: it vouches for the others.
WRITTEN = (RECEIPT_NAME, REPORT_NAME, PAGE_NAME, FAILED_LEG_NAME)
LOADER_PREFIX = "loader:"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked for.

    Attributes:
        project: A folder inside the repository that the arms come from.
        project_file: What says how a revision is built and called; None takes the repository's
            own ``loadproof.toml``, if it has one.
        baseline: What is behind A, A' and S: a revision, or ``loader:NAME``, each with
            options of its own after a question mark.
        candidate: The same for B; also ``worktree``.
        checkpoint: Folder or file of safetensors.
        device: ``fake``, ``fake:<profile>`` or ``cuda:<ordinal>``.
        out: Folder for the receipt and the report.
        policy: Name of the policy, or the path of one.
        blocks: Mirrored blocks; None takes the policy's.
        seed: Of the order and the controls; None draws one.
        require: What the candidate has to be.
        changed_routes: The routes that the change touches, for coverage.
        sign_key: Private key to sign the receipt with; None leaves it hashed.
        cache: The page-cache state that every leg starts from.
        options: Keyword arguments for both arms' loaders.
        served: Whether each arm serves a model made of what it loaded.
        prompt_tokens: Length of the long prompt that is served on a GPU.
        allow_dirty: Whether uncommitted changes may be a candidate.
        allow_detached: Whether a detached HEAD may be one.
    """

    project: Path
    project_file: Path | None = None
    baseline: str
    candidate: str
    checkpoint: Path
    device: str
    out: Path
    policy: str
    blocks: int | None = None
    seed: int | None = None
    require: Requirement = "no-regression"
    changed_routes: tuple[str, ...] = ()
    sign_key: Path | None = None
    cache: Wanted = "warm"
    options: dict[str, Any] = {}
    served: WantsServed = "no"
    prompt_tokens: int = LONG_PROMPT_TOKENS
    allow_dirty: bool = False
    allow_detached: bool = False


class Qualified(msgspec.Struct, frozen=True):
    """The receipt, and where everything was written.

    Attributes:
        statement: The receipt.
        receipt: Where it is.
        report: Where the page for people is.
        failed_leg: Where the standard error of the first leg that failed is; it may name paths
            and is therefore no part of the receipt.  None when no leg failed.
    """

    statement: Statement
    receipt: Path
    report: Path
    failed_leg: Path | None


def qualify(job: Job, progress: Callable[[str, int, int], None]) -> Qualified:
    """Run a whole qualification and write its receipt and report.

    Args:
        job: What to do.
        progress: Told what is being done, its number from 0, and how many there are.

    Raises:
        LoadproofError: Something is not as it has to be; nothing was written then.
    """
    policy = load_policy(job.policy)
    shards = tuple(shard_paths(job.checkpoint))
    places = tensor_places(job.checkpoint)
    require_weights(job.checkpoint, places)
    require_public_names(job.checkpoint, places)
    require_device(job.device)
    require_writable(job.out, WRITTEN)
    if job.sign_key is not None:
        require_key(job.sign_key)
    seed = secrets.randbits(32) if job.seed is None else job.seed
    serving = plan_serving(
        job.served,
        job.checkpoint.resolve(),
        places,
        device=job.device,
        seed=seed,
        long_prompt_tokens=job.prompt_tokens,
    )
    with _arms_folder() as folder:
        private = _private(job, folder, [policy.name, *(each.name for each in places)])
        baseline, candidate = _make_arms(job, folder, progress)
        _require_told_apart(baseline, candidate, private)
        progress("hashing the checkpoint", 0, 0)
        truth = file_manifest(places)
        plan = TrialPlan(
            policy=policy,
            blocks=policy.blocks if job.blocks is None else job.blocks,
            seed=seed,
            device=job.device,
            checkpoint=job.checkpoint.resolve(),
            shards=shards,
            truth=truth,
            cache=job.cache,
            baseline=baseline,
            candidate=candidate,
            options=job.options,
            serving=serving,
        )
        trial = run_trial(plan, progress)
    _require_device(trial)
    # What is concluded quotes what was seen, so it is concluded from what may be quoted.
    seen = private.cleared(trial)
    plan = msgspec.structs.replace(
        plan,
        baseline=_cleared(plan.baseline, private),
        candidate=_cleared(plan.candidate, private),
    )
    conclusion = conclude(plan, seen, job.require, private.cleared(job.changed_routes))
    _require_served(plan, seen, conclusion)
    statement = make_receipt(plan, seen, conclusion, private.cleared(describe_environment()))
    return _write(job, statement, trial.said)


def _private(job: Job, folder: Path, kept: Sequence[str]) -> Private:
    """Say what must not be in the receipt of a job whose arms are in this folder."""
    places = (job.checkpoint, job.out, job.project, job.project_file, job.sign_key, folder)
    return private_here(*places, kept=kept)


def _cleared(installed: InstalledArm, private: Private) -> InstalledArm:
    return InstalledArm(private.cleared(installed.arm), installed.site)


def _require_told_apart(baseline: InstalledArm, candidate: InstalledArm, private: Private) -> None:
    """Refuse two arms that a receipt could not tell apart, since it names no folder.

    Raises:
        ArmError: They are such.
    """
    if baseline.arm.is_same_code(candidate.arm):
        return
    if private.cleared(baseline.arm).is_same_code(private.cleared(candidate.arm)):
        raise ArmError(
            "The arms differ only in the folders that their options name, and a receipt names no "
            "folder; give the files in them different names."
        )


@contextmanager
def _arms_folder() -> Iterator[Path]:
    """Make the folder that the arms are installed into.

    Raises:
        ArmError: There is no room for one.
    """
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(scratch_folder("arms"))
        except OSError as error:
            raise ArmError(
                f"There is no folder for the arms: {error.strerror}; free some room in "
                f"{tempfile.gettempdir()}, or name another place in TMPDIR."
            ) from error
        yield folder


def _require_routes(job: Job, project: Project | None) -> None:
    """Refuse a route that our own loader does not have; other loaders' options are theirs.

    Raises:
        ArmError: There is no such route.
    """
    for spoken in (job.baseline, job.candidate):
        name, options = split_options(spoken)
        if name.startswith(LOADER_PREFIX):
            ours = name == f"{LOADER_PREFIX}weightload"
        else:
            ours = project is not None and project.entry == OURS.entry
        if not ours:
            continue
        for given in (options, job.options, {} if project is None else project.options):
            require_route(given.get("route"), "auto")
        for route in job.changed_routes if spoken == job.candidate else ():
            require_route(route)


def _write(job: Job, statement: Statement, said: str) -> Qualified:
    """Write the receipt and what stands beside it, all of it or nothing."""
    content = encode(statement)
    files = {
        RECEIPT_NAME: content if job.sign_key is None else sign(content, job.sign_key),
        REPORT_NAME: render(statement).encode(),
        PAGE_NAME: render_page(statement).encode(),
    }
    if said:
        files[FAILED_LEG_NAME] = said.encode()
    write_run(job.out, files, WRITTEN)
    return Qualified(
        statement,
        job.out / RECEIPT_NAME,
        job.out / REPORT_NAME,
        job.out / FAILED_LEG_NAME if said else None,
    )


def _make_arms(
    job: Job, folder: Path, progress: Callable[[str, int, int], None]
) -> tuple[InstalledArm, InstalledArm]:
    """Resolve both arms before either is installed, so that a slip costs no waiting."""
    # A receipt of an earlier run, beside the code, does not make the code dirty.
    ours = [job.out / name for name in WRITTEN]
    repository = project = None
    chosen: list[InstalledArm | tuple[Revision, dict[str, Any]]] = []
    for spoken in (job.baseline, job.candidate):
        if spoken.startswith(LOADER_PREFIX):
            chosen.append(named_loader(spoken.removeprefix(LOADER_PREFIX), job.options))
            continue
        name, options = split_options(spoken)
        repository = repository or Repository(job.project)
        project = project or read_project(repository.root, job.project_file)
        revision = choose(
            repository,
            name,
            allow_dirty=job.allow_dirty,
            allow_detached=job.allow_detached,
            leave_out=ours,
        )
        chosen.append((revision, options))
    _require_routes(job, project)
    arms = []
    for each in chosen:
        if isinstance(each, InstalledArm):
            arms.append(each)
        elif repository is not None and project is not None:
            revision, options = each
            progress(f"installing {revision.spoken}", 0, 0)
            # What was said for this run goes before what the project's file says for all.
            said = {key: value for key, value in project.options.items() if key not in job.options}
            arms.append(install(repository, revision, folder, project, {**said, **options}))
    baseline, candidate = arms
    _require_one_difference(baseline.arm, candidate.arm)
    return baseline, candidate


def _require_one_difference(baseline: Arm, candidate: Arm) -> None:
    """Refuse two revisions that differ in more than one thing: no verdict could say which did it.

    Raises:
        ArmError: They do.
    """
    if baseline.revision is None or candidate.revision is None:
        return
    differ = [
        what
        for what, one, other in (
            ("code", baseline.digest, candidate.digest),
            ("options", baseline.options, candidate.options),
            ("entry point", baseline.entry, candidate.entry),
            ("command", baseline.command, candidate.command),
        )
        if one != other
    ]
    if len(differ) > 1:
        raise ArmError(
            f"The arms differ in {' and in '.join(differ)}, so a verdict could not say which made "
            "the difference; let exactly one thing differ, such as the options of one revision."
        )


def _require_served(plan: TrialPlan, trial: Trial, conclusion: Conclusion) -> None:
    """End without a receipt when served output was asked for and cannot be had."""
    asked = isinstance(plan.serving, ServingPlan) and plan.serving.required
    last = trial.legs[-1].outcome
    if not asked or conclusion.served != "not-run" or isinstance(last, Result):
        return
    if last.code == CANNOT_SERVE:
        raise ServingError(f"Served output was asked for. {last.sentence}")


def _require_device(trial: Trial) -> None:
    """End without a receipt when the very first leg found no device."""
    first = trial.legs[0].outcome
    if isinstance(first, Failure) and first.code == "no-device":
        raise DeviceError(first.sentence)
