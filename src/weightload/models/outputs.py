"""What a model serves: the same weights must give the same tokens.

Greedy decoding has no randomness, so two loads of one checkpoint can be compared token
by token. A model that generates nothing is compared by the outputs of one pass. Attention is
computed without cuDNN, whose sums over a long prompt depend on what ends first: on an H200 a
model of random weights gave three to four different answers to 32,768 tokens in 12 servings,
and one without it (torch 2.11; torch's deterministic mode changes nothing there).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from weightload.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_REPRODUCIBLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def greedy_tokens(
    model: Any,  # noqa: ANN401 - transformers has no types
    prompt_ids: Sequence[int],
    count: int,
) -> list[int]:
    """The tokens that a causal model serves after a prompt, most probable first.

    An end-of-sequence token does not end them, so that the number is always the same.

    Args:
        model: a causal or sequence-to-sequence model of transformers.
        prompt_ids: token ids of one sequence.
        count: new tokens to serve.

    Returns:
        `count` token ids.

    Raises:
        UsageError: the model's generation config ended them early, as `max_time` does.
    """
    prompt = torch.tensor([list(prompt_ids)], device=model.device)
    with torch.inference_mode(), sdpa_kernel(_REPRODUCIBLE):
        served = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            num_beams=1,
            min_new_tokens=count,
            max_new_tokens=count,
            # BART's own config, for one, has the last token be this, whatever the weights.
            forced_eos_token_id=None,
            return_dict_in_generate=False,
        )
    # An encoder's prompt is not among what is served; a decoder begins with a token of its own.
    given = 1 if model.config.is_encoder_decoder else len(prompt_ids)
    tokens: list[int] = served[0, given:][-count:].tolist()
    if len(tokens) < count:
        raise UsageError(
            f"{len(tokens)} of {count} tokens were served; the model's generation_config ends "
            f"them, by max_time for example: set that to None."
        )
    return tokens


def own_outputs(
    model: Any,  # noqa: ANN401 - transformers has no types
    inputs: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The tensors that one pass gives, on the CPU.

    Args:
        model: any model of transformers.
        inputs: what its forward method takes, by name.

    Returns:
        The output's tensors by name; caches and other structures are left out.
    """
    placed = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    with torch.inference_mode(), sdpa_kernel(_REPRODUCIBLE):
        outputs = model(**placed)
    return {
        name: value.cpu() for name, value in outputs.items() if isinstance(value, torch.Tensor)
    }
