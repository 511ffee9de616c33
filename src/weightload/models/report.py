"""What happened to a model: how its weights came, and which of them were copied again."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightload.report import LoadReport


@dataclass
class ModelReport:
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
        phases_s: wall time of each phase; `total` is the whole call.
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
    phases_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body under `name`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.phases_s[name] = self.phases_s.get(name, 0.0) + time.perf_counter() - begun

    def to_dict(self) -> dict[str, Any]:
        """The report as data that JSON can hold."""
        return asdict(self)
