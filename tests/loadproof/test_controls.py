"""Controls: drawn at random, planted where faults happen, blamed exactly, or the trial fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loadproof.judge.conclusion import conclude, required_controls
from loadproof.measure import legs, plants
from loadproof.measure.cache_state import CacheState
from loadproof.measure.conditions import Conditions
from loadproof.measure.controls import (
    CONTROLS,
    DUPLICATED_CHUNK,
    FILE_BIT,
    SWAPPED_CHUNKS,
    Control,
    draw_controls,
    judge_control,
)
from loadproof.measure.digest import Difference, Manifest, Mismatch
from loadproof.measure.gpu import GpuConditions
from loadproof.measure.ground_truth import file_manifest, shard_paths, tensor_places
from loadproof.measure.legs import Leg, LegRunner, Turned
from loadproof.measure.memory import MemoryPeaks
from loadproof.measure.messages import CopyChunk, DeviceFacts, FlipBit, Result, SwapChunks
from loadproof.measure.trial import Trial, TrialPlan, run_trial
from loadproof.plan.arms import named_loader
from loadproof.plan.policy import load_policy

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("kept_templates")


def plan(checkpoint: Path, **changes: Any) -> TrialPlan:
    """A short trial of this environment's loader against itself."""
    policy = msgspec.structs.replace(load_policy("rehearsal"), hash_legs=1)
    ours = named_loader("weightload")
    values: dict[str, Any] = {
        "policy": policy,
        "blocks": 0,
        "seed": 5,
        "device": "fake",
        "checkpoint": checkpoint,
        "shards": tuple(shard_paths(checkpoint)),
        "truth": file_manifest(tensor_places(checkpoint)),
        "baseline": ours,
        "candidate": ours,
    }
    return TrialPlan(**(values | changes))


def silent(_what: str, _number: int, _total: int) -> None:
    """Show no progress."""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_every_drawn_fault_lies_inside_its_tensor_and_changes_it(
    checkpoint: Path, seed: int
) -> None:
    """Whatever the seed, each control is there and hits bytes that exist."""
    places = {each.name: each for each in tensor_places(checkpoint)}
    drawn = draw_controls(list(places.values()), seed)
    assert [each.name for each in drawn] == list(CONTROLS)
    for each in drawn:
        target = places[each.plant.tensor]
        assert 0 <= each.first_byte < target.nbytes
        if isinstance(each.plant, FlipBit):
            assert each.plant.byte == each.first_byte
            assert 0 <= each.plant.bit < 8
        elif isinstance(each.plant, SwapChunks):
            assert each.plant.first + each.plant.nbytes <= each.plant.second
            assert each.plant.second + each.plant.nbytes <= target.nbytes
        elif isinstance(each.plant, CopyChunk):
            assert each.plant.source != each.plant.tensor
            assert each.plant.source_byte + each.plant.nbytes <= places[each.plant.source].nbytes
            assert each.plant.byte + each.plant.nbytes <= target.nbytes


def test_seeds_draw_different_faults(checkpoint: Path) -> None:
    """A control that always hit one tensor would prove little about the others."""
    places = tensor_places(checkpoint)
    hit = {each.plant.tensor for seed in range(40) for each in draw_controls(places, seed)}
    assert hit == {each.name for each in places if each.nbytes}


def test_a_checkpoint_without_room_has_fewer_controls(tmp_path: Path) -> None:
    """No bytes, no control; one byte has no chunks to swap; one tensor no other to copy from."""
    places = tensor_places(_one_tensor(tmp_path / "one", 1))
    assert [each.name for each in draw_controls(places, 1)] == ["device-bit", "file-bit"]
    assert required_controls([each.nbytes for each in places]) == {"device-bit", "file-bit"}
    assert draw_controls([], 1) == []
    assert required_controls([]) == frozenset()


def _one_tensor(folder: Path, nbytes: int) -> Path:
    from fixtures.checkpoints import Tensor, write_checkpoint  # noqa: PLC0415

    write_checkpoint(folder, [[Tensor("only", "U8", (nbytes,))]], seed=1)
    return folder


def test_all_controls_are_found_on_the_device(checkpoint: Path) -> None:
    """The real machinery, end to end: each fault blamed on its tensor, from its byte on."""
    trial = run_trial(plan(checkpoint), silent)
    assert [each.name for each in trial.controls] == list(CONTROLS)
    assert [each.found for each in trial.controls] == [True] * len(CONTROLS)
    drawn = draw_controls(tensor_places(checkpoint), 5)
    for each, control in zip(drawn, trial.controls, strict=True):
        assert control.blamed == (each.plant.tensor,)
        assert f"from byte {each.first_byte:,} for" in control.seen[0]
    assert trial.controls[0].seen[0].endswith("one-bit")
    assert {each.poisoned_bytes for each in trial.weights} == {plan(checkpoint).truth.nbytes()}


def test_the_files_are_never_written_to(checkpoint: Path) -> None:
    """After all controls the checkpoint is byte for byte what it was."""
    before = (checkpoint / "model.safetensors").read_bytes()
    run_trial(plan(checkpoint), silent)
    assert (checkpoint / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("sabotaged", CONTROLS)
def test_a_control_whose_plant_is_removed_fails_the_trial(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, sabotaged: str
) -> None:
    """When a fault is not really planted, nothing is found, and the trial says so."""
    kinds = {"device-bit": FlipBit, SWAPPED_CHUNKS: SwapChunks, DUPLICATED_CHUNK: CopyChunk}
    if sabotaged == FILE_BIT:
        monkeypatch.setattr(plants, "plant_in_file", lambda path, *_: path)
    honest = LegRunner.run

    def without(self: LegRunner, *arguments: Any, **options: Any) -> Turned:
        if isinstance(options.get("plant"), kinds.get(sabotaged, ())):
            options["plant"] = None
        return honest(self, *arguments, **options)

    monkeypatch.setattr(legs.LegRunner, "run", without)
    the_plan = plan(checkpoint)
    trial = run_trial(the_plan, silent)
    conclusion = conclude(the_plan, trial, "no-regression")
    missed = {each.name for each in trial.controls if not each.found}
    assert missed == {sabotaged}
    assert conclusion.answer == "failed"
    assert [each.code for each in conclusion.reasons] == ["control-missed"]


class Machine:
    """A machine of which every load takes a second, and exactly as much longer as is planted."""

    def __init__(self, truth: Manifest) -> None:
        self.truth = truth
        self.honest = True

    def run(self, purpose: Any, arm: str, _installed: Any, **options: Any) -> Turned:
        """Answer as a leg would."""
        delay = options.get("delay_fraction", 0.0) if self.honest else 0.0
        result = Result(
            elapsed_s=1.0 + delay,
            phases_s={},
            tensors=len(self.truth.tensors),
            nbytes=self.truth.nbytes(),
            digest="sha256:" + "0" * 64,
            harness="sha256:" + "1" * 64,
            device=DeviceFacts(
                name="x",
                fake=True,
                capability=(9, 0),
                integrated=False,
                host_page_tables=False,
                driver_version=13000,
            ),
            report=None,
            device_to_host_copies=0,
            audited_bytes=8,
            read_bytes=0,
            vm_hwm_bytes=1,
            manifest=self.truth,
        )
        place = options.get("place") or (None, None)
        leg = Leg(
            purpose=purpose,
            arm=arm,
            block=place[0],
            half=place[1],
            cache=CacheState(state="warm", resident_bytes=1, total_bytes=1),
            memory=MemoryPeaks(samples=1, gap_max_s=0.0),
            conditions=Conditions(
                memory_missing_bytes=0,
                waited_s=0.0,
                swapped_bytes=0,
                load_average=0.0,
                gpu=GpuConditions(),
            ),
            outcome=result,
        )
        return Turned(leg, result, "")


@pytest.mark.parametrize("honest", [True, False])
def test_without_the_planted_delay_a_trial_is_inconclusive(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, *, honest: bool
) -> None:
    """S has to be seen; when its delay is not really there, nothing is said about time."""
    the_plan = plan(checkpoint, blocks=8)
    machine = Machine(the_plan.truth)
    machine.honest = honest
    monkeypatch.setattr(
        legs.LegRunner, "run", lambda _, *given, **more: machine.run(*given, **more)
    )
    monkeypatch.setattr("loadproof.measure.trial._Run._controls", lambda _: True)
    trial = run_trial(the_plan, silent)
    found = [
        Control(name=name, planted="", tensor="t", blamed=("t",), found=True) for name in CONTROLS
    ]
    seen = Trial(legs=trial.legs, weights=trial.weights, controls=found)
    conclusion = conclude(the_plan, seen, "no-regression")
    if honest:
        assert (conclusion.verdict.outcome, conclusion.answer) == ("no-gain", "proven")
    else:
        assert conclusion.answer == "inconclusive"
        assert [each.code for each in conclusion.reasons] == ["delay-missed"]


RIGHT = Mismatch(first_byte=3, run_bytes=1, content="one-bit")


@pytest.mark.parametrize(
    ("blamed", "found"),
    [
        ([Difference("t", "bytes", RIGHT)], True),
        ([], False),
        ([Difference("u", "bytes", RIGHT)], False),
        ([Difference("t", "dtype")], False),
        ([Difference("t", "bytes", RIGHT), Difference("u", "bytes")], False),
        ([Difference("t", "bytes", msgspec.structs.replace(RIGHT, first_byte=4))], False),
    ],
)
def test_a_control_is_found_only_by_exact_blame(blamed: list[Difference], *, found: bool) -> None:
    """Nothing, another tensor, another kind, another byte or one more tensor does not count."""
    from loadproof.measure.controls import Drawn  # noqa: PLC0415

    assert judge_control(Drawn("device-bit", FlipBit("t", 3, 1), "", 3), blamed).found is found
