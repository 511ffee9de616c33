"""Samples on the CPU: a tensor that is written again is named, and no other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightload.models.samples import Samples

SIZES = st.one_of(st.integers(0, 3000), st.sampled_from((70_001, 3 << 20)))
WIDE = (torch.float32, torch.float64, torch.int64, torch.complex64)


@given(sizes=st.lists(SIZES, min_size=1, max_size=6), data=st.data())
def test_a_tensor_written_again_is_named_and_no_other(
    sizes: list[int], data: st.DataObject
) -> None:
    """Whatever the tensors' lengths, and whether or not they lie in one storage."""
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    slab = torch.arange(sum(sizes), dtype=torch.int64).to(torch.uint8)
    tensors = {
        str(place): slab[start : start + size]
        for place, (start, size) in enumerate(zip(starts, sizes, strict=True))
    }
    samples = Samples(tensors)
    assert samples.changed() == []
    written = data.draw(st.sampled_from(sorted(tensors)))
    tensors[written].copy_(255 - tensors[written])
    assert samples.changed() == ([written] if tensors[written].numel() else [])


@given(size=st.integers(1, 70_000), data=st.data())
def test_a_stretch_written_again_is_seen(size: int, data: st.DataObject) -> None:
    """A 63rd of a tensor, and a few bytes more, cannot lie between two pieces or after all."""
    tensor = torch.zeros(size, dtype=torch.uint8)
    samples = Samples({"it": tensor})
    stretch = min(size, size // 63 + 48)
    start = data.draw(st.integers(0, size - stretch))
    tensor[start : start + stretch] = 1
    assert samples.changed() == ["it"]


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("elements", [1, 64, 128, 4096, 100_003])
def test_every_part_of_an_element_counts(dtype: torch.dtype, elements: int) -> None:
    """Bytes that only one half of each element has are among the samples."""
    tensor = torch.zeros(elements, dtype=dtype)
    for byte in range(tensor.element_size()):
        samples = Samples({"it": tensor})
        tensor.view(torch.uint8)[byte :: tensor.element_size()] += 1
        assert samples.changed() == ["it"]


def test_pieces_lie_all_over_a_large_tensor() -> None:
    """A row in its middle that is written again is seen, as one of padding would be."""
    weight = torch.ones(1000, 16_384, dtype=torch.bfloat16)
    samples = Samples({"embedding": weight})
    weight[501].zero_()
    assert samples.changed() == ["embedding"]


@pytest.mark.parametrize("columns", [20, 100, 164, 410, 1024, 4096])
def test_pieces_lie_in_every_part_of_a_row(columns: int) -> None:
    """Rows of a usual length are not met at the same few columns all the way down."""
    weight = torch.zeros((96 << 20) // (4 * columns), columns)
    samples = Samples({"it": weight})
    weight[:, columns // 2 : columns // 2 + 4] = 1
    assert samples.changed() == ["it"]


def test_no_tensors_have_no_samples() -> None:
    """Nothing to look at has not changed."""
    assert Samples({}).changed() == []
