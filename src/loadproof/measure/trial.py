"""All legs of a trial, in order: the weights first, then the controls, then the times.

Weights come first because the time of a loader that delivers other bytes means nothing; when
they differ, the timing legs are not run and the receipt says so.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import msgspec

from loadproof.measure import plants
from loadproof.measure.controls import CONTROLS, FILE_BIT, Control, draw_controls, judge_control
from loadproof.measure.digest import differences
from loadproof.measure.ground_truth import tensor_places
from loadproof.measure.legs import Leg, LegRunner, NotRun, Purpose, Setting, WeightsCheck
from loadproof.measure.messages import FlipBit
from loadproof.plan.arms import InstalledArm  # noqa: TC001 -- a schema class reads it
from loadproof.plan.schedule import ARMS, BASELINE, CANDIDATE, DELAYED, mirrored_blocks
from loadproof.plan.scratch import scratch_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from loadproof.measure.controls import Drawn
    from loadproof.measure.messages import Plant, Result


class TrialPlan(Setting, frozen=True, kw_only=True):
    """Everything that is decided before the first leg.

    Attributes:
        baseline: The arm behind A, A' and S.
        candidate: The arm behind B.
    """

    baseline: InstalledArm
    candidate: InstalledArm


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
    with LegRunner(plan) as runner:
        return _Run(plan, progress, runner).run()


class _Run:
    """A trial being run."""

    def __init__(
        self,
        plan: TrialPlan,
        progress: Callable[[str, int, int], None],
        runner: LegRunner,
    ) -> None:
        self._plan = plan
        self._progress = progress
        self._runner = runner
        self._schedule = mirrored_blocks(ARMS, plan.blocks, plan.seed)
        self._places = {each.name: each for each in tensor_places(plan.checkpoint)}
        self._total = 2 * plan.policy.hash_legs + len(CONTROLS) + len(self._schedule)
        self._trial = Trial()

    def run(self) -> Trial:
        trial = self._trial
        if not self._weights():
            trial.not_run.append(
                NotRun("controls and timing", "a hash leg ended without a result")
            )
        elif any(each.differences or each.hazards for each in trial.weights):
            trial.not_run.append(NotRun("controls and timing", "the weights are not right"))
        elif not self._controls():
            trial.not_run.append(NotRun("timing", "a control's leg ended without a result"))
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
                    differences=differences(self._plan.truth, result.manifest, result.mismatches),
                    hazards=result.hazards,
                    poisoned_bytes=result.poisoned_bytes,
                )
                self._trial.weights.append(check)
        return True

    def _controls(self) -> bool:
        drawn = draw_controls(list(self._places.values()), self._plan.seed)
        for name in sorted(set(CONTROLS) - {each.name for each in drawn}):
            self._trial.not_run.append(NotRun(name, "the checkpoint has no room for it"))
        return all(self._control(each) for each in drawn)

    def _control(self, drawn: Drawn) -> bool:
        if drawn.name != FILE_BIT or not isinstance(drawn.plant, FlipBit):
            return self._judged(drawn, self._leg("control", CANDIDATE, plant=drawn.plant))
        with ExitStack() as stack:
            try:
                altered = plants.plant_in_file(
                    self._plan.checkpoint,
                    self._places[drawn.plant.tensor],
                    drawn.plant,
                    stack.enter_context(scratch_folder("file-bit")),
                )
            except OSError as error:
                self._trial.not_run.append(
                    NotRun(FILE_BIT, f"the shard could not be copied: {error.strerror}")
                )
                return True
            return self._judged(drawn, self._leg("control", CANDIDATE, checkpoint=altered))

    def _judged(self, drawn: Drawn, result: Result | None) -> bool:
        if result is None or result.manifest is None:
            return False
        found = differences(self._plan.truth, result.manifest, result.mismatches)
        self._trial.controls.append(judge_control(drawn, found))
        return True

    def _times(self) -> bool:
        return all(
            self._leg("time", turn.arm, place=(turn.block, turn.half)) is not None
            for turn in self._schedule
        )

    def _leg(
        self,
        purpose: Purpose,
        arm: str,
        *,
        place: tuple[int, int] | None = None,
        plant: Plant | None = None,
        checkpoint: Path | None = None,
    ) -> Result | None:
        """Run and record one leg; None when it has no result."""
        plan = self._plan
        self._progress(f"{purpose} {arm}", len(self._trial.legs), self._total)
        turned = self._runner.run(
            purpose,
            arm,
            plan.candidate if arm == CANDIDATE else plan.baseline,
            place=place,
            delay_fraction=plan.policy.planted_delay_fraction if arm == DELAYED else 0.0,
            plant=plant,
            checkpoint=checkpoint,
        )
        self._trial.legs.append(turned.leg)
        self._trial.said = self._trial.said or turned.said
        return turned.result
