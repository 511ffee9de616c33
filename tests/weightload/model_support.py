"""What the tests of whole models share: one written checkpoint per family, and a fake."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

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


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every stored tensor, straight from the files' headers."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        header.pop("__metadata__", None)
        found |= {name: (each["dtype"], tuple(each["shape"])) for name, each in header.items()}
    return found
