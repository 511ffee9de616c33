"""`load_model`: from_pretrained's rules, its refusals, and what falls back to it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from huggingface_hub.errors import RevisionNotFoundError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    BertForMaskedLM,
    BertModel,
    FunnelBaseModel,
    FunnelConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import weightload
from fakecuda import FakeCuda
from fixtures.model_equality import differences, tensors_of
from fixtures.models import FAMILIES
from tests.weightload.model_support import on_fake, written
from weightload.models.families import READ_AHEAD_LAYERS, read_ahead_layers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def checkpoint(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's checkpoint, the test's own to change."""

    def copied(family: str) -> Path:
        source = written(tmp_path_factory.getbasetemp() / "families", family)
        return shutil.copytree(source, tmp_path / "model")

    return copied


def change_config(folder: Path, **values: Any) -> None:
    """Set values of config.json; None takes one out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: each for key, each in config.items() if each is not None}))


def test_importing_weightload_imports_neither_torch_nor_transformers() -> None:
    """A leg on the fake device starts in a fraction of a second."""
    code = (
        "import sys, weightload; assert 'load_model' in weightload.__all__;"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'cuda'} & set(sys.modules);"
        "assert not heavy, heavy; assert weightload.load_model; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_weightload_lacks_is_an_attribute_error() -> None:
    """The lazy names hide no typing mistake."""
    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        _ = weightload.load_modle


def test_everything_public_is_there() -> None:
    """Every name of `__all__` can be had."""
    assert all(getattr(weightload, name) for name in weightload.__all__)


@pytest.mark.parametrize("dtype", ["auto", None, "float16", torch.float32])
@pytest.mark.parametrize("stored", [None, "bfloat16"])
def test_dtype_rules_are_from_pretrained_s(
    checkpoint: Callable[[str], Path], dtype: Any, stored: str | None
) -> None:
    """The config's dtype, or the first floating one by name, or the caller's."""
    folder = checkpoint("llama by its class")
    change_config(folder, dtype=stored)
    tensors = load_file(folder / "model.safetensors")
    first = min(tensors)
    tensors[first] = tensors[first].half()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = on_fake(AutoModelForCausalLM, folder, dtype=dtype)
    assert model.dtype == expected.dtype
    assert differences(model, expected) == []


@pytest.mark.parametrize("asked", [{}, {"dtype": None}, {"dtype": "auto"}], ids=str)
def test_the_index_may_say_the_dtype(
    checkpoint: Callable[[str], Path], asked: dict[str, Any]
) -> None:
    """A config without a dtype takes the one of the index."""
    folder = checkpoint("llama")
    change_config(folder, dtype=None)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["dtype"] = "float16"
    path.write_text(json.dumps(index))
    expected = AutoModelForCausalLM.from_pretrained(folder, **asked)
    model = on_fake(AutoModelForCausalLM, folder, **asked)
    assert (model.dtype, expected.dtype) == (torch.float16, torch.float16)
    assert differences(model, expected) == []


def test_of_two_dtypes_the_newer_name_s_is_taken(checkpoint: Callable[[str], Path]) -> None:
    """`dtype` and `torch_dtype` together, as from_pretrained takes them."""
    folder = checkpoint("llama")
    asked: dict[str, Any] = {"dtype": torch.float32, "torch_dtype": torch.float16}
    expected = AutoModelForCausalLM.from_pretrained(folder, **asked)
    assert differences(on_fake(AutoModelForCausalLM, folder, **asked), expected) == []


def test_keywords_reach_the_config_and_the_class(checkpoint: Callable[[str], Path]) -> None:
    """Overrides of the config, attention, generation config and loading info pass through."""
    folder = checkpoint("llama")
    keywords: dict[str, Any] = {
        "use_cache": False,
        "attn_implementation": "eager",
        "generation_config": GenerationConfig.from_dict({"top_k": 7}),
        "output_loading_info": True,
    }
    classes: list[Any] = [AutoModelForCausalLM, LlamaForCausalLM]
    for model_class in classes:
        expected, expected_info = model_class.from_pretrained(folder, **keywords)
        model, info = on_fake(model_class, folder, **keywords)
        assert info == expected_info
        assert model.config.to_dict() == expected.config.to_dict()
        assert model.config._attn_implementation == "eager"
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()


def test_a_config_of_the_caller_s_own(checkpoint: Callable[[str], Path]) -> None:
    """A config object is taken as it is, and is not changed."""
    folder = checkpoint("llama")
    config = LlamaConfig.from_pretrained(
        folder, rope_parameters={"rope_theta": 5.0, "rope_type": "default"}
    )
    before = config.to_dict()
    expected = AutoModelForCausalLM.from_pretrained(folder, config=config)
    model = on_fake(AutoModelForCausalLM, folder, config=config)
    assert differences(model, expected) == []
    assert config.to_dict() == before


def test_no_generation_config_is_made_of_the_config(checkpoint: Callable[[str], Path]) -> None:
    """Without the file, what the config says of generation counts."""
    folder = checkpoint("gpt2")
    (folder / "generation_config.json").unlink()
    expected = AutoModelForCausalLM.from_pretrained(folder)
    model = on_fake(AutoModelForCausalLM, folder)
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


_REMOTE = """
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM


class TinyConfig(LlamaConfig):
    model_type = "tiny-remote"


class TinyModel(LlamaForCausalLM):
    config_class = TinyConfig
    built = 0

    def __init__(self, config):
        super().__init__(config)
        self.rates = [each.item() for each in torch.linspace(0, 0.1, 4)]
        self.files = sorted(os.listdir(config._name_or_path))
        TinyModel.built += 1

    @classmethod
    def from_pretrained(cls, path, **keywords):
        model = super().from_pretrained(path, **keywords)
        model.hooked = str(path)
        return model
"""


def test_remote_code_needs_trust(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of the repository runs when it is trusted, and then as from_pretrained runs it.

    It is built once, may read its own folder, and may have a from_pretrained of its own.
    """
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr("transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE", 0)
    folder = checkpoint("llama")
    (folder / "tiny.py").write_text(_REMOTE)
    auto = {"AutoConfig": "tiny.TinyConfig", "AutoModelForCausalLM": "tiny.TinyModel"}
    change_config(folder, model_type="tiny-remote", auto_map=auto)
    with pytest.raises(ValueError, match="trust_remote_code"):
        on_fake(AutoModelForCausalLM, folder, trust_remote_code=False)
    with pytest.warns(weightload.FallbackWarning, match="its code is not transformers' own"):
        model = on_fake(AutoModelForCausalLM, folder, trust_remote_code=True)
    report = model.weightload_report
    assert type(model).__name__ == "TinyModel"
    assert type(model).built == 1
    expected = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model) is type(expected)
    assert differences(model, expected) == []
    assert (model.files, model.hooked) == (expected.files, expected.hooked)
    assert (report.how, report.load) == ("from_pretrained", None)


class _Hooked(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A class that does something of its own after loading, and knows nothing of pairs."""

    @classmethod
    def from_pretrained(cls, *arguments: Any, **keywords: Any) -> Any:
        """Load, and note where from."""
        model: Any = super().from_pretrained(*arguments, **keywords)
        model.hooked = str(arguments[0])
        return model


class _HookedPair(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A class that does something of its own after loading, and gives the account on."""

    @classmethod
    def from_pretrained(cls, *arguments: Any, **keywords: Any) -> Any:
        """Load, and note where from."""
        result: Any = super().from_pretrained(*arguments, **keywords)
        model = result[0] if keywords.get("output_loading_info") else result
        model.hooked = str(arguments[0])
        return result


@pytest.mark.parametrize("keywords", [{}, {"offload_folder": "x"}], ids=str)
@pytest.mark.parametrize("auto", [False, True])
def test_a_class_with_a_from_pretrained_of_its_own(
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    keywords: dict[str, Any],
    *,
    auto: bool,
) -> None:
    """It loads by that, is given a path, and is not asked for a pair that it would break on."""
    folder = checkpoint("llama")
    monkeypatch.setitem(AutoModelForCausalLM._model_mapping._extra_content, LlamaConfig, _Hooked)
    asked: Any = AutoModelForCausalLM if auto else _Hooked
    with pytest.warns(weightload.FallbackWarning):
        model, info = on_fake(asked, folder, output_loading_info=True, **keywords)
    assert (type(model), model.hooked, info) == (_Hooked, str(folder), {})
    report = model.weightload_report
    assert (report.how, report.load) == ("from_pretrained", None)
    assert keywords or report.reason == "_Hooked has a from_pretrained of its own"


def test_a_from_pretrained_of_its_own_that_gives_its_account_is_checked(
    checkpoint: Callable[[str], Path],
) -> None:
    """A weight that such a class would make random is an error as ever."""
    folder = checkpoint("llama by its class")
    with pytest.warns(weightload.FallbackWarning, match="_HookedPair has a from_pretrained"):
        model, info = on_fake(_HookedPair, folder, output_loading_info=True)
    assert model.hooked == str(folder)
    assert not info["missing_keys"]
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with (
        pytest.warns(weightload.FallbackWarning),
        pytest.raises(weightload.ModelError, match=r"lacks model.norm.weight"),
    ):
        on_fake(_HookedPair, folder)


class _Remembers(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A class that keeps the name of its files, and a word that only looks like none."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.where = config.name_or_path
        self.word = str(None)


def test_whoever_keeps_the_name_has_it(checkpoint: Callable[[str], Path]) -> None:
    """On the fast route the name comes late, to every attribute and config that took it."""
    folder = checkpoint("llama")
    model = on_fake(_Remembers, folder)
    assert model.weightload_report.how == "fast"
    assert (model.where, model.word) == (str(folder), "None")


def test_copies_of_the_config_have_the_name(checkpoint: Callable[[str], Path]) -> None:
    """T5's encoder and decoder hold configs of their own."""
    folder = checkpoint("t5 untied")
    expected = AutoModelForSeq2SeqLM.from_pretrained(folder)
    model = on_fake(AutoModelForSeq2SeqLM, folder)
    for part in ("encoder", "decoder"):
        ours, theirs = getattr(model, part).config, getattr(expected, part).config
        assert ours.name_or_path == theirs.name_or_path == str(folder)


def test_one_of_several_classes_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config's architecture says which, and no model is built to find it out."""
    sizes = {"d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 8, "vocab_size": 16}
    config = FunnelConfig(block_sizes=[1, 1], num_decoder_layers=1, **sizes)  # type: ignore[arg-type]
    FunnelBaseModel(config).save_pretrained(tmp_path)
    built: list[type] = []
    original = FunnelBaseModel.__init__

    def counted(self: Any, config: Any) -> None:
        built.append(type(self))
        original(self, config)

    monkeypatch.setattr(FunnelBaseModel, "__init__", counted)
    model = on_fake(AutoModel, tmp_path)
    assert type(model) is FunnelBaseModel
    assert built == [FunnelBaseModel]


def test_a_config_that_an_auto_class_does_not_know(checkpoint: Callable[[str], Path]) -> None:
    """One sentence names both."""
    with pytest.raises(weightload.UsageError, match="Seq2SeqLM has no class for LlamaConfig"):
        on_fake(AutoModelForSeq2SeqLM, checkpoint("llama"))


def test_a_state_dict_of_none_is_none_given(checkpoint: Callable[[str], Path]) -> None:
    """As for from_pretrained, where None is the default."""
    model = on_fake(AutoModel, checkpoint("bert"), state_dict=None)
    assert model.weightload_report.how == "fast"


def test_missing_and_unexpected_are_errors_unless_allowed(
    checkpoint: Callable[[str], Path],
) -> None:
    """Each is named; what is allowed by name is in the report."""
    folder = checkpoint("bert")
    with pytest.raises(weightload.ModelError, match=r"lacks .*cls.predictions"):
        on_fake(BertForMaskedLM, folder)
    with pytest.raises(weightload.ModelError, match=r"no use for .*pooler"):
        on_fake(BertForMaskedLM, folder, allow=["cls.*"])
    model = on_fake(BertForMaskedLM, folder, allow=["cls.*", "*pooler*"])
    assert all(name.startswith("cls.") for name in model.weightload_report.missing)
    assert len(model.weightload_report.unexpected) == 2


def test_a_tensor_that_is_left_out_is_missing(checkpoint: Callable[[str], Path]) -> None:
    """One norm that no shard holds is an error, and not a random weight."""
    folder = checkpoint("nemotron")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(weightload.ModelError, match=r"lacks model.norm.weight, which would be"):
        on_fake(AutoModelForCausalLM, folder)


def test_another_shape_is_an_error_unless_allowed(checkpoint: Callable[[str], Path]) -> None:
    """ignore_mismatched_sizes lets from_pretrained go on; the name must be allowed as well."""
    folder = checkpoint("bert")
    tensors = load_file(folder / "model.safetensors")
    tensors["pooler.dense.bias"] = torch.zeros(5)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(weightload.ModelError, match=r"pooler.dense.bias have other shapes"):
        on_fake(AutoModel, folder, ignore_mismatched_sizes=True)
    model = on_fake(AutoModel, folder, ignore_mismatched_sizes=True, allow=["pooler.*"])
    assert model.weightload_report.mismatched == ("pooler.dense.bias",)


class _InitialisesAgain(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A class whose own code makes a weight random after it was loaded."""

    def tie_weights(self, *arguments: Any, **keywords: Any) -> Any:
        """Tie, and spoil one weight past its version counter."""
        result = super().tie_weights(*arguments, **keywords)
        weight = self.model.layers[1].mlp.up_proj.weight
        if not weight.is_meta:
            weight.data.normal_(0.0, 0.02)
        return result


def test_weights_that_are_made_random_again_are_seen(checkpoint: Callable[[str], Path]) -> None:
    """from_pretrained says nothing of it; here the tensor is named, and no other."""
    folder = checkpoint("llama")
    spoilt: Any = _InitialisesAgain
    _, info = spoilt.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    named = r"^model.layers.1.mlp.up_proj.weight were written again after they were loaded"
    with pytest.raises(weightload.ModelError, match=named):
        on_fake(_InitialisesAgain, folder)


class _TiesWrongly(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A class that ties a weight to another tensor than the one that is stored for it."""

    def tie_weights(self, *arguments: Any, **keywords: Any) -> Any:
        """Tie the head to the embedding, whatever the config says."""
        result = super().tie_weights(*arguments, **keywords)
        self.lm_head.weight = self.model.embed_tokens.weight
        return result


def test_a_weight_that_is_another_tensor_is_seen(checkpoint: Callable[[str], Path]) -> None:
    """A head that is stored and yet tied to the embedding is named."""
    folder = checkpoint("llama")
    with pytest.raises(weightload.ModelError, match=r"^lm_head.weight are not what"):
        on_fake(_TiesWrongly, folder)
    model = on_fake(_TiesWrongly, folder, allow=["lm_head.weight"])
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_t5_without_a_shared_embedding_keeps_head_and_embedding_apart(
    checkpoint: Callable[[str], Path],
) -> None:
    """The stored encoder embedding is the model's, and the head is its own tensor."""
    folder = checkpoint("t5 untied")
    tensors = load_file(folder / "model.safetensors")
    assert "shared.weight" not in tensors
    assert not torch.equal(tensors["lm_head.weight"], tensors["encoder.embed_tokens.weight"])
    model = on_fake(AutoModelForSeq2SeqLM, folder)
    assert torch.equal(model.encoder.embed_tokens.weight, tensors["encoder.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])


def test_pickles_are_refused_with_what_to_do(checkpoint: Callable[[str], Path]) -> None:
    """The pickle is named, and so is the way out."""
    folder = checkpoint("bert")
    torch.save({}, folder / "pytorch_model.bin")
    on_fake(AutoModel, folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(weightload.CheckpointError, match=r"pytorch_model.bin.*save_pretrained"):
        on_fake(AutoModel, folder)
    with pytest.raises(weightload.UsageError, match="safetensors only"):
        on_fake(AutoModel, folder, use_safetensors=False)


def test_loads_in_several_threads_are_from_pretrained_s(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Models of two dtypes, one with ties, loaded at once many times; torch is as it was."""
    root = tmp_path_factory.getbasetemp() / "families"
    folders = [written(root, name) for name in ("qwen2 tied", "qwen2 untied", "llama")]
    expected = [AutoModelForCausalLM.from_pretrained(each) for each in folders]

    def differing(number: int) -> list[str]:
        model = on_fake(AutoModelForCausalLM, folders[number % 3])
        return differences(model, expected[number % 3])

    with ThreadPoolExecutor(3) as pool:
        assert set(map(tuple, pool.map(differing, range(18)))) == {()}
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": -1},
        {"threads": "2"},
        {"progress": 5},
        {"system": 3},
        {"allow": None},
        {"allow": [1]},
        {"path": None},
        {"path": b"x"},
        {"path": "a\0b"},
    ],
    ids=str,
)
def test_arguments_are_looked_at_before_anything_is_built(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    """Each slip is one sentence that names it, and no model was made for it."""
    arguments: dict[str, Any] = {"path": checkpoint("bert")} | wrong
    monkeypatch.delattr(BertModel, "__init__")
    (name,) = wrong
    with pytest.raises(weightload.UsageError, match=name):
        on_fake(AutoModel, **arguments)


def test_names_that_the_caller_exchanged_are_no_fault(checkpoint: Callable[[str], Path]) -> None:
    """With a `key_mapping` of the caller's, a weight of a tensor's name may be another's."""
    folder = checkpoint("llama")
    mapping = {"gate_proj": "held", "up_proj": "gate_proj", "held": "up_proj"}
    expected = AutoModelForCausalLM.from_pretrained(folder, key_mapping=mapping)
    assert differences(on_fake(AutoModelForCausalLM, folder, key_mapping=mapping), expected) == []


def test_an_adapter_by_itself_falls_back(tmp_path: Path) -> None:
    """Without a config or weights of a model beside it, from_pretrained is asked as well."""
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.warns(weightload.FallbackWarning, match="adapter"), pytest.raises(ValueError):  # noqa: PT011 - transformers' own, of whatever sentence
        on_fake(AutoModelForCausalLM, tmp_path)


def test_a_model_loaded_in_inference_mode_can_be_trained(
    checkpoint: Callable[[str], Path],
) -> None:
    """Its weights are ordinary tensors, as from_pretrained's are there."""
    folder = checkpoint("llama")
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(folder)
        model = on_fake(AutoModelForCausalLM, folder)
    assert [each.is_inference() for each in model.parameters()] == [
        each.is_inference() for each in expected.parameters()
    ]


def test_tokens_are_as_many_as_asked_for(checkpoint: Callable[[str], Path]) -> None:
    """None of the prompt's among them; a generation config that ends them is named."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"))
    expected = weightload.greedy_tokens(model, [5, 9], 4)
    model.generation_config.return_dict_in_generate = True
    assert weightload.greedy_tokens(model, [5, 9], 4) == expected
    model.generation_config.max_time = 0.0
    with pytest.raises(weightload.UsageError, match=r"1 of 4 tokens were served.*max_time"):
        weightload.greedy_tokens(model, [5, 9], 4)


def test_the_last_token_is_the_model_s_own() -> None:
    """A config that forces it, as BART's does, would hide what the weights say."""
    config = BartConfig(
        vocab_size=96,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=64,
    )
    torch.manual_seed(3)
    model: Any = BartForConditionalGeneration(config)
    model.eval()
    assert model.generation_config.forced_eos_token_id == 2
    served = weightload.greedy_tokens(model, [5, 9, 31], 4)
    assert served[:2] == weightload.greedy_tokens(model, [5, 9, 31], 2)
    assert 2 not in served


def test_bad_arguments_are_one_sentence(checkpoint: Callable[[str], Path]) -> None:
    """A class, a path, a list and a route that are none."""
    folder = checkpoint("bert")
    with pytest.raises(weightload.UsageError, match="no model class"):
        on_fake(torch.nn.Linear, folder)
    with pytest.raises(weightload.UsageError, match=r"write \['cls"):
        on_fake(AutoModel, folder, allow="cls.*")
    with pytest.raises(weightload.UsageError, match="not a route"):
        on_fake(AutoModel, folder, route="fast")
    with pytest.raises(weightload.UsageError, match="is a file"):
        on_fake(AutoModel, folder / "model.safetensors")
    with pytest.raises(weightload.UsageError, match="neither a folder here nor a repository"):
        on_fake(AutoModel, folder / "absent" / "and" / "more")
    (folder / "model.safetensors").unlink()
    with pytest.raises(weightload.CheckpointError, match=r"holds neither model.safetensors nor"):
        on_fake(AutoModel, folder)


def test_a_broken_file_is_the_loader_s_own_error(checkpoint: Callable[[str], Path]) -> None:
    """A cut shard is not hidden in an error of transformers'."""
    folder = checkpoint("llama")
    shard = min(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(weightload.CheckpointError, match=shard.name):
        on_fake(AutoModelForCausalLM, folder)


def _in_cache(cache: Path, folder: Path, commit: str) -> None:
    """Lay a checkpoint into a hub cache as a download would."""
    repository = cache / "models--org--tiny"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)


def test_a_repository_is_found_in_the_cache_offline(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """An id loads from the hub's cache without a network, and is the model's name."""
    folder, cache = checkpoint("llama"), tmp_path / "hub"
    _in_cache(cache, folder, "c0ffee" + 34 * "0")
    keywords: dict[str, Any] = {"cache_dir": cache, "local_files_only": True}
    expected = AutoModelForCausalLM.from_pretrained("org/tiny", **keywords)
    model = on_fake(AutoModelForCausalLM, "org/tiny", **keywords)
    assert differences(model, expected) == []
    assert model.name_or_path == expected.name_or_path == "org/tiny"
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    with pytest.raises(weightload.UsageError, match="org/other is not in the hub's cache"):
        on_fake(AutoModelForCausalLM, "org/other", **keywords)
    snapshot = cache / "models--org--tiny" / "snapshots" / ("c0ffee" + 34 * "0")
    (snapshot / "model.safetensors.index.json").write_text("{")
    with pytest.raises(weightload.CheckpointError, match="is not a readable index"):
        on_fake(AutoModelForCausalLM, "org/tiny", **keywords)


def test_a_revision_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's answer is one sentence with what to do."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RevisionNotFoundError.__new__(RevisionNotFoundError)

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(weightload.UsageError, match="org/tiny has no revision 'v9'; give"):
        on_fake(AutoModel, "org/tiny", revision="v9")


def test_a_subfolder_is_found(checkpoint: Callable[[str], Path]) -> None:
    """Config, weights and generation config come from the subfolder."""
    folder = checkpoint("llama")
    expected = AutoModelForCausalLM.from_pretrained(folder.parent, subfolder=folder.name)
    model = on_fake(AutoModelForCausalLM, folder.parent, subfolder=folder.name)
    assert differences(model, expected) == []
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


@pytest.mark.parametrize(
    ("keywords", "reason"),
    [
        ({"device_map": "cpu"}, "device_map: the fast route loads onto a CUDA device, not onto c"),
        ({"device_map": {"": "cpu"}}, "device_map: the fast route loads onto a CUDA device"),
        ({"device_map": "auto"}, "device_map: the weights are spread"),
        ({"device_map": {"model": 0, "lm_head": "cpu"}}, "device_map: the weights are spread"),
        ({"offload_folder": "x"}, "offload_folder: weights are offloaded"),
        ({"target_lang": "fra"}, "target_lang: an adapter is found by the model's own code"),
    ],
)
def test_what_falls_back_says_so(
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    keywords: dict[str, Any],
    reason: str,
) -> None:
    """from_pretrained is given everything that the caller gave, and a warning names why."""
    folder = checkpoint("llama")
    given: dict[str, Any] = {}
    original = LlamaForCausalLM.from_pretrained

    def noted(path: Any, **rest: Any) -> Any:
        given.update(rest)
        return original(path, dtype=rest["dtype"], output_loading_info=True)

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", noted)
    with pytest.warns(weightload.FallbackWarning, match="not the fast route"):
        model = on_fake(LlamaForCausalLM, folder, **keywords)
    assert given.items() >= keywords.items()
    report = model.weightload_report
    assert (report.how, report.load, report.zero_copy) == ("from_pretrained", None, 0)
    assert report.reason.startswith(reason)
    assert differences(model, original(folder)) == []


def test_adapters_and_quantised_checkpoints_fall_back(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder and the config say so, not only the keywords."""
    folder = checkpoint("bert")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.warns(weightload.FallbackWarning, match=r"adapter_config.json"):
        model = on_fake(AutoModel, folder)
    assert differences(model, AutoModel.from_pretrained(folder)) == []
    (folder / "adapter_config.json").unlink()
    change_config(folder, quantization_config={"quant_method": "bitsandbytes"})
    plain = AutoModel.from_config(FAMILIES["bert"].built_config())  # type: ignore[no-untyped-call]
    monkeypatch.setattr(
        AutoModel, "from_pretrained", lambda *_, **__: (plain, dict.fromkeys(_INFO, ()))
    )
    with pytest.warns(weightload.FallbackWarning, match="quantised by bitsandbytes"):
        model = on_fake(AutoModel, folder)
    assert model is plain


_INFO = ("missing_keys", "unexpected_keys", "mismatched_keys")


def test_a_fall_back_is_checked_too(checkpoint: Callable[[str], Path]) -> None:
    """A weight that from_pretrained made random is an error on this way as well."""
    folder = checkpoint("bert")
    (folder / "adapter_config.json").write_text("{}")
    with (
        pytest.warns(weightload.FallbackWarning),
        pytest.raises(weightload.ModelError, match=r"lacks classifier.bias"),
    ):
        on_fake(AutoModelForSequenceClassification, folder)


@pytest.mark.parametrize("spoken", ["cuda:0", 0, torch.device("cuda", 0), {"": "cuda:0"}, None])
def test_one_device_may_be_spoken_as_device_map(
    checkpoint: Callable[[str], Path], spoken: Any
) -> None:
    """One CUDA device in device_map is the device."""
    model = on_fake(AutoModel, checkpoint("bert"), device_map=spoken)
    assert model.weightload_report.how == "fast"


def test_the_report_is_data_that_json_can_hold(checkpoint: Callable[[str], Path]) -> None:
    """Routes, phases and counts, for logs."""
    model = on_fake(AutoModel, checkpoint("bert"), route="buffered")
    data = json.loads(json.dumps(model.weightload_report.to_dict()))
    assert data["load"]["route_bytes"] == {"buffered": data["load"]["wanted_bytes"]}
    assert data["phases_s"]["total"] >= data["phases_s"]["upload"] > 0
    assert data["family"] == "bert"


def test_read_ahead_is_off_for_every_family_without_a_receipt() -> None:
    """No family has a receipt from a GB10, so every number is 0, and so is an unknown one's."""
    assert set(READ_AHEAD_LAYERS.values()) == {0}
    assert read_ahead_layers("a family of tomorrow") == 0


def test_read_ahead_takes_the_family_s_number(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table decides unless the caller does."""
    folder = checkpoint("llama")
    assert on_fake(AutoModelForCausalLM, folder).weightload_report.load.read_ahead_bytes == 0
    monkeypatch.setitem(READ_AHEAD_LAYERS, "llama", 2)
    assert on_fake(AutoModelForCausalLM, folder).weightload_report.load.read_ahead_bytes > 0
    off = on_fake(AutoModelForCausalLM, folder, read_ahead=0)
    assert off.weightload_report.load.read_ahead_bytes == 0


class _Parts(torch.nn.Module):
    """A module with everything that a move can get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(700, 900)
        self.again = torch.nn.Linear(700, 900)
        self.again.weight = self.first.weight
        base = torch.randn(50, 60, dtype=torch.float64)
        self.turned = torch.nn.Parameter(base.t())
        self.register_buffer("window", base[3:7, 2:9])
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("hidden", torch.arange(7)[1:], persistent=False)
        self.register_buffer("odd", torch.arange(11, dtype=torch.uint8)[3:])
        self.register_buffer("short", torch.randn(33).to(torch.bfloat16)[1:])
        self.norm = torch.nn.BatchNorm1d(4)
        self.unit = torch.nn.GRU(3, 4)


def moved(model: torch.nn.Module) -> Any:
    """`move_model` through a fake device, whose hazards and leaks are errors."""
    with FakeCuda() as fake:
        return weightload.move_model(model, driver=fake)


def test_a_moved_model_is_the_same_in_another_place() -> None:
    """Bytes, strides, objects, ties and shared storages stay; every address is new."""
    model: Any = _Parts()
    model.first.weight.grad = torch.randn_like(model.first.weight)
    gradient = model.first.weight.grad
    before = {name: (each, each.clone()) for name, each in tensors_of(model).items()}
    places = {name: each.data_ptr() for name, each in tensors_of(model).items()}
    expected_gradient = gradient.clone()
    assert moved(model) is model
    for name, tensor in tensors_of(model).items():
        original, content = before[name]
        assert tensor is original, name
        assert torch.equal(tensor, content), name
        assert tensor.stride() == content.stride() or not tensor.is_contiguous(), name
        assert tensor.data_ptr() != places[name] or not tensor.numel(), name
    assert model.again.weight is model.first.weight
    assert model.turned.untyped_storage().data_ptr() == model.window.untyped_storage().data_ptr()
    assert model.first.weight.grad is gradient
    assert torch.equal(gradient, expected_gradient)
    with torch.no_grad():
        model.turned[2, 3] = 7.5
    assert model.window[0, 0] == 7.5


def test_a_move_is_counted_as_its_own_route() -> None:
    """Every storage once: shared bytes are not brought twice, and no file is read."""
    model = _Parts()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in tensors_of(model).values()
        if each.numel()
    }
    report = moved(model).weightload_report
    assert set(report.load.route_bytes) == {"host"}
    brought = report.load.route_bytes["host"]
    assert sum(storages.values()) - 64 * len(storages) <= brought <= sum(storages.values())
    assert (report.load.reads, report.load.read_bytes) == (0, 0)
    assert report.zero_copy == report.weights
    assert report.load.pinned_bytes <= 64 << 20


def test_a_model_of_transformers_moves_with_its_ties(checkpoint: Callable[[str], Path]) -> None:
    """A tied model's tokens are the same after a move."""
    folder = checkpoint("qwen2 tied")
    expected = AutoModelForCausalLM.from_pretrained(folder)
    model = moved(AutoModelForCausalLM.from_pretrained(folder))
    assert differences(model, expected) == []
    assert model.lm_head.weight is model.model.embed_tokens.weight
    prompt = [3, 5, 8]
    assert weightload.greedy_tokens(model, prompt, 6) == weightload.greedy_tokens(
        expected, prompt, 6
    )


def test_outputs_are_computed_without_cudnn_s_attention(
    checkpoint: Callable[[str], Path],
) -> None:
    """Neither tokens nor outputs come from it, and the caller's choice is as it was."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2 tied"))
    chosen: list[bool] = []
    hook = model.register_forward_pre_hook(
        lambda *_: chosen.append(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]
    )
    weightload.greedy_tokens(model, [3, 5, 8], 1)
    weightload.own_outputs(model, {"input_ids": torch.tensor([[3, 5, 8]])})
    hook.remove()
    assert chosen == [False, False]
    assert torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]


def test_a_model_without_data_is_refused_and_left_alone() -> None:
    """Meta tensors are named; nothing was moved."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    place = model[0].weight.data_ptr()
    with pytest.raises(weightload.UsageError, match=r"1.weight has no data.*1 more"):
        moved(model)
    assert model[0].weight.data_ptr() == place


def test_what_is_no_plain_bytes_is_moved_by_the_module_and_reported() -> None:
    """A sparse buffer does not go through the ring; the report says so on a real move."""
    model: Any = torch.nn.Linear(4, 4)
    model.register_buffer("sparse", torch.eye(4).to_sparse())
    report = moved(model).weightload_report
    assert torch.equal(model.sparse.to_dense(), torch.eye(4))
    assert report.load.route_bytes == {"host": 4 * 4 * 4 + 4 * 4}


@pytest.mark.parametrize(
    "wrong", [{"threads": -1}, {"threads": "2"}, {"progress": 3}, {"system": 4}], ids=str
)
def test_a_move_looks_at_its_arguments(wrong: dict[str, Any]) -> None:
    """Each slip is one sentence that names it, and the module is as it was."""
    model = torch.nn.Linear(3, 3)
    before = model.weight.clone()
    (name,) = wrong
    with FakeCuda() as fake, pytest.raises(weightload.UsageError, match=name):
        weightload.move_model(model, driver=fake, **wrong)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("left_bytes", [0, 8])
def test_a_module_that_lost_its_data_is_refused(left_bytes: int) -> None:
    """What sharding has given back is not read, as that would be somebody else's memory."""
    model = torch.nn.Linear(64, 64)
    model.weight.untyped_storage().resize_(left_bytes)
    with pytest.raises(weightload.UsageError, match="weight has lost its data"):
        moved(model)


def test_a_module_that_refuses_to_move_is_as_it_was() -> None:
    """Models of some backends raise in their own `to`; no weight is elsewhere then."""

    class Stays(torch.nn.Linear):
        def to(self, *_: Any, **__: Any) -> Any:
            raise ValueError("it stays")

    model = Stays(3, 3)
    places = {name: each.data_ptr() for name, each in tensors_of(model).items()}
    with pytest.raises(ValueError, match="it stays"):
        moved(model)
    assert places == {name: each.data_ptr() for name, each in tensors_of(model).items()}


class _Extra(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state


def test_what_is_no_tensor_or_not_shaped_yet_does_not_stop_a_move() -> None:
    """State of a module's own and lazy parameters are left to the module."""
    model = moved(torch.nn.Sequential(_Extra(2, 2), torch.nn.LazyLinear(3)))
    assert model.weightload_report.zero_copy == 2


def test_what_fails_after_the_move_leaves_the_model_as_it_was() -> None:
    """Buffers that the module's own `to` replaced are its old ones again, and so are weights."""
    model: Any = _Parts()
    places = {name: each.data_ptr() for name, each in tensors_of(model).items()}
    sparse = torch.eye(4).to_sparse()
    model.register_buffer("sparse", sparse)
    replaced = model.to

    def fails(*given: Any, **more: Any) -> None:
        replaced(*given, **more)
        model.sparse = model.sparse.clone()
        raise KeyboardInterrupt

    model.to = fails
    with pytest.raises(KeyboardInterrupt):
        moved(model)
    assert model.sparse is sparse
    assert places == {name: tensors_of(model)[name].data_ptr() for name in places}


@pytest.mark.parametrize("wrong", [None, "x", torch.nn.Linear], ids=str)
def test_what_is_no_module_is_not_moved(wrong: Any) -> None:
    """It is one sentence that shows what was given."""
    with pytest.raises(weightload.UsageError, match="is no module of torch"):
        moved(wrong)


def test_a_module_without_tensors_moves() -> None:
    """Nothing to bring is no error."""
    assert moved(torch.nn.ReLU()).weightload_report.load.wanted_bytes == 0


def test_a_failed_move_leaves_the_model_as_it_was() -> None:
    """A copy that fails half-way is an error, and every tensor still has its own bytes.

    The slot of the failed copy stays reserved on purpose.
    """
    model = _Parts()
    places = {name: each.data_ptr() for name, each in tensors_of(model).items()}
    fake = FakeCuda()
    fake.faults.fail("cuMemcpyHtoDAsync", nth=2)
    with pytest.raises(weightload.DriverError, match="cuMemcpyHtoDAsync"):
        weightload.move_model(model, driver=fake)
    fake.close(check=False)
    assert {hazard.id for hazard in fake.hazards} <= {"LEAK-AT-CLOSE"}
    assert places == {name: each.data_ptr() for name, each in tensors_of(model).items()}


def test_a_weight_that_may_be_random_is_drawn_as_from_pretrained_draws_it(
    checkpoint: Callable[[str], Path],
) -> None:
    """With one seed, what the checkpoint lacks is bit for bit the same."""
    folder = checkpoint("bert")
    torch.manual_seed(7)
    expected = BertForMaskedLM.from_pretrained(folder)
    torch.manual_seed(7)
    model = on_fake(BertForMaskedLM, folder, allow=["cls.*", "*pooler*"])
    assert "cls.predictions.transform.dense.weight" in model.weightload_report.missing
    assert differences(model, expected) == []


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    """It is refused by name, and made anew where its name is allowed."""
    FAMILIES["llama"].write(tmp_path)
    path = next(
        each for each in tmp_path.glob("*.safetensors") if "model.norm.weight" in load_file(each)
    )
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(3, dtype=tensors["model.norm.weight"].dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    with FakeCuda() as fake:
        with pytest.raises(weightload.ModelError, match=r"model\.norm\.weight have other shapes"):
            weightload.load_model(AutoModelForCausalLM, tmp_path, driver=fake)
        model = weightload.load_model(
            AutoModelForCausalLM, tmp_path, driver=fake, allow=["model.norm.weight"]
        )
    assert model.weightload_report.mismatched == ("model.norm.weight",)


def test_a_model_without_a_gpu_is_one_sentence(tmp_path: Path) -> None:
    """Where there is no device, nothing is built for it, and no thread complains beside."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    FAMILIES["llama"].write(tmp_path)
    with pytest.raises(weightload.DeviceError):
        weightload.load_model(AutoModelForCausalLM, tmp_path)
    with pytest.warns(weightload.FallbackWarning), pytest.raises(weightload.DeviceError):
        weightload.load_model(_Hooked, tmp_path, device_map=None)
