"""What the fast route cannot do, by what the caller, the config or the class asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

# Each makes from_pretrained place, cut or make weights by rules of its own.
_REASONS = {
    "adapter_kwargs": "an adapter is loaded by its own code",
    "device_mesh": "the weights are spread over several devices",
    "distributed_config": "the weights are spread over several devices",
    "gguf_file": "GGUF files are read by their own code",
    "max_memory": "the weights are spread over several devices",
    "offload_buffers": "weights are offloaded",
    "offload_folder": "weights are offloaded",
    "quantization_config": "quantising at load is done by the backend's own code",
    "state_dict": "the weights are the caller's own",
    "target_lang": "an adapter is found by the model's own code",
    "tp_plan": "the weights are spread over several devices",
    "tp_size": "the weights are spread over several devices",
    "variant": "files of a variant are found by from_pretrained",
}
# Checkpoints whose quantised weights are placed like any others.
_PLACED_LIKE_OTHERS = {"fp8"}
# Where transformers puts the code that came with a checkpoint.
_REMOTE_MODULES = "transformers_modules."
_AUTO_MODULES = "transformers.models.auto."
_ACCOUNT = "output_loading_info"
# What device_map may say beside one device; a disk is no device either.
_SPREAD = {"auto", "balanced", "balanced_low_0", "sequential", "disk"}


def why_not_device_map(device_map: Any) -> str:  # noqa: ANN401 - as from_pretrained's
    """Why a `device_map` other than one CUDA device keeps a load off the fast route.

    Args:
        device_map: as from_pretrained's; one device already taken out of its mapping.
    """
    if isinstance(device_map, dict) or str(device_map) in _SPREAD:
        return "device_map: the weights are spread over several devices or offloaded"
    return f"device_map: the fast route loads onto a CUDA device, not onto {device_map}"


def why_not_keywords(keywords: Mapping[str, Any]) -> str:
    """Why these keywords keep a load off the fast route; empty if none does."""
    for name, reason in _REASONS.items():
        if keywords.get(name) is not None:
            return f"{name}: {reason}"
    return ""


def why_not_folder(folder: Path) -> str:
    """Why these files keep a load off the fast route; empty if nothing does.

    Args:
        folder: the model's.
    """
    if (folder / "adapter_config.json").is_file():
        return "adapter_config.json: an adapter is loaded by its own code"
    return ""


def why_not_config(config: Any) -> str:  # noqa: ANN401 - transformers has no types
    """Why this model keeps a load off the fast route; empty if nothing does.

    Args:
        config: the model's.
    """
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = (
            quantised.get("quant_method")
            if isinstance(quantised, dict)
            else getattr(quantised, "quant_method", None)
        )
        method = str(getattr(method, "value", method))
        if method not in _PLACED_LIKE_OTHERS:
            return f"the checkpoint is quantised by {method}, which loads by its own code"
    if getattr(config, "transformers_weights", None):
        return "the config names weights of its own"
    if getattr(type(config), "extra_files", None):
        return "the model has weights in extra files"
    return ""


def why_not_class(found: Any) -> str:  # noqa: ANN401 - transformers has no types
    """Why this class keeps a load off the fast route; empty if nothing does.

    Args:
        found: a model class, or the Auto class that led to it.
    """
    # Code from elsewhere may look for its own files while the model is built, by a name that
    # the fast route cannot give to it that early.
    if any(each.__module__.startswith(_REMOTE_MODULES) for each in found.__mro__):
        return "its code is not transformers' own"
    if any(_own_loaders(found)):
        return f"{found.__name__} has a from_pretrained of its own"
    return ""


def gives_account(found: Any) -> bool:  # noqa: ANN401 - see above
    """Whether a class's from_pretrained can be asked for its account of the load.

    One of a class's own that does not speak of `output_loading_info` takes what it is given
    for a model, and breaks on the pair.

    Args:
        found: as for `why_not_class`.
    """
    codes = [getattr(each, "__code__", None) for each in _own_loaders(found)]
    return all(
        code is not None and _ACCOUNT in (*code.co_consts, *code.co_varnames) for code in codes
    )


def _own_loaders(found: Any) -> Iterator[Any]:  # noqa: ANN401 - see above
    """Every from_pretrained that is not transformers' general one."""
    for each in found.__mro__:
        general = each is PreTrainedModel or each.__module__.startswith(_AUTO_MODULES)
        if not general and "from_pretrained" in vars(each):
            loader = vars(each)["from_pretrained"]
            yield getattr(loader, "__func__", loader)
