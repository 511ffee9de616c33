"""All legs of a trial, in order: weights, served output, controls, and then the times.

Weights come first because the time of a loader that delivers other bytes means nothing; when
they or what they serve differ, the timing legs are not run and the receipt says so.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import msgspec

from loadproof.measure import plants
from loadproof.measure.controls import CONTROLS, FILE_BIT, Control, draw_controls, judge_control
from loadproof.measure.digest import differences
from loadproof.measure.ground_truth import tensor_places
from loadproof.measure.legs import Leg, LegRunner, NotRun, Purpose, Setting, WeightsCheck
from loadproof.measure.messages import FlipBit, Served
from loadproof.measure.serve_legs import (
    SERVED_OUTPUT,
    ServingPlan,
    serve,
    serve_spoilt,
    served_differs,
)
from loadproof.plan.arms import InstalledArm  # noqa: TC001 -- a schema class reads it
from loadproof.plan.schedule import (
    ARMS,
    BASELINE,
    CANDIDATE,
    DELAYED,
    REFERENCE,
    mirrored_blocks,
)
from loadproof.plan.scratch import scratch_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from loadproof.measure.controls import Drawn
    from loadproof.measure.messages import Plant, Result, Serving


class TrialPlan(Setting, frozen=True, kw_only=True):
    """Everything that is decided before the first leg.

    Attributes:
        baseline: The arm behind A, A' and S.
        candidate: The arm behind B.
        serving: How the arms serve, or why they do not.
    """

    baseline: InstalledArm
    candidate: InstalledArm
    serving: ServingPlan | NotRun = NotRun(SERVED_OUTPUT, "it was not asked for; --served does it")


class Trial(msgspec.Struct, kw_only=True):
    """What was seen.

    Attributes:
        legs: Every leg, in the order in which they ran.
        weights: One check per hash leg that ended with a result.
        controls: The planted faults and what became of them.
        served: What was served, by the reference's name and the arms'.
        not_run: What was left out, and why.
        said: Standard error of the first leg that failed, for the person at the keyboard.
    """

    legs: list[Leg] = []
    weights: list[WeightsCheck] = []
    controls: list[Control] = []
    served: dict[str, Served] = {}
    not_run: list[NotRun] = []
    said: str = ""


def run_trial(plan: TrialPlan, progress: Callable[[str, int, int], None]) -> Trial:
    """Run every leg of a trial; the first leg that fails ends it.

    Args:
        plan: What to run.
        progress: Told before each leg: what it is, its number from 0, and how many there are.
    """
    with closing(LegRunner(plan)) as runner:
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
        # The reference, both arms and their control.
        self._total += 4 if isinstance(plan.serving, ServingPlan) else 0
        self._trial = Trial()

    def run(self) -> Trial:
        trial, rest = self._trial, "controls and timing"
        if not self._weights():
            self._not_served("a hash leg ended without a result", rest)
        elif any(each.differences or each.hazards for each in trial.weights):
            self._not_served("the weights are not right", rest)
        elif not serve(self._plan.serving, trial, self._leg):
            trial.not_run.append(NotRun(rest, "a serve leg ended without a result"))
        elif served_differs(trial.served):
            trial.not_run.append(NotRun(rest, "the served output is not the reference's"))
        elif not self._controls():
            trial.not_run.append(NotRun("timing", "a control's leg ended without a result"))
        elif not all(each.found for each in trial.controls):
            trial.not_run.append(NotRun("timing", "a planted fault was not found"))
        elif not self._times():
            trial.not_run.append(
                NotRun("the remaining timing legs", "a leg ended without a result")
            )
        return trial

    def _not_served(self, why: str, rest: str) -> None:
        serving = self._plan.serving
        not_served = serving if isinstance(serving, NotRun) else NotRun(SERVED_OUTPUT, why)
        self._trial.not_run += [NotRun(rest, why), not_served]

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
        return all(self._control(each) for each in drawn) and serve_spoilt(
            self._plan.serving, self._trial, self._leg
        )

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
        serving: Serving | None = None,
    ) -> Result | None:
        """Run and record one leg; None when it has no result."""
        plan = self._plan
        installed = {
            CANDIDATE: plan.candidate,
            REFERENCE: plan.serving.reference if isinstance(plan.serving, ServingPlan) else None,
        }.get(arm) or plan.baseline
        self._progress(f"{purpose} {arm}", len(self._trial.legs), self._total)
        turned = self._runner.run(
            purpose,
            arm,
            installed,
            place=place,
            delay_fraction=plan.policy.planted_delay_fraction if arm == DELAYED else 0.0,
            plant=plant,
            checkpoint=checkpoint,
            serving=serving,
        )
        self._trial.legs.append(turned.leg)
        self._trial.said = self._trial.said or turned.said
        return turned.result
