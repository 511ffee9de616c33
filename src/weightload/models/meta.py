"""Initial values of tensors without memory, which nobody computes.

`from_pretrained` builds a model on the meta device, where a tensor has a shape and no
bytes, and torch's layers draw their random initial values there all the same: a third of
the time that building takes, with nothing to show for it. Weights that the checkpoint
lacks get their values later, on the real device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_INITIALISERS = frozenset(
    each
    for each in vars(torch.nn.init).values()
    if getattr(each, "__module__", "") == torch.nn.init.__name__
)


class NoMetaInit(TorchFunctionMode):
    """In its body, `torch.nn.init` leaves meta tensors as they are."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function gives
        """Call the function, or return its tensor as it is."""
        named = kwargs or {}
        if func in _INITIALISERS:
            tensor = args[0] if args else named.get("tensor")
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **named)
