"""One program on the fake and on hardware: the same calls, the same bytes."""

import importlib
from typing import Any

import pytest

from fakecuda import FakeCuda, Recorder, compare
from tests.fakecuda.programs import pattern, ring_load

_DATA = pattern(1_000_003)


def _fake() -> FakeCuda:
    with FakeCuda() as cu:
        assert ring_load(cu, _DATA, chunk=300_000, slots=2) == _DATA
    return cu


@pytest.mark.cuda
def test_hardware_is_asked_the_same() -> None:
    """A recorder around the real driver writes the calls that the fake writes."""
    driver: Any = importlib.import_module("cuda.bindings.driver")
    recorder = Recorder(driver)
    assert ring_load(recorder, _DATA, chunk=300_000, slots=2) == _DATA
    assert compare(recorder.journal, _fake().journal) == []


def test_a_recorded_fake_is_asked_the_same() -> None:
    """The comparison itself holds where both sides are fakes."""
    with FakeCuda() as cu:
        recorder = Recorder(cu)
        assert ring_load(recorder, _DATA, chunk=300_000, slots=2) == _DATA
    assert compare(recorder.journal, _fake().journal) == []
