"""The harness measures the load and adds nothing: a leg against a bare script, in pairs."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from loadproof.judge.statistics import contrast
from loadproof.measure.leg import run_leg
from loadproof.measure.messages import Request, Result
from loadproof.plan.arms import named_loader

if TYPE_CHECKING:
    from pathlib import Path

    from loadproof.gate import DeviceClass

PAIRS = 12
ALLOWED = 0.01
BARE = """
import sys, time
import torch
import weightload

torch.empty(1, device="cuda:0")
torch.cuda.synchronize()
begun = time.perf_counter()
loaded = weightload.load(sys.argv[1], device="cuda:0")
torch.cuda.synchronize()
print(time.perf_counter() - begun)
"""

pytestmark = pytest.mark.timeout(1800)


def bare_s(checkpoint: Path) -> float:
    """The time of a load in a script that knows nothing of the harness."""
    command = [sys.executable, "-c", BARE, str(checkpoint)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def leg_s(checkpoint: Path) -> float:
    """The time of the same load in a leg."""
    ours = named_loader("weightload").arm
    request = Request(
        kind="time",
        site=None,
        entry=ours.entry or "",
        digest=ours.digest,
        checkpoint=str(checkpoint),
        device="cuda:0",
        parent=os.getpid(),
    )
    outcome = run_leg(request, 600.0).outcome
    assert isinstance(outcome, Result), outcome
    return outcome.elapsed_s


def test_a_leg_takes_as_long_as_a_bare_script(device_class: DeviceClass, checkpoint: Path) -> None:
    """The estimate of the difference is within 1 %, from pairs in alternating order."""
    assert device_class in {"gb10", "cuda"}
    bare_s(checkpoint)
    ratios = []
    for pair in range(PAIRS):
        if pair % 2:
            leg, bare = leg_s(checkpoint), bare_s(checkpoint)
        else:
            bare, leg = bare_s(checkpoint), leg_s(checkpoint)
        ratios.append(math.log(leg / bare))
    assert abs(contrast(ratios, 0.95).estimate) <= ALLOWED, ratios
