"""The surface of gb10-load-llm: what is touched, when, and that nothing changes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from weightload import compat
from weightload.host.touch import spanned_bytes


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own setting has no say here."""
    monkeypatch.delenv(compat.TOUCH_VARIABLE, raising=False)


def test_the_signature_is_the_one_that_callers_know() -> None:
    """Names, order and defaults of the arguments are gb10-load-llm's."""
    signature = inspect.signature(compat.move_model_to_cuda)
    defaults = {name: p.default for name, p in list(signature.parameters.items())[1:]}
    assert defaults == {
        "device": "cuda",
        "touch": "auto",
        "synchronize": True,
        "return_touched": False,
    }
    assert inspect.signature(compat.load_model_to_cuda).parameters["touch"].default is True
    assert compat.load_model_to_cuda is compat.from_pretrained_to_cuda


def test_one_read_per_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte of every 4096 that the elements span is read, and no other."""
    read: list[int] = []
    original = torch.Tensor.sum

    def counted(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        read.append(tensor.numel())
        return original(tensor, *rest)

    monkeypatch.setattr(torch.Tensor, "sum", counted)
    compat.touch_tensor_cpu_pages(torch.zeros(10 * 4096 + 1, dtype=torch.uint8))
    compat.touch_tensor_cpu_pages(torch.zeros(100 * 4096, dtype=torch.uint8)[4096:8192])
    assert read == [11, 1]


def test_pages_are_touched_whatever_the_default_device_is() -> None:
    """A tensor on the CPU is read there, under a context of another device too."""
    tensor = torch.ones(3)
    with torch.device("meta"):
        assert compat.touch_tensor_cpu_pages(tensor) == 12


def test_a_view_spans_from_its_first_element_to_its_last() -> None:
    """Offsets and strides are counted in bytes of the storage."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    assert spanned_bytes(base[1:3, 2:5].t()) == (4 * 8, 4 * 17)


def test_shared_empty_and_meta_tensors() -> None:
    """A shared tensor counts once per parameter, as its name says; what has no page is 0."""
    model = torch.nn.Module()
    model.first = torch.nn.Parameter(torch.zeros(5))
    model.again = model.first
    model.register_buffer("empty", torch.zeros(0))
    model.register_buffer("meta", torch.empty(9, device="meta"))
    assert compat.touch_model_cpu_pages(model) == 20


class Mover:
    """A model that notes where it was moved, and has no tensors."""

    def __init__(self) -> None:
        self.moved_to: list[object] = []

    def parameters(self) -> list[torch.Tensor]:
        """None."""
        return []

    def buffers(self) -> list[torch.Tensor]:
        """None."""
        return []

    def to(self, device: object) -> Mover:
        """Note the device."""
        self.moved_to.append(device)
        return self


@pytest.mark.parametrize("touch", [True, False, "auto"])
@pytest.mark.parametrize("variable", [None, "0", " Off ", "1", ""])
def test_modes_and_the_variable(
    monkeypatch: pytest.MonkeyPatch, touch: Any, variable: str | None
) -> None:
    """The variable goes before the argument; auto touches for a GB10 only."""
    touched: list[object] = []

    def note(model: object) -> int:
        touched.append(model)
        return 7

    monkeypatch.setattr(compat, "touch_model_cpu_pages", note)
    monkeypatch.setattr(compat, "is_probable_gb10", lambda: False)
    if variable is not None:
        monkeypatch.setenv(compat.TOUCH_VARIABLE, variable)
    model = Mover()
    moved, touched_bytes = compat.move_model_to_cuda(
        model, touch=touch, synchronize=False, return_touched=True
    )
    wanted = touch is True if variable is None else variable in {"1", ""}
    assert (moved, model.moved_to) == (model, ["cuda"])
    assert (touched, touched_bytes) == (([model], 7) if wanted else ([], 0))


def test_any_other_mode_is_an_error() -> None:
    """A word that is no mode is refused before the model is moved."""
    model = Mover()
    with pytest.raises(ValueError, match="touch must be True, False, or 'auto'"):
        compat.move_model_to_cuda(model, device="cpu", touch="always")  # type: ignore[arg-type]
    assert not model.moved_to
