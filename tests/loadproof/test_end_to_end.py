"""Whole qualifications of real code: this repository's loader, copied and broken on purpose.

The copy is a repository of its own whose branch ``main`` is the working tree as it is now.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fixtures.checkpoints import Tensor, write_checkpoint
from fixtures.models import FAMILIES
from fixtures.repositories import commit_all, git
from loadproof.cli import app
from loadproof.plan.revisions import Repository
from loadproof.report.receipt import decode

ROOT = Path(__file__).parents[2]
# A ring of two slots of 64 KiB is used many times over by few bytes, so that legs are quick.
RING = "slot_count=2&slot_bytes=65536&threads=2"
LARGE = [Tensor(f"layer.{n}.weight", "BF16", (64, 1024)) for n in range(8)]
SMALL = [Tensor(f"layer.{n}.bias", "F32", (1021,)) for n in range(8)]

SETTLE = "self._driver.await_event(slot.event)"
LOAD = "from weightload.load import load\n"
SLOWER = '''from weightload.load import load as _load


def load(*arguments, **options):
    """Load and pause, and take longer by a fraction."""
    import time

    begun = time.perf_counter()
    loaded = _load(*arguments, **options)
    time.sleep(0.2)
    time.sleep(FRACTION * (time.perf_counter() - begun))
    return loaded

'''


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About a megabyte of random bytes in 16 tensors: eight times what the ring holds."""
    folder = tmp_path_factory.mktemp("somebodys-weights")
    write_checkpoint(folder, [LARGE + SMALL], seed=5)
    return folder


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository whose main is this working tree."""
    folder = tmp_path / "clone"
    folder.mkdir()
    repository = Repository(ROOT)
    repository.export(repository.worktree(), folder)
    commit_all(folder, "as it is")
    return folder


def break_on_a_branch(clone: Path, file: str, old: str, new: str) -> None:
    """Commit one replacement on the branch ``broken``."""
    path = clone / "src" / "weightload" / file
    text = path.read_text("utf-8")
    assert text.count(old) == 1, f"{file} no longer holds {old!r} once"
    path.write_text(text.replace(old, new))
    git(clone, "checkout", "--quiet", "-b", "broken")
    commit_all(clone, "broken on purpose")


def qualify(clone: Path, weights: Path, *more: str) -> tuple[int, str, dict[str, Any]]:
    """Qualify worktree against main; return exit status, standard output and the receipt."""
    command = [sys.executable, "-m", "loadproof", "qualify", f"--baseline=main?{RING}"]
    command += [f"--candidate=worktree?{RING}", f"--checkpoint={weights}", "--out=out", *more]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
    receipt = clone / "out" / "receipt.json"
    assert receipt.is_file(), done.stderr
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, json.loads(receipt.read_text("utf-8"))


def test_a_slot_that_is_not_settled_before_reuse_fails_and_names_the_tensor(
    clone: Path, weights: Path
) -> None:
    """Dropping one wait ends in 4, with a wrong tensor named and no word about time."""
    break_on_a_branch(clone, "device/slots.py", SETTLE, "pass")
    status, said, receipt = qualify(clone, weights, "--blocks=6", "--seed=1")
    predicate = receipt["predicate"]
    assert (status, predicate["exit_status"]) == (4, 4)
    assert predicate["conclusion"]["weights"] == "differ"
    wrong = {one["tensor"] for each in predicate["weights"] for one in each["differences"]}
    assert wrong
    assert wrong <= {tensor.name for tensor in LARGE + SMALL}
    assert any(repr(name) in said for name in wrong)
    assert {each["arm"] for each in predicate["weights"] if each["differences"]} == {"B"}
    assert predicate["conclusion"]["verdict"]["outcome"] == "inconclusive"
    assert any(each["why"] == "the weights are not right" for each in predicate["not_run"])


def test_a_loader_that_is_a_fifth_slower_is_a_regression(clone: Path, weights: Path) -> None:
    """Twenty per cent more load time ends in 1 and says regression; all else is as it should be.

    Both sides pause for 0.2 s, so that a busy machine's noise is small beside the load.
    """
    path = clone / "src" / "weightload" / "__init__.py"
    text = path.read_text("utf-8")
    assert text.count(LOAD) == 1
    path.write_text(text.replace(LOAD, SLOWER.replace("FRACTION", "0.0")))
    commit_all(clone, "paused")
    break_on_a_branch(clone, "__init__.py", "time.sleep(0.0 *", "time.sleep(0.2 *")
    status, said, receipt = qualify(clone, weights, "--blocks=8", "--seed=2")
    predicate = receipt["predicate"]
    assert predicate["conclusion"]["verdict"]["outcome"] == "regression", said
    assert status == 1
    assert "regression, weights equal, planted bit blamed on its tensor" in said
    assert predicate["device_class"] == "rehearsal"
    assert [each["found"] for each in predicate["controls"]] == [True] * 4
    settled = "a slot that is settled and used again"
    assert settled not in {each["what"] for each in predicate["not_run"]}
    timed = [leg for leg in predicate["legs"] if leg["purpose"] == "time"]
    assert len(timed) == 64
    digests = {name: arm["digest"] for name, arm in predicate["arms"].items()}
    for leg in timed:
        outcome = leg["outcome"]
        assert outcome["device_to_host_copies"] == 0
        assert outcome["digest"] == digests["B" if leg["arm"] == "B" else "A"]
        assert outcome["nbytes"] == outcome["audited_bytes"] == predicate["checkpoint_bytes"]
    decode((clone / "out" / "receipt.json").read_bytes())
    for name in ("receipt.json", "report.md"):
        text = (clone / "out" / name).read_text("utf-8")
        assert weights.name not in text
        assert str(clone) not in text


def test_the_same_code_is_one_arm_and_few_blocks_say_nothing(clone: Path, weights: Path) -> None:
    """Main against main is one installation, equal weights, and by one block no verdict.

    What noise does to a verdict on equal code is the rehearsal's business, and the error rates'.
    """
    status, said, receipt = qualify(clone, weights, "--blocks=1", "--seed=3")
    predicate = receipt["predicate"]
    assert status == 3, said
    assert "inconclusive, weights equal, planted bit blamed on its tensor" in said
    assert "blocks-too-few" in {each["code"] for each in predicate["conclusion"]["reasons"]}
    assert predicate["arms"]["A"]["digest"] == predicate["arms"]["B"]["digest"]
    assert {leg["outcome"]["digest"] for leg in predicate["legs"]} == {
        predicate["arms"]["A"]["digest"]
    }


def rehearse(clone: Path, checkpoint: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Rehearse one block, too few for a verdict and enough to see every kind of leg."""
    command = [sys.executable, "-m", "loadproof", "rehearse", f"--checkpoint={checkpoint}"]
    command += ["--out=out", "--blocks=1", "--seed=4", *more]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done


def test_a_rehearsal_serves_where_there_is_a_model(clone: Path, tmp_path: Path) -> None:
    """By default both revisions serve the reference's tokens; --no-served leaves it out."""
    checkpoint = tmp_path / "model"
    FAMILIES["qwen2 tied"].write(checkpoint)
    done = rehearse(clone, checkpoint)
    assert done.returncode == 3, done.stderr
    assert "served output equal" in done.stdout
    predicate = decode((clone / "out" / "receipt.json").read_bytes()).predicate
    assert [leg.arm for leg in predicate.legs if leg.purpose == "serve"] == ["reference", "A", "B"]
    assert [each.name for each in predicate.controls if each.found][-1] == "served-bit"
    assert set(predicate.arms) == {"A", "B", "reference"}
    assert "a long prompt right after a cold load" in {each.what for each in predicate.not_run}
    assert str(tmp_path) not in (clone / "out" / "report.html").read_text("utf-8")
    assert "Qwen2ForCausalLM, bfloat16, cpu" in (clone / "out" / "report.md").read_text("utf-8")
    assert rehearse(clone, checkpoint, "--no-served").returncode == 3
    predicate = decode((clone / "out" / "receipt.json").read_bytes()).predicate
    assert {leg.purpose for leg in predicate.legs} == {"hash", "control", "time"}
    assert predicate.not_run[0].why == "it was not asked for; --served does it"


@pytest.mark.usefixtures("kept_templates")
def test_a_model_that_transformers_does_not_know(clone: Path, tmp_path: Path) -> None:
    """By default it is not run with its reason; asked for, it is one sentence and no receipt."""
    checkpoint = tmp_path / "model"
    FAMILIES["bert"].write(checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(
        json.dumps(config | {"model_type": "no-such-model", "architectures": None})
    )
    options = [f"--project={clone}", f"--checkpoint={checkpoint}", f"--out={clone / 'out'}"]
    # In this process, so that both fork their serve legs from one template.
    rehearse_here = ["rehearse", *options, "--blocks=1", "--seed=4"]
    done = CliRunner().invoke(app, [*rehearse_here, "--served"])
    assert done.exit_code == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Served output was asked for. transformers" in done.stderr
    assert "no-such-model" in done.stderr
    assert not (clone / "out").exists()
    assert CliRunner().invoke(app, rehearse_here).exit_code == 3
    predicate = decode((clone / "out" / "receipt.json").read_bytes()).predicate
    assert predicate.not_run[0].what == "served output of reference"
    assert "no-such-model" in predicate.not_run[0].why
    assert predicate.conclusion.served == "not-run"
