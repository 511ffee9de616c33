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

from fixtures.checkpoints import Tensor, write_checkpoint
from fixtures.repositories import commit_all, git
from loadproof.plan.revisions import Repository
from loadproof.report.receipt import decode

ROOT = Path(__file__).parents[2]
LARGE = [Tensor(f"layer.{n}.weight", "BF16", (1024, 1024)) for n in range(20)]
SMALL = [Tensor(f"layer.{n}.bias", "F32", (1021,)) for n in range(20)]

SETTLE = "self._driver.await_event(slot.event)"
LOAD = "from weightload.load import load\n"
SLOWER = '''from weightload.load import load as _load


def load(*arguments, **options):
    """Load and pause, and take longer by a fraction."""
    import time

    begun = time.perf_counter()
    loaded = _load(*arguments, **options)
    time.sleep(0.3)
    time.sleep(FRACTION * (time.perf_counter() - begun))
    return loaded

'''


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 42 MB of random bytes in 40 tensors: more than the ring holds."""
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
    command = [sys.executable, "-m", "loadproof", "qualify", "--baseline=main", "--out=out"]
    command += ["--candidate=worktree", f"--checkpoint={weights}", "--device=fake", *more]
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
    """Twenty per cent more load time ends in 1 and says regression.

    Both sides pause for 0.3 s, so that a busy machine's noise is small beside the load.
    """
    path = clone / "src" / "weightload" / "__init__.py"
    text = path.read_text("utf-8")
    assert text.count(LOAD) == 1
    path.write_text(text.replace(LOAD, SLOWER.replace("FRACTION", "0.0")))
    commit_all(clone, "paused")
    break_on_a_branch(clone, "__init__.py", "time.sleep(0.0 *", "time.sleep(0.2 *")
    status, said, receipt = qualify(clone, weights, "--blocks=8", "--seed=2")
    assert receipt["predicate"]["conclusion"]["verdict"]["outcome"] == "regression", said
    assert status == 1
    assert "regression" in said


def test_the_same_code_has_equal_weights_and_every_control(clone: Path, weights: Path) -> None:
    """Main against main: the machinery's own statements, which noise cannot change.

    The verdict on time is the rehearsal's business: it has the blocks for it.
    """
    status, said, receipt = qualify(clone, weights, "--blocks=6", "--seed=3")
    predicate = receipt["predicate"]
    assert status in {0, 3}, said
    assert "weights equal, planted bit blamed on its tensor" in said
    assert predicate["device_class"] == "rehearsal"
    assert [each["found"] for each in predicate["controls"]] == [True] * 4
    assert predicate["arms"]["A"]["digest"] == predicate["arms"]["B"]["digest"]
    timed = [leg["outcome"] for leg in predicate["legs"] if leg["purpose"] == "time"]
    assert len(timed) == 48
    assert {leg["device_to_host_copies"] for leg in timed} == {0}
    assert {leg["digest"] for leg in timed} == {predicate["arms"]["A"]["digest"]}
    assert {leg["nbytes"] for leg in timed} == {predicate["checkpoint_bytes"]}
    decode((clone / "out" / "receipt.json").read_bytes())
    for name in ("receipt.json", "report.md"):
        text = (clone / "out" / name).read_text("utf-8")
        assert weights.name not in text
        assert str(clone) not in text
