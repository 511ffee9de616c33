"""Everything the harness promises on a GPU, in one run of a few minutes.

    python -m qualification.cuda_rehearsal --out OUT

Three stages, each written as soon as it is done: the same code against itself (no-gain, with
every control, and what a model of the weights serves), against itself slowed by 3 %
(regression), and the league of the loaders that are installed. What there was no time for is
said, and nothing is left half written.

On a shared host one load of a fraction of a second varies by several per cent, and a few
blocks cannot tell 3 % from that: such a trial is inconclusive, as it should be. To show what
the harness can tell, both arms of the trials are therefore main plus a fixed pause inside the
timed part (`--pause-s`, a branch called `paused`); `--pause-s 0` takes main as it is. The
league has no pause.

`--device fake` runs the same on the fake driver, to try the script itself.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from fixtures.checkpoints import Tensor, decoder, in_shards, write_checkpoint
from fixtures.repositories import commit_all, git
from loadproof.compare import LeagueJob, compare
from loadproof.errors import ArmError, LoadproofError
from loadproof.loaders import LOADERS
from loadproof.measure.controls import CONTROLS
from loadproof.plan.arms import named_loader
from loadproof.plan.policy import load_policy
from loadproof.qualify import Job, qualify

ROOT = Path(__file__).parents[1]
HIDDEN = 2048
HEADS = 16
LEAGUE = (
    "weightload",
    "instanttensor",
    "safetensors-prefetch",
    "safetensors",
    "touch",
    "fastsafetensors",
    "runai",
    "transformers",
    "gb10-load-llm",
)
# A host shared with strangers: their memory comes and goes, and waiting for it costs minutes.
SHARED_HOST = {
    "hash_legs": 1,
    "memory_missing_bytes_max": 32 << 30,
    "memory_wait_s": 1.0,
    "swapped_bytes_max": 1 << 30,
}
PUBLIC_NAME = "from weightload.load import load\n"
SLOWER = '''from weightload.load import load as _load


def load(*arguments, **options):
    """Load, pause for {pause_s} s, and take {percent} per cent longer."""
    import time

    begun = time.perf_counter()
    loaded = _load(*arguments, **options)
    if options.get("driver") is None:
        import torch

        torch.cuda.synchronize()
    time.sleep({pause_s})
    time.sleep({fraction} * (time.perf_counter() - begun))
    return loaded

'''
CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS // 4,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """Write a decoder of about this size that transformers can load too."""
    feed_forward, vocabulary = 4 * HIDDEN, 32_000
    layer_bytes = 2 * (3 * HIDDEN * feed_forward + 5 * HIDDEN * HIDDEN // 2)
    layers = max(1, round((gigabytes * 1e9 - 4 * vocabulary * HIDDEN) / layer_bytes))
    tensors: list[Tensor] = decoder(layers, HIDDEN, feed_forward, vocabulary)
    write_checkpoint(folder, in_shards(tensors, 4), seed=9)
    sizes = {
        "num_hidden_layers": layers,
        "intermediate_size": feed_forward,
        "vocab_size": vocabulary,
    }
    (folder / "config.json").write_bytes(msgspec.json.encode(CONFIG | sizes))


def make_repository(folder: Path, bundle: Path | None, pause_s: float, percent: float) -> None:
    """Make a repository with the branches `main`, `paused` and `slower`."""
    if bundle is not None:
        source = str(bundle.resolve())
    elif (ROOT / ".git").exists():
        source = str(ROOT)
    else:
        # A copy of the files without their history: its main has the same tree.
        left_out = shutil.ignore_patterns(".*", "__pycache__", "shared", "out")
        shutil.copytree(ROOT, folder, ignore=left_out)
        commit_all(folder, "the files as they are here")
        source = ""
    if source:
        git(folder.parent, "clone", "--quiet", "--no-checkout", source, str(folder))
        git(folder, "checkout", "--quiet", "-B", "main", "origin/main")
    path = folder / "src" / "weightload" / "__init__.py"
    text = path.read_text("utf-8")
    if text.count(PUBLIC_NAME) != 1:
        raise SystemExit("weightload's public name moved; mend PUBLIC_NAME here.")
    for branch, extra in (("paused", 0.0), ("slower", percent)):
        git(folder, "checkout", "--quiet", "-b", branch, "main")
        changed = SLOWER.format(pause_s=pause_s, percent=extra, fraction=extra / 100)
        path.write_text(text.replace(PUBLIC_NAME, changed))
        commit_all(folder, f"{pause_s} s of pause and {extra} per cent more, on purpose")
    git(folder, "checkout", "--quiet", "main")


class Rehearsal:
    """The stages, and the clock that they share."""

    def __init__(self, out: Path, device: str, minutes: float) -> None:
        self.out = out
        self.device = device
        self._end = time.monotonic() + 60 * minutes
        self._legs, self._legs_s = 0, 0.0
        self._leg_begun = time.monotonic()

    def left_s(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def leg_s(self) -> float:
        """What a leg takes, as far as is known."""
        return self._legs_s / self._legs if self._legs else 5.0

    def progress(self, _what: str, number: int, total: int) -> None:
        """Learn what legs cost."""
        now = time.monotonic()
        if total and number:
            self._legs += 1
            self._legs_s += now - self._leg_begun
        self._leg_begun = now

    def say(self, text: str) -> None:
        """Print with the time that is left."""
        print(f"[{self.left_s():6.1f} s left, {self.leg_s():.1f} s a leg] {text}", flush=True)


def run_trial(
    rehearsal: Rehearsal, repository: Path, checkpoint: Path, name: str, job: Job
) -> None:
    """Run one trial, if there is time for it, and keep its receipt and page under its name."""
    legs = 2 + len(CONTROLS) + 8 * (job.blocks or 0)
    if legs * rehearsal.leg_s() > rehearsal.left_s():
        rehearsal.say(f"{name}: not run: {legs} legs do not fit into the time that is left")
        return
    with tempfile.TemporaryDirectory() as folder:
        fitted = msgspec.structs.replace(
            job, project=repository, checkpoint=checkpoint, out=Path(folder)
        )
        predicate = qualify(fitted, rehearsal.progress).statement.predicate
        for suffix in ("json", "html"):
            stem = "receipt" if suffix == "json" else "report"
            shutil.copyfile(Path(folder, f"{stem}.{suffix}"), rehearsal.out / f"{name}.{suffix}")
    found = predicate.conclusion
    missed = [each.name for each in predicate.controls if not each.found]
    rehearsal.say(
        f"{name}: {found.verdict.outcome}, weights {found.weights}, {len(predicate.controls)} "
        f"controls, missed {missed}, exit status {predicate.exit_status}"
    )
    for reason in found.reasons:
        rehearsal.say(f"  {reason.code}: {reason.sentence}")


def run_league(
    rehearsal: Rehearsal, checkpoint: Path, loaders: list[str], blocks: int, policy: str
) -> None:
    """Run as many loaders as there is time for; ours comes first."""
    able = []
    for name in loaders:
        try:
            named_loader(name)
        except ArmError as error:
            rehearsal.say(f"league: {error}")
        else:
            able.append(name)
    room = int(rehearsal.left_s() / (1.3 * rehearsal.leg_s() * (1 + 2 * blocks)))
    for name in able[max(room, 0) :]:
        rehearsal.say(f"league: {name}: not run: no time was left")
    if room < 1:
        return
    with tempfile.TemporaryDirectory() as folder:
        job = LeagueJob(
            loaders=tuple(able[:room]),
            checkpoint=checkpoint,
            device=rehearsal.device,
            out=Path(folder),
            policy=policy,
            blocks=blocks,
            seed=3,
        )
        compare(job, rehearsal.progress)
        for suffix in ("json", "md", "html"):
            shutil.copyfile(Path(folder, f"league.{suffix}"), rehearsal.out / f"league.{suffix}")
    print((rehearsal.out / "league.md").read_text("utf-8"), flush=True)


def main(  # noqa: PLR0913, PLR0917 -- a command line has as many options as it has
    out: Annotated[Path, typer.Option(help="Where receipts and pages go.")],
    device: Annotated[str, typer.Option()] = "cuda:0",
    bundle: Annotated[Path | None, typer.Option(help="A git bundle with the branch main.")] = None,
    layers: Annotated[int, typer.Option(help="Of the model; 2 make 1.5 GB.")] = 2,
    blocks: Annotated[int, typer.Option(help="Of each trial; at least 6.")] = 6,
    league_blocks: Annotated[int, typer.Option()] = 1,
    pause_s: Annotated[float, typer.Option(help="In both arms of the trials; 0 for none.")] = 0.5,
    percent: Annotated[float, typer.Option(help="How much slower the slower one is.")] = 3.0,
    minutes: Annotated[float, typer.Option(help="When the league stops growing.")] = 9.0,
    only: Annotated[
        str, typer.Option(help="Stages in order, with commas.")
    ] = "equal,slower,league",
    loaders: Annotated[str, typer.Option()] = ",".join(LEAGUE),
    route: Annotated[str, typer.Option(help="Of our loader, in both trials.")] = "buffered",
) -> None:
    """Run the stages."""
    out.mkdir(parents=True, exist_ok=True)
    rehearsal = Rehearsal(out, device, minutes)
    known = [name for name in loaders.split(",") if name.partition("?")[0] in LOADERS]
    with tempfile.TemporaryDirectory(prefix="loadproof-rehearsal-") as folder:
        repository, checkpoint = Path(folder, "repository"), Path(folder, "checkpoint")
        make_repository(repository, bundle, pause_s, percent)
        make = [sys.executable, "-m", "qualification.models_speed", "make", str(checkpoint)]
        # Weights that a model can serve; in a process of its own, which gives the GPU back.
        subprocess.run([*make, "--layers", str(layers)], check=True, cwd=ROOT)
        policy = Path(folder, "cuda-rehearsal.toml")
        values = msgspec.to_builtins(load_policy("gpu")) | SHARED_HOST
        policy.write_text("".join(f"{k} = {v}\n" for k, v in values.items() if k != "name"))
        rehearsal.say("repository and checkpoint are made")
        same = "paused" if pause_s else "main"
        candidates = {"equal": same, "slower": "slower"}
        for number, name in enumerate(only.split(",")):
            if name == "league":
                run_league(rehearsal, checkpoint, known, league_blocks, str(policy))
                continue
            job = Job(
                project=repository,
                baseline=same,
                candidate=candidates[name],
                checkpoint=checkpoint,
                device=device,
                out=out,
                policy=str(policy),
                blocks=blocks,
                seed=number + 1,
                options={"route": route},
                served="asked" if name == "equal" else "no",
            )
            try:
                run_trial(rehearsal, repository, checkpoint, name, job)
            except LoadproofError as error:
                rehearsal.say(f"{name}: {error}")
    sys.stdout.flush()


if __name__ == "__main__":
    typer.run(main)
