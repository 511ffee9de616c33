"""What has to be seen on hardware before a change to a loader may land."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loadproof.judge.conclusion import required_controls
from loadproof.measure.ground_truth import file_manifest, tensor_places
from loadproof.measure.messages import Result
from loadproof.qualify import Job, qualify
from loadproof.report.receipt import decode

if TYPE_CHECKING:
    from loadproof.gate import DeviceClass
    from loadproof.report.receipt import Predicate

ROOT = Path(__file__).parents[1]
POLICIES = {"gb10": "gb10", "cuda": "gpu"}
# What Python, torch and a CUDA context take on the host; far less than the weights do.
HOST_FLOOR_BYTES = 1536 << 20

pytestmark = pytest.mark.timeout(7200)


def run(
    device_class: DeviceClass,
    checkpoint: Path,
    out: Path,
    *,
    baseline: str = "main",
    candidate: str = "worktree",
    device: str = "cuda:0",
) -> Predicate:
    """Run a trial of the working tree against main and read its receipt back."""
    job = Job(
        project=ROOT,
        baseline=baseline,
        candidate=candidate,
        checkpoint=checkpoint,
        device=device,
        out=out,
        policy=POLICIES[device_class],
        allow_dirty=True,
        allow_detached=True,
    )
    receipt = qualify(job, lambda *_: None).receipt
    return decode(receipt.read_bytes()).predicate


@pytest.fixture(scope="session")
def trial(
    device_class: DeviceClass, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Predicate:
    """One trial of main against itself, which every test below looks at."""
    return run(device_class, checkpoint, tmp_path_factory.mktemp("out"), candidate="main")


def check_class(trial: Predicate, device_class: DeviceClass) -> None:
    """Check that the receipt speaks of the hardware that was asked for."""
    if device_class == "gb10":
        assert trial.device_class == "gb10"
    else:
        assert trial.device_class.startswith("cuda:") or trial.device_class == "gb10"


def check_time(trial: Predicate) -> None:
    """Check that main against main ends with no gain, by a trial that could have seen one."""
    verdict = trial.conclusion.verdict
    assert verdict.sound, trial.conclusion.reasons
    assert verdict.outcome == "no-gain"


def check_weights(trial: Predicate, checkpoint: Path) -> None:
    """Check that both arms' device bytes are the files', in memory that was poisoned before."""
    truth = file_manifest(tensor_places(checkpoint))
    assert trial.conclusion.weights == "equal"
    assert {each.manifest for each in trial.weights} == {truth.digest()}
    assert {each.poisoned_bytes for each in trial.weights} == {truth.nbytes()}


def check_controls(trial: Predicate, checkpoint: Path) -> None:
    """Check that every planted fault was blamed on its own tensor."""
    wanted = required_controls([each.nbytes for each in tensor_places(checkpoint)])
    assert {each.name for each in trial.controls if each.found} == wanted


def check_peaks(trial: Predicate) -> None:
    """Check that no leg held the weights on the host: a ring, and what torch and CUDA take."""
    timed = [leg for leg in trial.legs if leg.purpose == "time"]
    assert timed
    for leg in trial.legs:
        assert not leg.memory.checkpoint_anonymous_bytes
    for leg in timed:
        assert isinstance(leg.outcome, Result)
        pinned = int((leg.outcome.report or {})["pinned_bytes"])
        anonymous, shared = leg.memory.process_anonymous_bytes, leg.memory.process_shmem_bytes
        assert anonymous is not None
        assert shared is not None
        on_the_device = leg.outcome.nbytes if leg.outcome.device.fake else 0
        assert anonymous + shared <= pinned + HOST_FLOOR_BYTES + on_the_device
        if leg.outcome.device.integrated:
            drop = leg.memory.system_available_drop_bytes
            assert drop is not None
            assert drop <= leg.outcome.nbytes + pinned + HOST_FLOOR_BYTES


def test_the_receipt_is_of_this_class(trial: Predicate, device_class: DeviceClass) -> None:
    """A receipt says what it ran on, by attributes."""
    check_class(trial, device_class)


def test_the_same_code_is_no_gain(trial: Predicate) -> None:
    """Load time: main against main."""
    check_time(trial)


def test_the_device_holds_the_files_bytes(trial: Predicate, checkpoint: Path) -> None:
    """Device-weight hashes equal the files', for both arms."""
    check_weights(trial, checkpoint)


def test_planted_faults_are_blamed(trial: Predicate, checkpoint: Path) -> None:
    """The planted byte, and every other control."""
    check_controls(trial, checkpoint)


def test_memory_stays_within_the_ring(trial: Predicate) -> None:
    """Peaks: host growth is the ring and a floor."""
    check_peaks(trial)


def test_read_ahead_off_is_main_and_default_is_judged(
    device_class: DeviceClass, checkpoint: Path, tmp_path: Path
) -> None:
    """Read-ahead off and at its default, on the same code, each with its own receipt."""
    off = "main?read_ahead=0"
    same = run(device_class, checkpoint, tmp_path / "off", baseline=off, candidate=off)
    assert same.conclusion.verdict.outcome == "no-gain"
    default = run(device_class, checkpoint, tmp_path / "default", baseline=off, candidate="main")
    assert default.conclusion.weights == "equal"
    assert default.conclusion.verdict.sound, default.conclusion.reasons
