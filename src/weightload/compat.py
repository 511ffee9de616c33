"""The names of gb10-load-llm, with the same meaning, for code that already uses them.

Change `import gb10_load_llm` into `from weightload import compat`. Models are loaded on
the CPU, one byte of each of their pages is read, and they are moved: a page that the
CPU has faulted in is quick to copy on a GB10. `weightload.load_model` is faster.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import torch

from weightload.host.touch import touch_model_cpu_pages, touch_tensor_cpu_pages

__all__ = [
    "from_pretrained_to_cuda",
    "is_probable_gb10",
    "load_model_to_cuda",
    "move_model_to_cuda",
    "touch_model_cpu_pages",
    "touch_tensor_cpu_pages",
]

TOUCH_VARIABLE = "GB10_LOAD_LLM_TOUCH"
_OFF = {"0", "false", "no", "off"}
_GB10_NAMES = ("gb10", "dgx spark")

Touch = bool | Literal["auto"]
Device = str | int | torch.device


def is_probable_gb10(device: Device | None = None) -> bool:
    """Whether a CUDA device's name is a GB10's.

    A name can mislead; `weightload.device_profile(device).is_gb10` asks the device's
    attributes instead.

    Args:
        device: None takes the current one; one that torch cannot name counts as device 0.
    """
    if not torch.cuda.is_available():
        return False
    try:
        name = torch.cuda.get_device_name(device)
    except Exception:  # noqa: BLE001 - the answer is a guess, so any refusal gets the same one
        name = torch.cuda.get_device_name(0)
    return any(known in name.lower() for known in _GB10_NAMES)


def _is_cuda(device: Device) -> bool:
    return str(device).startswith("cuda")


def _wants_touch(touch: Touch, device: Device) -> bool:
    override = os.environ.get(TOUCH_VARIABLE)
    if override is not None:
        return override.strip().lower() not in _OFF
    if isinstance(touch, bool):
        return touch
    if touch != "auto":
        # The type is gb10-load-llm's own, which its callers may catch.
        raise ValueError("touch must be True, False, or 'auto'")
    return _is_cuda(device) and is_probable_gb10()


def move_model_to_cuda(
    model: Any,  # noqa: ANN401 - a torch module, or anything with its methods
    *,
    device: Device = "cuda",
    touch: Touch = "auto",
    synchronize: bool = True,
    return_touched: bool = False,
) -> Any:  # noqa: ANN401 - see above
    """Touch a model's pages if asked, then move it with its own `to`.

    Args:
        model: a module on the CPU.
        device: where to; a CPU device is allowed.
        touch: True, False, or `auto`, which touches on a GB10 only. The variable
            GB10_LOAD_LLM_TOUCH goes before it: 0, false, no and off say no, all else yes.
        synchronize: wait for a CUDA device afterwards.
        return_touched: return the logical bytes touched as well.

    Returns:
        What the model's `to` returned, or that and the bytes touched.

    Raises:
        ValueError: `touch` is none of these.
    """
    touched_bytes = touch_model_cpu_pages(model) if _wants_touch(touch, device) else 0
    moved = model.to(device)
    if synchronize and _is_cuda(device):
        torch.cuda.synchronize()
    return (moved, touched_bytes) if return_touched else moved


def from_pretrained_to_cuda(
    model_cls: Any,  # noqa: ANN401 - any class with from_pretrained
    pretrained_model_name_or_path: Any,  # noqa: ANN401 - see above
    *,
    device: Device = "cuda",
    touch: Touch = True,
    synchronize: bool = True,
    return_touched: bool = False,
    **keywords: Any,  # noqa: ANN401 - from_pretrained's own
) -> Any:  # noqa: ANN401 - see above
    """Load by `from_pretrained`, then do as `move_model_to_cuda` does, touching by default.

    Args:
        model_cls: for example `transformers.AutoModelForCausalLM`.
        pretrained_model_name_or_path: its first argument.
        device: as for `move_model_to_cuda`.
        touch: as for `move_model_to_cuda`.
        synchronize: as for `move_model_to_cuda`.
        return_touched: as for `move_model_to_cuda`.
        keywords: `from_pretrained`'s own.

    Returns:
        As `move_model_to_cuda` does.
    """
    model = model_cls.from_pretrained(pretrained_model_name_or_path, **keywords)
    return move_model_to_cuda(
        model,
        device=device,
        touch=touch,
        synchronize=synchronize,
        return_touched=return_touched,
    )


load_model_to_cuda = from_pretrained_to_cuda
