"""What a model serves after a long prompt, on a real device: the same every time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from transformers import AutoModelForCausalLM

from qualification.models_leg import LONG_PROMPT, make_model
from weightload import greedy_tokens, load_model

if TYPE_CHECKING:
    from pathlib import Path

    from loadproof.gate import DeviceClass

_AUTO: Any = AutoModelForCausalLM


@pytest.mark.timeout(240)
def test_a_long_prompt_is_served_the_same_every_time(
    device_class: DeviceClass, tmp_path: Path
) -> None:
    """Twenty servings of one model give the same tokens; with cuDNN's attention some differ."""
    assert device_class
    make_model(tmp_path, layers=25, seed=1)
    model = load_model(_AUTO, tmp_path)
    served = {tuple(greedy_tokens(model, LONG_PROMPT, 8)) for _ in range(20)}
    assert len(served) == 1
