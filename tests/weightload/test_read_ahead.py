"""Reading ahead: bounded in layers and bytes, and nothing at all when it is off."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weightload
from fakecuda import FakeCuda
from fixtures.checkpoints import decoder, in_shards, write_checkpoint
from tests.weightload.support import ScriptedSystem, device_tensors, file_tensors
from weightload.checkpoint.folder import open_checkpoint
from weightload.checkpoint.header import Record
from weightload.host.readahead import ReadAhead
from weightload.layers import layer_intervals

if TYPE_CHECKING:
    from pathlib import Path

SLOT = 1 << 16
READER = "weightload-read-ahead"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of eight layers."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, in_shards(decoder(8, 128, 512, 500), 2), seed=3)
    return folder


class Gated(ScriptedSystem):
    """A Linux that notes what the read-ahead thread reads, and may fail it."""

    def __init__(self, error: OSError | None = None) -> None:
        super().__init__()
        self.ahead: list[tuple[int, int, int]] = []
        self._error = error

    def read(self, descriptor: int, target: memoryview, offset: int) -> int:
        """Note reads of the read-ahead thread."""
        if threading.current_thread().name == READER:
            if self._error is not None:
                raise self._error
            self.ahead.append((descriptor, offset, len(target)))
        return super().read(descriptor, target, offset)


def test_layers_follow_the_names() -> None:
    """Tensors of one number are one layer; what has no number stands between."""
    names = ["embed", "l.0.a", "l.0.b", "l.1.a", "norm", "head"]
    records = [Record(n, "U8", (1,), at, at + 1) for at, n in enumerate(names)]
    found = [(interval.start, interval.end) for interval in layer_intervals([records, records])]
    assert found == [(0, 1), (1, 3), (3, 4), (4, 6)] * 2


@pytest.mark.parametrize("route", ["buffered", "direct", "readonly-map"])
def test_a_load_with_read_ahead_delivers_the_same(model: Path, route: str) -> None:
    """Bytes on the device are the files', by any route."""
    with FakeCuda("gb10") as fake:
        arguments = {"route": route, "slot_bytes": SLOT}
        with weightload.load(model, driver=fake, read_ahead=2, **arguments) as loaded:  # type: ignore[arg-type] # mixed keywords
            assert device_tensors(fake, loaded) == file_tensors(model)


def test_zero_is_nothing(model: Path) -> None:
    """Off is the same calls as unset, no thread, and no read of it."""
    journals = []
    unset: dict[str, Any] = {}
    for keywords in (unset, {"read_ahead": 0}):
        system = Gated()
        fake = FakeCuda()
        with weightload.load(
            model, driver=fake, route="buffered", threads=1, slot_bytes=SLOT, system=system,
            **keywords,
        ) as loaded:  # fmt: skip
            assert loaded.report.read_ahead_bytes == 0
        fake.close()
        assert system.ahead == []
        journals.append(fake.journal.calls())
    assert journals[0] == journals[1]


@given(layers=st.integers(1, 4), share=st.sampled_from([0.3, 1.0, 2.5, 100.0]))
def test_it_never_runs_further_than_allowed(model: Path, layers: int, share: float) -> None:
    """While the upload stands at a layer, what is read stays inside both bounds."""
    system = Gated()
    with open_checkpoint(model) as files:
        intervals = layer_intervals(shard.header.records for shard in files.shards)
        sizes = [interval.end - interval.start for interval in intervals]
        bytes_max = int(share * max(sizes))
        with ReadAhead(system, files.shards, intervals, layers, bytes_max) as ahead:
            for number, interval in enumerate(intervals):
                ahead.advance(files.shards[interval.shard], interval.start)
                allowed = intervals[: number + 1 + layers]
                before = sum(sizes[: number + 1])
                for descriptor, offset, nbytes in list(system.ahead):
                    at = next(
                        position
                        for position, one in enumerate(intervals)
                        if files.shards[one.shard].descriptor == descriptor
                        and one.start <= offset < one.end
                    )
                    assert at < len(allowed)
                    end = sum(sizes[:at]) + offset + nbytes - intervals[at].start
                    assert end - before <= bytes_max


def test_an_error_surfaces_once_and_the_thread_is_gone(model: Path) -> None:
    """EIO while reading ahead is the load's error, and nothing is left running."""
    system = Gated(OSError(errno.EIO, "Input/output error"))
    with FakeCuda() as fake, pytest.raises(weightload.ReadError, match="read ahead"):
        weightload.load(
            model, driver=fake, route="buffered", slot_bytes=SLOT, system=system, read_ahead=2
        )
    assert threading.active_count() == 1


def test_the_loads_own_error_comes_first(model: Path) -> None:
    """When both fail, the upload's error is raised."""
    system = Gated(OSError(errno.EIO, "Input/output error"))
    fake = FakeCuda()
    fake.faults.fail("cuMemcpyHtoDAsync", nth=1)
    with pytest.raises(weightload.DriverError, match="cuMemcpyHtoDAsync"):
        weightload.load(
            model, driver=fake, route="buffered", slot_bytes=SLOT, system=system, read_ahead=2
        )
    assert threading.active_count() == 1


def test_limits_are_measured_with_the_loads_own_ring(model: Path) -> None:
    """The report has the link's and the files' rates, and the fraction that was reached."""
    for route in ("buffered", "direct"):
        with (
            FakeCuda() as fake,
            weightload.load(model, driver=fake, route=route, measure_limits=True) as loaded,
        ):
            limits = loaded.report.limits
            assert set(limits) == {
                "host_to_device_gbs", f"{route}_reads_gbs", "fraction_reached"
            }  # fmt: skip
            assert all(rate > 0 for rate in limits.values())
            assert device_tensors(fake, loaded) == file_tensors(model)
