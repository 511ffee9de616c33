"""How fast the loader's own work is: headers, plans, and a whole load on the fake driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import weightload
from fakecuda import FakeCuda
from fixtures.checkpoints import Tensor, decoder, write_checkpoint
from weightload.checkpoint.folder import open_checkpoint
from weightload.plan import plan_layout, plan_spans

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_benchmark.fixture import BenchmarkFixture

TENSORS = 60_000


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One shard of very many tensors, as large mixtures of experts have."""
    folder = tmp_path_factory.mktemp("many")
    names = (f"model.layers.{n % 48}.experts.{n}.weight" for n in range(TENSORS))
    write_checkpoint(folder, [[Tensor(name, "BF16", (8,)) for name in names]], seed=1)
    return folder


def test_headers(benchmark: BenchmarkFixture, many: Path) -> None:
    """60,000 tensors parse in about half a second."""
    files = benchmark(open_checkpoint, many)
    assert len(files.shards[0].header.records) == TENSORS


def test_plans(benchmark: BenchmarkFixture, many: Path) -> None:
    """60,000 tensors are planned and laid out in a fraction of that."""
    with open_checkpoint(many) as files:
        records = files.shards[0].header.records

    def plan() -> int:
        plan_layout([record.nbytes for record in records], 256 << 20)
        return sum(len(span.slices) for span in plan_spans(records, 4 << 20, 4096))

    assert benchmark(plan) >= TENSORS


def test_a_load_on_the_fake(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Some 90 MB through the ring and the fake driver."""
    write_checkpoint(tmp_path, [decoder(6, 768, 3072, 20_000)], seed=1)

    def load() -> int:
        with FakeCuda() as fake, weightload.load(tmp_path, driver=fake) as loaded:
            return loaded.report.wanted_bytes

    assert benchmark(load) > 90e6
