"""Served output: equal bytes serve equally, a spoilt weight shows, what cannot serve says why."""

from __future__ import annotations

import ctypes
import json
import shutil
import textwrap
from contextlib import closing
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.modules.module import register_module_forward_pre_hook

from fixtures.checkpoints import Tensor, write_checkpoint
from fixtures.models import FAMILIES
from fixtures.programs import PROJECTS
from loadproof.errors import ServingError
from loadproof.judge.conclusion import conclude
from loadproof.measure.controls import SERVED_BIT
from loadproof.measure.device import Device
from loadproof.measure.ground_truth import file_manifest, shard_paths, tensor_places
from loadproof.measure.handed_out import HandedTensor, SharedMemoryDevice
from loadproof.measure.legs import LegRunner, NotRun, Turned
from loadproof.measure.messages import (
    Answer,
    DeviceFacts,
    OutputDigest,
    Result,
    Served,
    Serving,
)
from loadproof.measure.serve_legs import ServingPlan, first_difference, plan_serving
from loadproof.measure.server import Server, _read_back
from loadproof.measure.trial import Trial, TrialPlan, run_trial
from loadproof.plan.arms import Arm, InstalledArm, named_loader
from loadproof.plan.identity import package_digest
from loadproof.plan.policy import load_policy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("kept_templates")

LOADS = """
    from weightload import load as _load

    def load(*arguments, driver, **options):
        loaded = _load(*arguments, driver=driver, **options)
        {after}
        return loaded
    """
# Right wherever it is hashed or timed, wrong where a model is made of it.
WRONG_WHERE_IT_SERVES = """import sys
        if "transformers" in sys.modules:
            for tensor in loaded.values():
                driver.cuMemsetD8(tensor.data_ptr(), 0x3C, tensor.nbytes)
            driver.cuCtxSynchronize()"""
LACKS_ONE_WHERE_IT_SERVES = """import sys
        if "transformers" in sys.modules:
            loaded._tensors.pop("model.norm.weight")"""


CAREFUL_WHERE_IT_SERVES = """import os, sys
        if "transformers" in sys.modules:
            from huggingface_hub import constants
            assert constants.HF_HUB_OFFLINE
            assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE" """


def written(folder: Path, family: str = "qwen2 tied") -> Path:
    """A tiny checkpoint of a family."""
    FAMILIES[family].write(folder)
    return folder


def serving(checkpoint: Path, wanted: Any = "asked", **more: Any) -> ServingPlan | NotRun:
    """How a trial on the fake device serves."""
    places = tensor_places(checkpoint)
    return plan_serving(wanted, checkpoint, places, **{"device": "fake", "seed": 5, **more})


def plan(checkpoint: Path, **changes: Any) -> TrialPlan:
    """A trial of this environment's loader against itself, without times."""
    ours = named_loader("weightload")
    values: dict[str, Any] = {
        "policy": msgspec.structs.replace(load_policy("rehearsal"), hash_legs=1),
        "blocks": 0,
        "seed": 5,
        "device": "fake",
        "checkpoint": checkpoint,
        "shards": tuple(shard_paths(checkpoint)),
        "truth": file_manifest(tensor_places(checkpoint)),
        "baseline": ours,
        "candidate": ours,
    }
    return TrialPlan(**(values | {"serving": serving(checkpoint)} | changes))


def tried(the_plan: TrialPlan) -> Trial:
    """Run a trial and show no progress."""
    return run_trial(the_plan, lambda *_: None)


def stub(folder: Path, after: str) -> InstalledArm:
    """An arm whose loader loads rightly, and then does what is given."""
    package = folder / "site" / "stubloader"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(LOADS.format(after=after)))
    arm = Arm(entry="stubloader:load", digest=package_digest(package))
    return InstalledArm(arm, str(package.parent))


def reasons(trial: Trial) -> dict[str, str]:
    """What was not run, and why."""
    return {each.what: each.why for each in trial.not_run}


@pytest.fixture(scope="module")
def honest(
    kept_templates: None,  # noqa: ARG001 -- its legs are forked from them
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[TrialPlan, Trial]]:
    """Try a model of a family whose candidate only looks at where it serves, once for all."""

    @cache
    def trial_of(family: str) -> tuple[TrialPlan, Trial]:
        folder = tmp_path_factory.mktemp("honest")
        candidate = stub(folder, CAREFUL_WHERE_IT_SERVES)
        the_plan = plan(written(folder / "model", family), candidate=candidate)
        return the_plan, tried(the_plan)

    return trial_of


@pytest.mark.parametrize("family", ["qwen2 tied", "bert", "t5 untied"])
def test_both_arms_serve_the_reference_s_output_and_a_spoilt_weight_shows(
    honest: Callable[[str], tuple[TrialPlan, Trial]], family: str
) -> None:
    """Greedy tokens, or the model's own output; one weight made huge changes it."""
    the_plan, trial = honest(family)
    conclusion = conclude(the_plan, trial, "no-regression")
    assert conclusion.served == "equal"
    assert set(trial.served) == {"reference", "A", "B"}
    (answer,) = trial.served["B"].answers
    assert answer.prompt_tokens == 24
    assert (len(answer.tokens), bool(answer.outputs)) == (
        (0, True) if family == "bert" else (16, False)
    )
    control = trial.controls[-1]
    assert (control.name, control.found, control.blamed) == (SERVED_BIT, True, ())
    assert "embed" in control.tensor
    assert control.seen[0].startswith(("token 1 of 16", "the output 'last_hidden_state'"))
    assert [leg.arm for leg in trial.legs if leg.purpose == "serve"] == ["reference", "A", "B"]


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (WRONG_WHERE_IT_SERVES, "after a prompt of 24 tokens was"),
        (
            LACKS_ONE_WHERE_IT_SERVES,
            "would make up 1 of its weights, which the checkpoint lacks, first model.norm",
        ),
    ],
)
def test_an_arm_that_serves_something_else_fails_the_trial(
    tmp_path: Path, after: str, said: str
) -> None:
    """Right bytes in the hash legs do not help; what is served is compared, and B is named."""
    the_plan = plan(written(tmp_path / "model"), candidate=stub(tmp_path, after))
    trial = tried(the_plan)
    conclusion = conclude(the_plan, trial, "no-regression")
    assert (conclusion.answer, conclusion.weights, conclusion.served) == (
        "failed",
        "equal",
        "differs",
    )
    (reason,) = conclusion.reasons
    assert reason.code == "served-differs"
    assert "B " in reason.sentence
    assert said in reason.sentence
    assert "controls and timing" in reasons(trial)
    assert trial.controls == []


def test_a_loader_that_is_a_program_is_served(tmp_path: Path) -> None:
    """Its process's memory is read; the control, planted there, is found."""
    site = tmp_path / "site"
    shutil.copytree(PROJECTS / "command_loader" / "bin", site)
    command = ("{python}", "{site}/loader.py")
    options = {"read_bytes": 1000}
    arm = Arm(entry="", command=command, digest=package_digest(site), options=options)
    program = InstalledArm(arm, str(site))
    the_plan = plan(written(tmp_path / "model", "bert"), candidate=program)
    trial = tried(the_plan)
    assert conclude(the_plan, trial, "no-regression").served == "equal"
    assert (trial.controls[-1].name, trial.controls[-1].found) == (SERVED_BIT, True)


def test_a_control_whose_plant_is_removed_fails_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When no weight is really spoilt the output stays, and the trial says so."""
    honest = LegRunner.run

    def without(self: LegRunner, *arguments: Any, **options: Any) -> Turned:
        if options.get("serving") is not None:
            options["serving"] = msgspec.structs.replace(options["serving"], plant=False)
        return honest(self, *arguments, **options)

    monkeypatch.setattr(LegRunner, "run", without)
    the_plan = plan(written(tmp_path / "model"))
    conclusion = conclude(the_plan, tried(the_plan), "no-regression")
    assert conclusion.answer == "failed"
    (reason,) = conclusion.reasons
    assert reason.code == "control-missed"
    assert "the served output did not change" in reason.sentence


def unknown_type(folder: Path) -> None:
    """A model type that transformers does not have."""
    change_config(folder, model_type="no-such-model", architectures=None)


def own_code(folder: Path) -> None:
    """A model whose code lies in the checkpoint."""
    change_config(
        folder,
        model_type="no-such-model",
        auto_map={"AutoConfig": "own.Config", "AutoModel": "own.Model"},
    )
    (folder / "own.py").write_text("raise SystemError('it ran')\n")


def lacks_a_weight(folder: Path) -> None:
    """A weight that would be random."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("encoder.layer.1.output.dense.bias")
    save_file(tensors, path, metadata={"format": "pt"})


def kernels_missing(folder: Path) -> None:
    """Quantised by a backend that is not installed."""
    change_config(folder, quantization_config={"quant_method": "awq", "bits": 4})


def no_json(folder: Path) -> None:
    """A config that is none."""
    (folder / "config.json").write_text("{")


def change_config(folder: Path, **values: Any) -> None:
    """Set values of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (unknown_type, "no-such-model"),
        (own_code, "contains custom code"),
        (lacks_a_weight, "first encoder.layer.1.output.dense.bias"),
        (kernels_missing, "cannot serve the model"),
        (no_json, "cannot serve its config"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_what_cannot_be_served_is_not_run_with_its_reason(
    tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    """The trial goes on without served output, and nothing about time is doubted for it."""
    checkpoint = written(tmp_path / "model", "bert")
    spoil(checkpoint)
    the_plan = plan(checkpoint, serving=serving(checkpoint, "if-cheap"))
    trial = tried(the_plan)
    assert said in reasons(trial)["served output of reference"]
    assert len(trial.controls) == 4
    conclusion = conclude(the_plan, trial, "no-regression")
    assert conclusion.served == "not-run"
    assert "cannot-serve" not in {each.code for each in conclusion.verdict.reasons}


def test_what_was_asked_for_and_cannot_be_served_ends_the_trial(tmp_path: Path) -> None:
    """No control and no timing leg runs for nothing."""
    checkpoint = written(tmp_path / "model", "bert")
    unknown_type(checkpoint)
    trial = tried(plan(checkpoint))
    assert "no-such-model" in reasons(trial)["served output of reference"]
    assert reasons(trial)["controls and timing"] == "a serve leg ended without a result"
    assert trial.controls == []


def test_why_there_are_no_serve_legs(tmp_path: Path) -> None:
    """Each reason is said; where serving was asked for, it is an error."""
    bare = tmp_path / "bare"
    write_checkpoint(bare, [(Tensor("t", "F32", (2,)),)], seed=1)
    indexed = written(tmp_path / "model")
    (indexed / "model.safetensors").write_bytes((bare / "model.safetensors").read_bytes())
    for checkpoint, said in ((bare, "no config.json"), (indexed, "the index does not name")):
        why = serving(checkpoint, "if-cheap")
        assert isinstance(why, NotRun)
        assert said in why.why
        with pytest.raises(ServingError, match=said):
            serving(checkpoint)
    (indexed / "model.safetensors").unlink()
    for more, said in (
        ({"wanted": "no"}, "it was not asked for"),
        ({"wanted": "if-cheap", "device": "cuda:0"}, "three cold loads"),
    ):
        why = serving(indexed, **more)
        assert isinstance(why, NotRun)
        assert said in why.why
    large = [msgspec.structs.replace(each, nbytes=1 << 30) for each in tensor_places(indexed)]
    why = plan_serving("if-cheap", indexed, large, device="fake", seed=5)
    assert isinstance(why, NotRun)
    assert "1 GiB" in why.why


def test_on_a_gpu_a_long_prompt_comes_first_and_starts_cold(tmp_path: Path) -> None:
    """The fake device serves the short prompt alone."""
    checkpoint = written(tmp_path / "model")
    there = serving(checkpoint, device="cuda:0")
    here = serving(checkpoint)
    assert isinstance(there, ServingPlan)
    assert isinstance(here, ServingPlan)
    assert (there.serving.prompts, there.serving.cold) == ((32_768, 24), True)
    assert (here.serving.prompts, here.serving.cold) == ((24,), False)
    assert here.serving.dtype == "bfloat16"
    shorter = serving(checkpoint, device="cuda:0", long_prompt_tokens=4096)
    assert isinstance(shorter, ServingPlan)
    assert shorter.serving.prompts[0] == 4096


def test_a_serve_leg_starts_cold_where_it_has_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache is prepared cold for it, whatever the other legs start from."""
    asked: list[str] = []

    def prepare(_shards: Any, wanted: str) -> Any:
        asked.append(wanted)
        raise InterruptedError

    monkeypatch.setattr("loadproof.measure.cache_state.prepare", prepare)
    the_plan = plan(written(tmp_path / "model"))
    assert isinstance(the_plan.serving, ServingPlan)
    for cold in (True, False):
        told = msgspec.structs.replace(the_plan.serving.serving, cold=cold)
        with closing(LegRunner(the_plan)) as runner, pytest.raises(InterruptedError):
            runner.run("serve", "A", the_plan.baseline, serving=told)
    assert asked == ["cold", "warm"]


class OnTheCpu:
    """A device as a GPU is to a server, but torch's CPU: it owns the tensors that are served."""

    loader_device = "cpu"

    def facts(self) -> DeviceFacts:
        """Say that this is no fake."""
        return DeviceFacts(
            name="x",
            fake=False,
            capability=(9, 0),
            integrated=False,
            host_page_tables=False,
            driver_version=13000,
        )


def server(checkpoint: Path, device: Any = None, **changes: Any) -> Server:
    """A server whose device is the CPU, or the one given."""
    values: dict[str, Any] = {
        "folder": str(checkpoint),
        "prompts": (24,),
        "new_tokens": 16,
        "seed": 5,
        "dtype": "float32",
    }
    chosen: Any = device or OnTheCpu()
    return Server(Serving(**(values | changes)), chosen)


def test_the_model_is_made_of_the_very_tensors(tmp_path: Path) -> None:
    """On a device that torch knows nothing is copied, and the reference's output is served."""
    checkpoint = written(tmp_path / "model", "llama by its class")
    tensors = load_file(checkpoint / "model.safetensors")
    ours = server(checkpoint)
    model = ours._around(tensors)
    places = {tensor.data_ptr() for tensor in tensors.values()}
    assert {weight.data_ptr() for weight in model.parameters()} <= places
    reference = server(checkpoint, reference=True)
    expected = reference.serve(reference.load_reference(str(checkpoint)))
    assert first_difference(expected, ours.serve(tensors)) is None
    embedding = tensors["model.embed_tokens.weight"]
    embedding.copy_(embedding.flip(0))
    assert first_difference(expected, ours.serve(tensors)) is not None


@pytest.mark.parametrize("name", ["llama by its class", "bert"])
def test_nothing_is_served_by_cudnn_s_attention(tmp_path: Path, name: str) -> None:
    """It answers a long prompt differently from one time to the next; the rest is as it was."""
    checkpoint = written(tmp_path / "model", name)
    chosen: list[bool] = []
    hook = register_module_forward_pre_hook(
        lambda *_: chosen.append(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
    )
    try:
        server(checkpoint).serve(load_file(checkpoint / "model.safetensors"))
    finally:
        hook.remove()
    assert chosen
    assert not any(chosen)
    assert torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_a_program_s_tensors_are_served_by_their_bytes(tmp_path: Path) -> None:
    """Memory of another process is none of torch's; what is in it is served all the same."""
    checkpoint = written(tmp_path / "model", "bert")
    memory = bytearray((checkpoint / "model.safetensors").read_bytes())
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    handed = {
        each.name: HandedTensor(each.dtype, each.shape, each.nbytes, start + each.offset)
        for each in tensor_places(checkpoint)
    }
    reference = server(checkpoint, SharedMemoryDevice("fake"), reference=True)
    expected = reference.serve(reference.load_reference(str(checkpoint)))
    ours = server(checkpoint, SharedMemoryDevice("fake"))
    assert first_difference(expected, ours.serve(handed)) is None
    spoilt = server(checkpoint, SharedMemoryDevice("fake"), plant=True)
    assert first_difference(expected, spoilt.serve(handed)) is not None


def test_a_dtype_that_torch_does_not_have_cannot_be_served(tmp_path: Path) -> None:
    """The sentence names the tensor and its dtype."""
    checkpoint = written(tmp_path / "model", "bert")
    odd: Any = {"odd": HandedTensor("F4", (2,), 0, 0)}
    with pytest.raises(ServingError, match="'odd' is F4, which torch does not have"):
        server(checkpoint, SharedMemoryDevice("fake")).serve(odd)


def test_a_model_that_answers_differently_each_time_is_no_reference(tmp_path: Path) -> None:
    """Nothing could be compared with it."""
    checkpoint = written(tmp_path / "model", "bert")
    reference = server(checkpoint, reference=True)
    loaded = reference.load_reference(str(checkpoint))
    loaded.model.train()
    with pytest.raises(ServingError, match="asked twice"):
        reference.serve(loaded)


def test_a_long_prompt_is_cut_to_the_model_s_positions(tmp_path: Path) -> None:
    """What was asked for stays in the answer, and room is left for the new tokens."""
    checkpoint = written(tmp_path / "model")
    both = server(checkpoint, prompts=(32_768, 24), reference=True)
    long, short = both.serve(both.load_reference(str(checkpoint))).answers
    assert (long.asked_tokens, long.prompt_tokens) == (32_768, 64 - 16)
    assert (short.asked_tokens, short.prompt_tokens) == (24, 24)
    assert long.first_s > 0
    assert len(long.tokens) == 16


def test_a_prompt_has_no_special_token_and_follows_from_its_seed(tmp_path: Path) -> None:
    """Image tokens, ends and padding would ask for more than text."""
    checkpoint = written(tmp_path / "model", "gemma3 with images")
    ours = server(checkpoint)
    model = ours._built(str(checkpoint))
    prompt = ours._prompt(model, 40)
    assert not set(prompt) & {0, 1, 2, 90, 91, 92}
    assert max(prompt) < 96
    assert ours._prompt(model, 40) == prompt
    assert server(checkpoint, seed=6)._prompt(model, 40) != prompt


def test_a_model_that_takes_no_token_ids_is_said_to(tmp_path: Path) -> None:
    """Pictures and sounds cannot be drawn from a vocabulary."""
    from transformers import ViTConfig, ViTModel  # noqa: PLC0415 -- only here

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=32,
        patch_size=16,
    )
    ViTModel(config).save_pretrained(tmp_path / "model")
    reference = server(tmp_path / "model", reference=True)
    with pytest.raises(ServingError, match="takes pixel_values"):
        reference.serve(reference.load_reference(str(tmp_path / "model")))


def test_a_tensor_of_several_reads_comes_back_whole(tmp_path: Path) -> None:
    """Longer than the buffer that it comes through, and not a multiple of it."""
    import weightload  # noqa: PLC0415 -- only here

    folder = tmp_path / "large"
    write_checkpoint(folder, [(Tensor("t", "U8", ((17 << 20) + 3,)), Tensor("e", "F32", (0,)))], 1)
    device = Device("fake")
    with weightload.load(folder, device="cuda:0", driver=device.loader_driver) as loaded:
        found = {name: bytes(each.numpy().data) for name, each in _read_back(device, loaded)}
    (place,) = [each for each in tensor_places(folder) if each.name == "t"]
    assert found == {"t": (folder / "model.safetensors").read_bytes()[place.offset :], "e": b""}
    assert device.hazards() == ()


def served(**changes: Any) -> Served:
    """What a model of two prompts served."""
    output = OutputDigest(name="last", dtype="float32", shape=(2,), sha256="a" * 64)
    answers = (
        Answer(asked_tokens=9, prompt_tokens=9, first_s=1.0, seconds=1.0, tokens=(4, 5)),
        Answer(asked_tokens=3, prompt_tokens=3, first_s=1.0, seconds=1.0, outputs=(output,)),
    )
    return Served(
        **({"model": "M", "dtype": "float32", "place": "cpu", "answers": answers} | changes)
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"first_s": 9.0, "seconds": 9.0}, None),
        ({"tokens": (4, 6)}, "token 2 of 2 after a prompt of 9 tokens was 6, and not 5"),
        ({"tokens": (4,)}, "token 2 of 2 after a prompt of 9 tokens was None, and not 5"),
        ({"prompt_tokens": 8}, "a prompt had 8 tokens, and not 9"),
        (
            {"outputs": (OutputDigest(name="x", dtype="f", shape=(), sha256="b"),)},
            "the output 'x' after a prompt of 9 tokens has other bytes",
        ),
    ],
)
def test_the_first_difference_is_named(change: dict[str, Any], said: str | None) -> None:
    """Tokens, prompts and outputs count; time does not."""
    first, second = served().answers
    changed = served(answers=(msgspec.structs.replace(first, **change), second))
    assert first_difference(served(), changed) == said


def test_another_class_dtype_or_number_of_prompts_is_a_difference() -> None:
    """The same tokens by another model are not the same output."""
    for change in ({"model": "N"}, {"dtype": "float16"}, {"answers": served().answers[:1]}):
        assert first_difference(served(), served(**change)) is not None
    assert first_difference(served(), served(place="cuda")) is None


def test_serve_legs_alone_bring_in_torch_and_none_asks_the_network(
    honest: Callable[[str], tuple[TrialPlan, Trial]],
) -> None:
    """Served output costs its own legs and no other; there the hub's client is offline.

    Nor do torch's threads take the cores from each other there.
    """
    _, trial = honest("qwen2 tied")
    assert "B" in trial.served
    steps = {
        leg.purpose: set(leg.outcome.phases_s)
        for leg in trial.legs
        if isinstance(leg.outcome, Result)
    }
    assert "import transformers" in steps["serve"]
    assert "import transformers" not in steps["hash"] | steps["control"]
