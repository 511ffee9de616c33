"""How fast the fake is: schedules a second, and a large load beside a plain one."""

import ctypes
import mmap
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from fakecuda import FakeCuda, every_schedule
from tests.fakecuda.programs import Setup, ok, pattern, ring_load

_SCHEDULES = 1000
_FILE_BYTES = 90 * 1000 * 1000
_SLOT_BYTES, _SLOTS = 4 << 20, 4


def test_a_thousand_schedules(benchmark: BenchmarkFixture) -> None:
    """3 chunks of 4 KiB through 2 slots, a thousand schedules a round."""
    data = pattern(3 * 4096)

    def explore() -> int:
        count = 0
        for choices in islice(every_schedule(), _SCHEDULES):
            with FakeCuda(choices=choices) as cu:
                assert ring_load(cu, data, chunk=4096, slots=2) == data
            count += 1
        return count

    assert benchmark(explore) == _SCHEDULES


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file of 90 MB in the page cache."""
    path = tmp_path_factory.mktemp("speed") / "weights.bin"
    block = pattern(1_000_000)
    with path.open("wb") as file:
        for _ in range(_FILE_BYTES // len(block)):
            file.write(block)
    yield path
    path.unlink()


def test_plain_load(benchmark: BenchmarkFixture, checkpoint: Path) -> None:
    """A plain loop: read into a buffer, copy to new memory; the yardstick."""

    def load() -> None:
        ring = [mmap.mmap(-1, _SLOT_BYTES) for _ in range(_SLOTS)]
        target = mmap.mmap(-1, _FILE_BYTES)
        target.madvise(mmap.MADV_HUGEPAGE)
        base = ctypes.addressof(ctypes.c_char.from_buffer(target))
        with checkpoint.open("rb", buffering=0) as file:
            for index, offset in enumerate(range(0, _FILE_BYTES, _SLOT_BYTES)):
                slot = ring[index % _SLOTS]
                nbytes = min(_SLOT_BYTES, _FILE_BYTES - offset)
                os.preadv(file.fileno(), [memoryview(slot)[:nbytes]], offset)
                source = ctypes.addressof(ctypes.c_char.from_buffer(slot))
                ctypes.memmove(base + offset, source, nbytes)

    benchmark(load)


def test_load_through_the_fake(benchmark: BenchmarkFixture, checkpoint: Path) -> None:
    """The same through the fake: poisoned memory, watched sources, late copies."""

    def load() -> None:
        with FakeCuda() as cu:
            setup = Setup(cu)
            ring = [(setup.pinned(_SLOT_BYTES), setup.event()) for _ in range(_SLOTS)]
            target, stream = setup.device(_FILE_BYTES), setup.stream()
            with checkpoint.open("rb", buffering=0) as file:
                for index, offset in enumerate(range(0, _FILE_BYTES, _SLOT_BYTES)):
                    slot, event = ring[index % _SLOTS]
                    ok(cu.cuEventSynchronize(event))
                    nbytes = min(_SLOT_BYTES, _FILE_BYTES - offset)
                    view = (ctypes.c_char * nbytes).from_address(slot)
                    os.preadv(file.fileno(), [view], offset)
                    ok(cu.cuMemcpyHtoDAsync(target + offset, slot, nbytes, stream))
                    ok(cu.cuEventRecord(event, stream))
            ok(cu.cuStreamSynchronize(stream))
            setup.give_back()

    benchmark(load)
