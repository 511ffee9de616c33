"""A loader that is a program, on a GPU: two processes, and device memory by CUDA IPC.

The program is the reference loader of ``fixtures/projects``: it allocates with cuMemAlloc,
exports with cuIpcGetMemHandle, and is not part of this project's code.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec
import pytest

from fixtures.checkpoints import Tensor, write_checkpoint
from fixtures.legs import run
from fixtures.programs import PROJECTS, program_request, reference_request
from fixtures.repositories import commit_all
from loadproof.measure.digest import differences
from loadproof.measure.ground_truth import file_manifest, tensor_places
from loadproof.measure.messages import (
    CopyChunk,
    Failure,
    FlipBit,
    Plant,
    Request,
    Result,
    SwapChunks,
    Truth,
)
from loadproof.report.receipt import decode

if TYPE_CHECKING:
    from pathlib import Path

    from loadproof.measure.digest import Manifest

DEVICE = "cuda:0"
# Two files, so two allocations; sizes that no alignment fits, one tensor empty, one a scalar.
SHARDS = (
    (
        Tensor("embed", "BF16", (1000, 1023)),
        Tensor("scale", "F32", ()),
        Tensor("none", "F16", (0, 4)),
    ),
    (Tensor("head", "I64", (33, 5)), Tensor("large", "F8_E4M3", (5000, 4001))),
)
GARBAGE = """
import base64, json, sys

for line in sys.stdin:
    kind = json.loads(line)["type"]
    if kind == "hello":
        answer = {"type": "ready", "protocol": 1, "loader": {"name": "x", "version": "1"}}
    else:
        memory = {"kind": "cuda-ipc", "handle": base64.b64encode(bytes(64)).decode(), "nbytes": 8}
        answer = {"type": "loaded", "memory": [memory], "tensors": []}
    print(json.dumps(answer), flush=True)
"""

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(1800)]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """About 22 MB of random bytes in five tensors and two files."""
    folder = tmp_path / "weights"
    write_checkpoint(folder, SHARDS, seed=21)
    return folder


@pytest.fixture
def truth(weights: Path) -> Manifest:
    """What the files hold."""
    return file_manifest(tensor_places(weights))


@pytest.fixture
def wanted(tmp_path: Path, weights: Path) -> Request:
    """A leg of the reference loader on the GPU."""
    request = reference_request(tmp_path / "site", weights, DEVICE)
    return msgspec.structs.replace(request, options={"read_bytes": 1 << 20})


def result(request: Request) -> Result:
    """Run a leg that has to have a result."""
    ended = run(request, 300.0)
    assert isinstance(ended.outcome, Result), (ended.outcome, ended.said)
    return ended.outcome


def test_the_other_processs_device_memory_is_hashed(
    wanted: Request, weights: Path, truth: Manifest
) -> None:
    """What lies in another process's allocations is read back, tensor by tensor."""
    found = result(msgspec.structs.replace(wanted, kind="hash", truth=Truth(str(weights), truth)))
    assert not found.device.fake
    assert found.manifest == truth
    assert found.mismatches == {}
    assert found.poisoned_bytes == 0
    assert (found.device_taken_bytes or 0) >= truth.nbytes()


def test_a_timing_leg_is_audited_after_its_clock(wanted: Request, truth: Manifest) -> None:
    """The memory of the other process is read back once its clock has stopped."""
    found = result(msgspec.structs.replace(wanted, audit=truth, audit_bytes=truth.nbytes()))
    assert (found.audited_bytes, found.audit_wrong) == (truth.nbytes(), ())
    assert found.nbytes == truth.nbytes()
    assert 0 < found.elapsed_s < 60


@pytest.mark.parametrize(
    ("plant", "byte"),
    [
        (FlipBit("large", 12_345_678, 5), 12_345_678),
        (SwapChunks("large", 1, 9_000_001, 4096), 1),
        (CopyChunk("embed", 3, "large", 77, 65_536), 77),
    ],
)
def test_a_planted_fault_is_blamed(
    wanted: Request, weights: Path, truth: Manifest, plant: Plant, byte: int
) -> None:
    """Each kind of fault is written into the other process's memory, and found where it is."""
    found = result(
        msgspec.structs.replace(wanted, kind="hash", plant=plant, truth=Truth(str(weights), truth))
    )
    assert found.manifest is not None
    (wrong,) = differences(truth, found.manifest, found.mismatches)
    assert (wrong.tensor, wrong.kind) == ("large", "bytes")
    assert wrong.mismatch is not None
    assert wrong.mismatch.first_byte == byte


def test_a_handle_that_is_none_is_refused(tmp_path: Path, weights: Path) -> None:
    """The driver's refusal is a failure of the leg, with the call that refused."""
    site = tmp_path / "garbage"
    site.mkdir()
    (site / "loader.py").write_text(GARBAGE)
    found = run(program_request(site, weights, DEVICE), 300.0).outcome
    assert isinstance(found, Failure)
    assert found.code == "protocol-memory"
    assert "cuIpcOpenMemHandle returned" in found.sentence


def test_a_whole_trial_of_a_program(tmp_path: Path, weights: Path) -> None:
    """A project of somebody else's, against itself: equal weights and every control."""
    project = tmp_path / "somebodys-project"
    shutil.copytree(PROJECTS / "command_loader", project)
    commit_all(project, "as it is")
    command = [sys.executable, "-m", "loadproof", "qualify", "--baseline=main", "--candidate=main"]
    command += [f"--checkpoint={weights}", f"--device={DEVICE}", "--blocks=1", "--out=out"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    receipt = project / "out" / "receipt.json"
    assert receipt.exists(), done.stderr
    predicate = decode(receipt.read_bytes()).predicate
    failed = [leg.outcome for leg in predicate.legs if isinstance(leg.outcome, Failure)]
    assert failed == [], json.dumps(done.stdout)
    assert predicate.device_class.startswith("cuda:") or predicate.device_class == "gb10"
    assert predicate.conclusion.weights == "equal"
    assert [each.found for each in predicate.controls] == [True] * 4
