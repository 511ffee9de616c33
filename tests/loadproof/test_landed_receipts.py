"""The receipts that this project shows from hardware: still judged as they say, and for what."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RECEIPTS = sorted(Path(__file__).parents[2].glob("qualification/receipts/*/*.json"))
TRIALS = [path for path in RECEIPTS if path.stem != "league"]


def verify(path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run `loadproof receipt verify`."""
    command = [sys.executable, "-m", "loadproof", "receipt", "verify", str(path), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_there_are_receipts_to_look_at() -> None:
    """A folder that moved would leave the tests below with nothing to fail on."""
    assert len(TRIALS) >= 2


@pytest.mark.parametrize("path", TRIALS, ids=lambda path: path.stem)
def test_a_landed_receipt_is_valid_and_says_nothing_of_a_gb10(path: Path) -> None:
    """Judged again from its raw samples it is what it says, and `--require gb10` refuses it."""
    valid = verify(path)
    assert valid.returncode == 0, valid.stderr
    assert "class cuda:NVIDIA H200" in valid.stdout
    refused = verify(path, "--require", "gb10")
    assert refused.returncode == 1
    assert "'gb10' was required" in refused.stderr


def test_the_record_of_a_league_is_said_to_be_no_receipt() -> None:
    """Whoever verifies a league is told in one sentence what it is, and what reads it."""
    (league,) = set(RECEIPTS) - set(TRIALS)
    refused = verify(league)
    assert refused.returncode == 1
    assert "the record of a league" in refused.stderr
    assert "loadproof receipt show" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
