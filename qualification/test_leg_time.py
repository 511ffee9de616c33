"""The harness measures the load and adds nothing: a leg against a bare script, in pairs.

One load of a fraction of a second varies by several per cent from process to process. Both
sides therefore wait for a second inside the timed part: what a harness could add, it adds to
that as well.
"""

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
from loadproof.measure.template import Template
from loadproof.plan.identity import package_digest

if TYPE_CHECKING:
    from pathlib import Path

    from loadproof.gate import DeviceClass

PAIRS = 8
ALLOWED = 0.01
LOADER = """
import time
from weightload import load as _load

def load(*arguments, **options):
    loaded = _load(*arguments, **options)
    time.sleep(1.0)
    return loaded
"""
BARE = """
import sys, time
import torch
# A leg has it imported as well, before its clock starts.
from cuda.bindings import driver
from paused import load

torch.empty(1, device="cuda:0")
torch.cuda.synchronize()
begun = time.perf_counter()
loaded = load(sys.argv[1], device="cuda:0")
torch.cuda.synchronize()
print(time.perf_counter() - begun)
"""

pytestmark = pytest.mark.timeout(1800)


def bare_s(site: Path, checkpoint: Path) -> float:
    """The time of a load in a script that knows nothing of the harness."""
    command = [sys.executable, "-c", BARE, str(checkpoint)]
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout.split()[-1])


def leg_s(site: Path, checkpoint: Path, template: Template) -> float:
    """The time of the same load in a leg."""
    request = Request(
        kind="time",
        site=str(site),
        entry="paused:load",
        digest=package_digest(site / "paused"),
        checkpoint=str(checkpoint),
        device="cuda:0",
    )
    ended = run_leg(request, template, 600.0)
    assert isinstance(ended.outcome, Result), (ended.outcome, ended.said)
    return ended.outcome.elapsed_s


def test_a_leg_takes_as_long_as_a_bare_script(
    device_class: DeviceClass, checkpoint: Path, tmp_path: Path
) -> None:
    """The estimate of the difference is within 1 %, from pairs in alternating order."""
    assert device_class in {"gb10", "cuda"}
    (tmp_path / "paused").mkdir()
    (tmp_path / "paused" / "__init__.py").write_text(LOADER)
    bare_s(tmp_path, checkpoint)
    ratios = []
    with Template(["torch"]) as template:
        for pair in range(PAIRS):
            if pair % 2:
                leg, bare = leg_s(tmp_path, checkpoint, template), bare_s(tmp_path, checkpoint)
            else:
                bare, leg = bare_s(tmp_path, checkpoint), leg_s(tmp_path, checkpoint, template)
            ratios.append(math.log(leg / bare))
    found = contrast(ratios, 0.95)
    print(f"a leg over a bare script, as logs of {PAIRS} pairs: {ratios}")
    print(f"estimate {found.estimate:+.4f}, 95 % interval {found.low:+.4f} to {found.high:+.4f}")
    assert abs(found.estimate) <= ALLOWED, ratios
