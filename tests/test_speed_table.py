"""The speed table is made of paired ratios, and says when a bar was missed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qualification.speed_table import table

FACTS = {"device": "X", "cores": 1, "kernel": "k", "driver": 1, "torch": "t"}


def legs(arm: str, figures: list[float], **more: Any) -> list[dict[str, Any]]:
    """Legs of one arm, two to a block."""
    return [
        {"section": "warm", "arm": arm, "block": n // 2, "half": n % 2, "gbs": gbs} | FACTS | more
        for n, gbs in enumerate(figures)
    ]


def row(text: str, what: str) -> list[str]:
    """One row's cells."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {what} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_ratios_are_paired_by_half_block() -> None:
    """A machine that slows down for both leaves the ratio alone."""
    report = {"report": {"phases_s": {"stream": 0.2}, "pinned_bytes": 1}, "nbytes": 8e9}
    samples = legs("weightload", [40, 20, 44, 22], **report) + legs(
        "instanttensor", [20, 10, 22, 11]
    )
    cells = row(table(samples), "warm, whole call, weightload over instanttensor")
    assert cells[1:4] == ["2", "2 to 2", "4"]
    assert cells[-1] == "yes"


def test_a_missed_bar_is_said() -> None:
    """The fastest peer sets the bar; a failed leg makes no ratio."""
    report = {"report": {"phases_s": {"stream": 0.2}, "pinned_bytes": 1}, "nbytes": 8e9}
    samples = legs("weightload", [40, 40], **report) + legs("instanttensor", [39, 39])
    samples += [{"section": "warm", "arm": "runai", "block": 0, "half": 0, "failed": "x"}]
    text = table(samples)
    assert row(text, "warm, whole call, weightload over instanttensor")[-1] == "**no**"
    assert "no sample" in row(text, "warm, whole call, weightload over runai")[1]


def test_the_command_line_starts() -> None:
    """The script that makes the table can be asked for its options."""
    pytest.importorskip("cuda.bindings", reason="no wheel of cuda-bindings here")
    finished = subprocess.run(
        [sys.executable, "-m", "qualification.speed", "run", "--help"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "--blocks" in finished.stdout


def test_what_verifying_adds_is_told_against_these_very_tensors() -> None:
    """The limit is the time that hashing tensors of these sizes takes, in the same half block."""
    limits = {"hashing_gbs": 20.0, "hashing_one_thread_gbs": 1.3, "hashing_tensors_s": 0.5}
    samples = [
        {"section": "verify", "block": 0, "half": 0} | each
        for each in (
            {"arm": "limits"} | limits,
            {"arm": "weightload", "seconds": 0.2},
            {"arm": "weightload-verify", "seconds": 0.8},
        )
    ]
    cells = row(table(samples), "verify, time added over hashing these tensors on all cores")
    assert (cells[1], cells[-1]) == ("1.2", "**no**")
