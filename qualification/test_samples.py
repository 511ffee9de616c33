"""The samples that show a weight written again, taken by the copy engine of a real device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from weightload.models.samples import Samples

if TYPE_CHECKING:
    from loadproof.gate import DeviceClass

# Each is a storage of its own but the last two, which share one as tensors of a slab do.
_SIZES = (1, 2, 4, 255, 256, 257, 260, 1024, 1025, 70_001, 3 << 20)
_NAMES = [*(f"of {size}" for size in _SIZES), "first of slab", "last of slab"]


def _tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    alone = {
        f"of {size}": torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        for size in _SIZES
    }
    slab = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda")
    return alone | {"first of slab": slab[:512], "last of slab": slab[512:]}


def test_samples_are_those_of_the_bytes(device_class: DeviceClass) -> None:
    """What the driver brings together are the pieces that torch takes of the same bytes."""
    assert device_class
    tensors = _tensors()
    samples = Samples(tensors)
    on_cpu = Samples({name: tensor.cpu() for name, tensor in tensors.items()})
    assert torch.equal(samples._before, on_cpu._before)  # noqa: SLF001 - what was taken
    assert samples.changed() == []


@pytest.mark.parametrize("name", _NAMES)
def test_a_tensor_written_again_is_named(device_class: DeviceClass, name: str) -> None:
    """New random bytes in one tensor are seen there, on whatever stream they were written."""
    assert device_class
    tensors = _tensors()
    samples = Samples(tensors)
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        tensors[name].copy_(255 - tensors[name])
        assert samples.changed() == [name]


def test_a_thread_that_has_not_used_the_device_takes_samples(device_class: DeviceClass) -> None:
    """Such a thread has no context of its own until one is made current there."""
    assert device_class
    tensors = _tensors()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: Samples(tensors).changed()).result() == []
