"""Memory peaks, seen from outside."""

from __future__ import annotations

import mmap
import os
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from fixtures.legs import run
from loadproof.measure import memory
from loadproof.measure.memory import MemorySampler, anonymous_bytes, read_fields
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
    ended = run(stub(source), 60.0)
    assert isinstance(ended.outcome, Result)
    peak = ended.memory.process_anonymous_bytes
    assert peak is not None
    assert 96 * MIB < peak < 160 * MIB
    assert ended.memory.samples > 10
    assert ended.outcome.vm_hwm_bytes is not None
    assert ended.outcome.vm_hwm_bytes > 96 * MIB


def test_another_process_is_watched_from_then_on() -> None:
    """What the first process took is not the second one's peak."""
    ballast = bytearray(b"x") * (96 << 20)
    sampler = MemorySampler()
    sampler.start(os.getpid())
    until(lambda: sampler._peaks.get("process_anonymous_bytes", 0) >= len(ballast))
    with subprocess.Popen(["sleep", "1000"]) as other:  # noqa: S607 - on everybody's PATH
        sampler.turn_to(other.pid)
        until(lambda: sampler._sampled_pid == other.pid and "process_rss_bytes" in sampler._peaks)
        peaks = sampler.stop()
        other.kill()
    assert 0 < (peaks.process_rss_bytes or 0) < 32 * MIB
    assert (peaks.process_anonymous_bytes or 0) < 32 * MIB


def until(true: Callable[[], bool]) -> None:
    """Wait for what the sampler's thread will do."""
    deadline = time.monotonic() + 60.0
    while not true():
        assert time.monotonic() < deadline
        time.sleep(memory.INTERVAL_S)


def test_a_figure_that_cannot_be_had_is_absent_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without /proc every figure is None, never 0, and each says why."""
    monkeypatch.setattr(memory, "read_fields", lambda _: {})
    sampler = MemorySampler()
    sampler.start(1)
    peaks = sampler.stop()
    figures = [name for name in peaks.__struct_fields__ if name.endswith("_bytes")]
    assert len(figures) == 9
    assert {getattr(peaks, name) for name in figures} == {None}
    assert set(peaks.absent) == set(figures)


def test_a_stalled_sampler_records_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that takes long is a gap of that length, not more samples than there were."""
    slow = threading.Event()

    def stall(path: str) -> dict[str, int]:
        if path.endswith("meminfo") and slow.is_set():
            slow.clear()
            threading.Event().wait(0.25)
        return {"MemAvailable": 5, "VmRSS": 1}

    monkeypatch.setattr(memory, "read_fields", stall)
    sampler = MemorySampler()
    slow.set()
    sampler.start(1)
    while slow.is_set():
        pass
    threading.Event().wait(0.4)
    peaks = sampler.stop()
    assert peaks.gaps >= 1
    assert 0.2 < peaks.gap_max_s < 2.0


def test_the_curve_is_thinned_and_keeps_its_span() -> None:
    """However long a leg, its curve has at most 256 points, in order, from start to end."""
    sampler = MemorySampler()
    for _ in range(3000):
        sampler._sample(os.getpid())
    curve = sampler.stop().curve
    assert 64 < len(curve) <= 256
    times = [point.at_s for point in curve]
    assert times == sorted(times)
    assert times[-1] > 0.9 * (time.monotonic() - sampler._begun)


def test_private_pages_that_turned_into_copies_are_seen(tmp_path: Path) -> None:
    """A private mapping that was written to is anonymous memory over the checkpoint's name."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * (4 << 20))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as copied:
        before = anonymous_bytes(os.getpid(), [path.name])
        copied[: 2 << 20] = b"y" * (2 << 20)
        after = anonymous_bytes(os.getpid(), [path.name])
    assert (before, after) == (0, 2 << 20)
    assert anonymous_bytes(os.getpid(), ["other.safetensors"]) == 0


def test_fields_are_bytes_and_a_missing_file_is_empty(tmp_path: Path) -> None:
    """KB lines are read as bytes, other lines are left out."""
    (tmp_path / "status").write_text("Name:\tx\nVmRSS:\t  12 kB\nThreads:\t3\n")
    assert read_fields(str(tmp_path / "status")) == {"VmRSS": 12 * 1024}
    assert read_fields(str(tmp_path / "none")) == {}
