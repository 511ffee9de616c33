"""All legs of a trial, in order: the weights first, then the times.

Weights come first because the time of a loader that delivers other bytes means nothing; when
they differ, the timing legs are not run and the receipt says so.  Every leg gets the same
preamble: the files are read once, and what the kernel then says about them is recorded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from loadproof.measure import cache_state
from loadproof.measure.cache_state import CacheState
from loadproof.measure.controls import DEVICE_BIT, Control, draw_bit, judge_bit
from loadproof.measure.digest import Difference, Manifest, differences
from loadproof.measure.leg import run_leg
from loadproof.measure.memory import MemoryPeaks
from loadproof.measure.messages import Failure, Plant, Request, Result
from loadproof.plan.arms import InstalledArm
from loadproof.plan.policy import Policy
from loadproof.plan.schedule import ARMS, BASELINE, CANDIDATE, DELAYED, mirrored_blocks

if TYPE_CHECKING:
    from collections.abc import Callable

Purpose = Literal["hash", "control", "time"]


class TrialPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is decided before the first leg.

    Attributes:
        policy: The rules.
        blocks: Mirrored blocks to run.
        seed: Where the order of the legs and the controls come from.
        device: ``fake``, ``fake:<profile>`` or ``cuda:<ordinal>``.
        checkpoint: What is loaded.
        shards: Its files.
        truth: What is in them, by an independent reader.
        baseline: The arm behind A, A' and S.
        candidate: The arm behind B.
        options: Keyword arguments for both arms' loaders.
    """

    policy: Policy
    blocks: int
    seed: int
    device: str
    checkpoint: Path
    shards: tuple[Path, ...]
    truth: Manifest
    baseline: InstalledArm
    candidate: InstalledArm
    options: dict[str, Any] = {}


class Leg(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One leg's record.

    Attributes:
        purpose: Hashing, a control, or timing.
        arm: A, A', B or S.
        block: Which mirrored block; None outside the schedule.
        half: 0 or 1 within the block; None outside the schedule.
        cache: The page cache just before it.
        memory: Peaks seen from outside.
        outcome: What it saw, or why it saw nothing.
    """

    purpose: Purpose
    arm: str
    block: int | None
    half: int | None
    cache: CacheState
    memory: MemoryPeaks
    outcome: Result | Failure


class WeightsCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The device's bytes of one hash leg, against the files'.

    Attributes:
        arm: Whose loader put them there.
        manifest: Hex SHA-256 over all tensors' digests.
        differences: Every tensor that is not the files'.
        hazards: What the fake device found wrong meanwhile.
    """

    arm: str
    manifest: str
    differences: tuple[Difference, ...]
    hazards: tuple[str, ...]


class NotRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that a reader may miss, and why it was not done."""

    what: str
    why: str


class Trial(msgspec.Struct, kw_only=True):
    """What was seen.

    Attributes:
        legs: Every leg, in the order in which they ran.
        weights: One check per hash leg that ended with a result.
        controls: The planted faults and what became of them.
        not_run: What was left out, and why.
        said: Standard error of the first leg that failed, for the person at the keyboard.
    """

    legs: list[Leg] = []
    weights: list[WeightsCheck] = []
    controls: list[Control] = []
    not_run: list[NotRun] = []
    said: str = ""


def run_trial(plan: TrialPlan, progress: Callable[[str, int, int], None]) -> Trial:
    """Run every leg of a trial; the first leg that fails ends it.

    Args:
        plan: What to run.
        progress: Told before each leg: what it is, its number from 0, and how many there are.
    """
    return _Run(plan, progress).run()


class _Run:
    """A trial being run."""

    def __init__(self, plan: TrialPlan, progress: Callable[[str, int, int], None]) -> None:
        self._plan = plan
        self._progress = progress
        self._schedule = mirrored_blocks(ARMS, plan.blocks, plan.seed)
        self._total = 2 * plan.policy.hash_legs + 1 + len(self._schedule)
        self._trial = Trial()

    def run(self) -> Trial:
        trial = self._trial
        if not self._weights():
            trial.not_run.append(
                NotRun("controls and timing", "a hash leg ended without a result")
            )
        elif any(each.differences or each.hazards for each in trial.weights):
            trial.not_run.append(NotRun("controls and timing", "the weights are not right"))
        elif not self._control():
            trial.not_run.append(NotRun("timing", "the control's leg ended without a result"))
        elif not all(each.found for each in trial.controls):
            trial.not_run.append(NotRun("timing", "a planted fault was not found"))
        elif not self._times():
            trial.not_run.append(
                NotRun("the remaining timing legs", "a leg ended without a result")
            )
        return trial

    def _weights(self) -> bool:
        for arm in (BASELINE, CANDIDATE):
            for _ in range(self._plan.policy.hash_legs):
                result = self._leg("hash", arm)
                if result is None or result.manifest is None:
                    return False
                check = WeightsCheck(
                    arm=arm,
                    manifest=result.manifest.digest(),
                    differences=differences(self._plan.truth, result.manifest),
                    hazards=result.hazards,
                )
                self._trial.weights.append(check)
        return True

    def _control(self) -> bool:
        plant = draw_bit(self._plan.truth, self._plan.seed)
        if plant is None:
            self._trial.not_run.append(NotRun(DEVICE_BIT, "the checkpoint has no byte to change"))
            return True
        result = self._leg("control", CANDIDATE, plant=plant)
        if result is None or result.manifest is None:
            return False
        found = differences(self._plan.truth, result.manifest)
        self._trial.controls.append(judge_bit(plant, found))
        return True

    def _times(self) -> bool:
        return all(
            self._leg("time", turn.arm, block=turn.block, half=turn.half) is not None
            for turn in self._schedule
        )

    def _leg(
        self,
        purpose: Purpose,
        arm: str,
        *,
        block: int | None = None,
        half: int | None = None,
        plant: Plant | None = None,
    ) -> Result | None:
        """Prepare, run and record one leg; None when it has no result."""
        plan = self._plan
        self._progress(f"{purpose} {arm}", len(self._trial.legs), self._total)
        installed = plan.candidate if arm == CANDIDATE else plan.baseline
        request = Request(
            kind="time" if purpose == "time" else "hash",
            site=installed.site,
            entry=installed.arm.entry,
            digest=installed.arm.digest,
            checkpoint=str(plan.checkpoint),
            device=plan.device,
            parent=os.getpid(),
            delay_fraction=plan.policy.planted_delay_fraction if arm == DELAYED else 0.0,
            plant=plant,
            options=plan.options,
        )
        cache_state.warm(plan.shards)
        cache = cache_state.look(plan.shards)
        ended = run_leg(request, plan.policy.leg_timeout_s)
        outcome = ended.outcome
        result = outcome if isinstance(outcome, Result) else None
        if result is None:
            self._trial.said = ended.said
        else:
            # The digests are kept once, as differences from the truth.
            outcome = msgspec.structs.replace(result, manifest=None)
        self._trial.legs.append(
            Leg(
                purpose=purpose,
                arm=arm,
                block=block,
                half=half,
                cache=cache,
                memory=ended.memory,
                outcome=outcome,
            )
        )
        return result
