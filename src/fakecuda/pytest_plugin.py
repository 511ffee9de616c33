"""The fixture `fake_cuda`: a fake driver that fails the test on any hazard or leak.

Nothing loads this by itself: a test asks for it with
`pytest_plugins = ["fakecuda.pytest_plugin"]`, and so never runs on a fake unawares.
The marker `fake_cuda(...)` passes arguments on to `FakeCuda`.
"""

from collections.abc import Generator, Iterator

import pytest

from fakecuda.fake import FakeCuda
from fakecuda.hazards import HazardError


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", "fake_cuda(**arguments): what to make the fixture fake_cuda with"
    )


@pytest.fixture
def fake_cuda(request: pytest.FixtureRequest) -> Iterator[FakeCuda]:
    """A fake CUDA driver for one test; what is left at its end fails the test."""
    marker = request.node.get_closest_marker("fake_cuda")
    cu = FakeCuda(**(marker.kwargs if marker else {}))
    yield cu
    found = len(cu.hazards)
    cu.close(check=False)
    # What the test itself ran into has failed it already.
    if cu.hazards[found:]:
        raise HazardError(cu.hazards[found:])


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Fail a test whose fake has found a hazard, and say how to see it again."""
    cu = pyfuncitem.funcargs.get("fake_cuda")
    if not isinstance(cu, FakeCuda):
        return (yield)
    try:
        result = yield
    except BaseException:
        _say_how_to_repeat(pyfuncitem, cu)
        raise
    if cu.hazards:
        _say_how_to_repeat(pyfuncitem, cu)
        raise HazardError(cu.hazards)
    return result


def _say_how_to_repeat(item: pytest.Function, cu: FakeCuda) -> None:
    item.add_report_section("call", "fakecuda", f"to run it again: {cu.replay}")
