"""Reading one byte of every page of tensors that lie in host memory.

A copy from a cold mapping faults its pages one by one inside the driver, which on a
GB10 is many times slower than faulting them here first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE_BYTES = 4096


def touch_tensor_cpu_pages(tensor: torch.Tensor, stride_bytes: int = PAGE_BYTES) -> int:
    """Read one byte of every page that a tensor's elements span; nothing is changed.

    Args:
        tensor: strided; one that is empty or not on the CPU is left alone.
        stride_bytes: distance of the bytes read.

    Returns:
        The tensor's logical bytes, elements times element size, or 0 if it was left alone.
    """
    if tensor.device.type != "cpu" or not tensor.numel():
        return 0
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    first, end = spanned_bytes(tensor)
    whole[first:end][::stride_bytes].sum()
    return tensor.numel() * tensor.element_size()


def spanned_bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage between a tensor's first element and its last one.

    Args:
        tensor: strided, with at least one element.

    Returns:
        The first byte, and the one after the last, from the start of the storage.
    """
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    first, step = int(tensor.storage_offset()), tensor.element_size()
    return first * step, (first + int(reach) + 1) * step


def touch_model_cpu_pages(model: torch.nn.Module, stride_bytes: int = PAGE_BYTES) -> int:
    """Touch every parameter and buffer of a model, without a gradient.

    Args:
        model: the module.
        stride_bytes: distance of the bytes read.

    Returns:
        The logical bytes touched.
    """
    with torch.no_grad():
        return sum(touch_tensor_cpu_pages(each, stride_bytes) for each in _tensors(model))


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
