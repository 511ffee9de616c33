"""One table describes the entry points; everything else agrees with it."""

import enum
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest

from fakecuda import FakeCuda, enums
from fakecuda.calls.copies import CopyCalls
from fakecuda.surface import SURFACE, markdown

_HAS_BINDING = importlib.util.find_spec("cuda.bindings") is not None
_PAGE = Path(__file__).parents[2] / "docs" / "driver-surface.md"
_ENUMS = [
    name
    for name, kind in vars(enums).items()
    if inspect.isclass(kind) and issubclass(kind, enum.IntEnum) and kind is not enum.IntEnum
]


@pytest.fixture(scope="module")
def binding() -> Any:
    """The real binding, which imports without a driver; it has wheels for Linux only."""
    if not _HAS_BINDING:
        pytest.skip("cuda-bindings is not installed here")
    return importlib.import_module("cuda.bindings.driver")


def test_the_fake_has_exactly_the_calls_of_the_table() -> None:
    """No entry point without a row, no row without an entry point."""
    calls = {name for name in dir(FakeCuda) if name.startswith("cu") and name[2].isupper()}
    assert set(SURFACE) == calls


@pytest.mark.parametrize("name", SURFACE)
def test_call_exists_in_the_binding(name: str, binding: Any) -> None:
    """The binding has every call of the table, with the same parameters in order."""
    first_line = getattr(binding, name).__doc__.splitlines()[0]
    inside = first_line.partition("(")[2].rpartition(")")[0]
    theirs = [part.split(":")[0].split("=")[0].split()[-1] for part in inside.split(",") if part]
    assert [label for label, _ in SURFACE[name].parameters] == theirs


@pytest.mark.parametrize("name", _ENUMS)
def test_enumeration_equals_the_binding(name: str, binding: Any) -> None:
    """Every member has the binding's name and value."""
    theirs = getattr(binding, name)
    # An older binding may lack the newest members.
    for member in getattr(enums, name):
        assert int(getattr(theirs, member.name, member.value)) == member.value
    assert getattr(FakeCuda, name) is getattr(enums, name)


def test_result_codes_are_complete(binding: Any) -> None:
    """Every result code of the binding is known, so that any can be injected."""
    assert {m.name for m in binding.CUresult} <= {m.name for m in enums.CUresult}


@pytest.mark.parametrize(
    "name", [name for name in dir(FakeCuda) if name.startswith(("CU_MEMHOST", "CU_STREAM_"))]
)
def test_constant_equals_the_binding(name: str, binding: Any) -> None:
    """Constants have the binding's values."""
    assert int(getattr(binding, name)) == getattr(FakeCuda, name)


def test_the_page_is_the_table() -> None:
    """The documentation page is printed from the table."""
    assert markdown() in _PAGE.read_text()


def test_calls_are_documented_by_the_table() -> None:
    """Each entry point's docstring is its row's note."""
    assert SURFACE["cuMemcpyHtoD"].note == CopyCalls.cuMemcpyHtoD.__doc__


def test_buffers_are_refused() -> None:
    """A buffer object instead of an address is a TypeError that says why."""
    with FakeCuda() as cu, pytest.raises(TypeError, match="pass an int, not bytes"):
        cu.cuMemFreeHost(b"buffer")
