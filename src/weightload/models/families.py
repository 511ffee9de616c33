"""Read-ahead per family of models: opt-in until a receipt from a GB10 stands for it.

A family is what its config calls `model_type`. A number other than 0 is set here
together with the receipt that earned it, and then holds for every load of the family
that does not ask for something else.
"""

from __future__ import annotations

# Layers to read ahead. No family has a receipt from a GB10 yet.
READ_AHEAD_LAYERS: dict[str, int] = {
    "bert": 0,
    "gemma3": 0,
    "gemma3_text": 0,
    "glm4_moe": 0,
    "gpt2": 0,
    "llama": 0,
    "mixtral": 0,
    "nemotron": 0,
    "nemotron_h": 0,
    "qwen2": 0,
    "qwen2_vl": 0,
    "qwen3": 0,
    "qwen3_moe": 0,
    "qwen3_next": 0,
    "t5": 0,
}


def read_ahead_layers(family: str) -> int:
    """Layers to read ahead for a family; a family that is not in the table has none."""
    return READ_AHEAD_LAYERS.get(family, 0)
