"""Memory peaks, seen from outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadproof.measure import memory
from loadproof.measure.leg import run_leg
from loadproof.measure.memory import MemorySampler, read_fields
from loadproof.measure.messages import Result

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from loadproof.measure.messages import Request

MIB = 1 << 20


def test_a_spike_of_300_ms_is_seen(stub: Callable[..., Request]) -> None:
    """96 MiB that are gone before the leg ends are in the peak, as anonymous memory."""
    source = """
        import time
        from weightload import load as _load

        def load(*arguments, **options):
            spike = bytearray(b"x") * (96 << 20)
            time.sleep(0.3)
            del spike
            return _load(*arguments, **options)
        """
    ended = run_leg(stub(source), 60.0)
    assert isinstance(ended.outcome, Result)
    peak = ended.memory.process_anonymous_bytes
    assert peak is not None
    assert 96 * MIB < peak < 160 * MIB
    assert ended.memory.samples > 10
    assert ended.outcome.vm_hwm_bytes is not None
    assert ended.outcome.vm_hwm_bytes > 96 * MIB


def test_a_figure_that_cannot_be_had_is_absent_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without /proc every figure is None, never 0, and each says why."""
    monkeypatch.setattr(memory, "read_fields", lambda _: {})
    sampler = MemorySampler()
    sampler.start(1)
    peaks = sampler.stop()
    figures = [name for name in peaks.__struct_fields__ if name.endswith("_bytes")]
    assert len(figures) == 7
    assert {getattr(peaks, name) for name in figures} == {None}
    assert set(peaks.absent) == set(figures)


def test_fields_are_bytes_and_a_missing_file_is_empty(tmp_path: Path) -> None:
    """KB lines are read as bytes, other lines are left out."""
    (tmp_path / "status").write_text("Name:\tx\nVmRSS:\t  12 kB\nThreads:\t3\n")
    assert read_fields(str(tmp_path / "status")) == {"VmRSS": 12 * 1024}
    assert read_fields(str(tmp_path / "none")) == {}
