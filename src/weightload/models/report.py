"""What happened to a model: how its weights came, and which of them were copied again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from weightload.report import Phases

if TYPE_CHECKING:
    from weightload.report import LoadReport


@dataclass
class ModelReport(Phases):
    """One call of `load_model` or `move_model`, at the model as `weightload_report`.

    Attributes:
        how: `fast`, or `from_pretrained` where the fast route could not be taken.
        reason: why it could not; empty when it was.
        family: the config's `model_type`; empty for a module that has none.
        weights: parameters and persistent buffers, tied ones counted once.
        weight_bytes: their bytes.
        zero_copy: those of them that lie where the upload put them.
        zero_copy_bytes: their bytes.
        missing: weights that the checkpoint lacks, allowed by name.
        unexpected: tensors of the checkpoint that the model has no use for, allowed by name.
        mismatched: weights of another shape than the checkpoint's, allowed by name.
        load: the report of the upload; None where there was none.
    """

    how: Literal["fast", "from_pretrained"] = "fast"
    reason: str = ""
    family: str = ""
    weights: int = 0
    weight_bytes: int = 0
    zero_copy: int = 0
    zero_copy_bytes: int = 0
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[str, ...] = ()
    load: LoadReport | None = None
