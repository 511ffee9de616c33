"""What the tests of whole models share: one written checkpoint per family, and comparing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import transformers

from fakecuda import FakeCuda
from fixtures.models import FAMILIES
from weightload import load_model

if TYPE_CHECKING:
    from pathlib import Path

# A bar for every load in the suite would drown the rest.
transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def written(folder: Path, family: str) -> Path:
    """The family's checkpoint in `folder`, written if it is not there yet."""
    place = folder / family.replace(" ", "-")
    if not place.exists():
        FAMILIES[family].write(place)
    return place


def on_fake(model_class: Any, path: Any, **keywords: Any) -> Any:
    """`load_model` through a fake device, whose hazards and leaks are errors."""
    with FakeCuda() as fake:
        return load_model(model_class, path, driver=fake, **keywords)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by every name that it has."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes, in the order of its elements."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().data)


def differences(model: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    """Names whose dtype, shape or bytes are not the same in both, or that only one has."""
    ours, theirs = tensors_of(model), tensors_of(other)
    return sorted(
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours
        or name not in theirs
        or ours[name].dtype != theirs[name].dtype
        or ours[name].shape != theirs[name].shape
        or raw(ours[name]) != raw(theirs[name])
    )


def ties(model: torch.nn.Module) -> set[tuple[str, ...]]:
    """Groups of names that are one tensor."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors_of(model).items():
        groups.setdefault(id(tensor), []).append(name)
    return {tuple(sorted(names)) for names in groups.values() if len(names) > 1}


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every stored tensor, straight from the files' headers."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        header.pop("__metadata__", None)
        found |= {name: (each["dtype"], tuple(each["shape"])) for name, each in header.items()}
    return found
