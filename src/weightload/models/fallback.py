"""What the fast route cannot do, by what the caller or the config asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
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
    "tp_plan": "the weights are spread over several devices",
    "tp_size": "the weights are spread over several devices",
    "variant": "files of a variant are found by from_pretrained",
}
# Checkpoints whose quantised weights are placed like any others.
_PLACED_LIKE_OTHERS = {"fp8"}


def why_not_keywords(keywords: Mapping[str, Any]) -> str:
    """Why these keywords keep a load off the fast route; empty if none does."""
    for name, reason in _REASONS.items():
        if keywords.get(name) is not None:
            return f"{name}: {reason}"
    return ""


def why_not_config(config: Any, folder: Path) -> str:  # noqa: ANN401 - transformers has no types
    """Why this model keeps a load off the fast route; empty if nothing does.

    Args:
        config: the model's.
        folder: its files.
    """
    if (folder / "adapter_config.json").is_file():
        return "adapter_config.json: an adapter is loaded by its own code"
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
