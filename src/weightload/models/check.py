"""Whether the model's weights are the checkpoint's, as far as that can be seen at no cost.

transformers says which weights it missed and which tensors it did not use. Two faults
have been met with nothing said: weights initialised again after they were placed, and
one tensor tied where another was stored. The first changes samples of the uploaded
bytes; the second leaves a weight elsewhere than its tensor, and only such weights are
compared with the tensor of their name.
"""

from __future__ import annotations

from bisect import bisect_right
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from weightload.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weightload.models.report import ModelReport
    from weightload.models.weights import LazyWeights

_NAMES_SHOWN_MAX = 5


def check_complete(info: Mapping[str, Any], allow: Sequence[str], report: ModelReport) -> None:
    """Check transformers' own account of the load.

    Args:
        info: what `output_loading_info` gives.
        allow: names or shell patterns of weights that may be missing, unexpected or
            mismatched.
        report: what was allowed is noted there.

    Raises:
        ModelError: others are.
    """
    # A mismatched weight is given with both shapes.
    mismatched = [each if isinstance(each, str) else each[0] for each in info["mismatched_keys"]]
    report.missing = tuple(sorted(info["missing_keys"]))
    report.unexpected = tuple(sorted(info["unexpected_keys"]))
    report.mismatched = tuple(sorted(mismatched))
    _refuse(
        _others(report.missing, allow),
        "the checkpoint lacks {names}, which would be random",
    )
    _refuse(
        _others(report.mismatched, allow),
        "{names} have other shapes in the checkpoint, and would be random",
    )
    _refuse(
        _others(report.unexpected, allow),
        "the model has no use for {names} of the checkpoint",
    )


def _others(names: Iterable[str], allow: Sequence[str]) -> list[str]:
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in allow)]


def _refuse(names: Sequence[str], what: str) -> None:
    if names:
        shown = ", ".join(names[:_NAMES_SHOWN_MAX])
        more = len(names) - _NAMES_SHOWN_MAX
        listed = f"{shown} and {more} more" if more > 0 else shown
        raise ModelError(
            f"{what.format(names=listed)}; use the model class that the checkpoint was written "
            f"by, or allow them by name with allow=[...]."
        )


def check_weights(
    model: torch.nn.Module, weights: LazyWeights, allow: Sequence[str], *, renamed: bool
) -> None:
    """Check that no uploaded tensor was written, or stands for another one.

    Args:
        model: the model that was made of the tensors.
        weights: the tensors by their names in the checkpoint, as they were handed over.
        allow: names or shell patterns of weights that may differ.
        renamed: whether the caller gave names another meaning, so that equal ones say nothing.

    Raises:
        ModelError: one was, or does.
    """
    _refuse(
        _others(weights.samples.changed(), allow),
        "{names} were written again after they were loaded",
    )
    placed = {} if renamed else model.state_dict()
    different = [
        name
        for name, tensor in weights.items()
        if name in placed and not _same(placed[name], tensor)
    ]
    _refuse(_others(different, allow), "{names} are not what the checkpoint has by these names")


def _same(weight: torch.Tensor, tensor: torch.Tensor) -> bool:
    if weight.data_ptr() == tensor.data_ptr() or weight.shape != tensor.shape:
        return True
    if tensor.itemsize == 1 and weight.dtype != tensor.dtype:
        # Eight bits are stored beside scales, and what they stand for is worked out.
        return True
    return torch.equal(_raw(weight), _raw(tensor.to(weight.device, weight.dtype)))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, so that a NaN equals itself."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def count_copies(
    model: torch.nn.Module, uploaded: Mapping[str, torch.Tensor], report: ModelReport
) -> None:
    """Count the weights that are strided, and those among them that lie where the upload put them.

    Args:
        model: the model that was made of the tensors.
        uploaded: the tensors.
        report: where to.
    """
    places = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in uploaded.values())
    starts = [start for start, _ in places]
    seen: set[tuple[int, int]] = set()
    for weight in model.state_dict().values():
        # A module may keep other things there, and weights that are yet to be shaped.
        if not isinstance(weight, torch.Tensor) or is_lazy(weight):
            continue
        if weight.layout != torch.strided:
            continue
        place = weight.data_ptr(), weight.nbytes
        if not weight.nbytes or place in seen:
            continue
        seen.add(place)
        report.weights += 1
        report.weight_bytes += weight.nbytes
        found = bisect_right(starts, place[0]) - 1
        if found >= 0 and sum(place) <= sum(places[found]):
            report.zero_copy += 1
            report.zero_copy_bytes += weight.nbytes
