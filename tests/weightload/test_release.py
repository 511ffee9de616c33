"""Pages are given back late, once, and only those that nobody keeps."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

import weightload
from fakecuda import FakeCuda
from fixtures.checkpoints import Tensor, write_checkpoint
from tests.weightload.support import ScriptedSystem
from weightload.checkpoint.folder import open_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


class NotingSystem(ScriptedSystem):
    """A Linux that notes reads and advice in one list, by inode."""

    def __init__(self) -> None:
        super().__init__(cached_share=1.0)
        self.events: list[tuple[str, int]] = []

    def read(self, descriptor: int, target: memoryview, offset: int) -> int:
        """Note the read."""
        self.events.append(("read", os.fstat(descriptor).st_ino))
        return super().read(descriptor, target, offset)

    def advise_unneeded(self, descriptor: int) -> None:
        """Note the advice."""
        self.events.append(("advice", os.fstat(descriptor).st_ino))
        super().advise_unneeded(descriptor)

    def advised(self) -> list[int]:
        """Inodes that were advised, in order."""
        return [inode for what, inode in self.events if what == "advice"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards of a megabyte each."""
    write_checkpoint(tmp_path, [[Tensor("a", "U8", (MIB,))], [Tensor("b", "U8", (MIB,))]], seed=1)
    return tmp_path


def load(model: Path, profile: str = "h200", **keywords: object) -> weightload.LoadReport:
    """Load on a fake device and let go of the tensors."""
    with FakeCuda(profile) as fake:
        arguments: dict[str, object] = {"driver": fake, "route": "buffered", **keywords}
        with weightload.load(model, **arguments) as loaded:  # type: ignore[arg-type] # mixed keywords
            return loaded.report


def inodes(folder: Path) -> set[int]:
    """Inodes of the shards."""
    return {path.stat().st_ino for path in folder.glob("*.safetensors")}


def test_advice_comes_after_the_last_read(model: Path) -> None:
    """Nothing is advised during the load, and every shard once after it."""
    system = NotingSystem()
    report = load(model, system=system, release=True)
    kinds = [what for what, _ in system.events]
    assert kinds == sorted(kinds, reverse=True)
    assert set(system.advised()) == inodes(model)
    assert len(system.advised()) == 2
    assert report.released is not None
    assert report.released.files == 2


@pytest.mark.parametrize(
    ("profile", "route", "released"),
    [("h200", "buffered", False), ("gb10", "buffered", True), ("gb10", "direct", False)],
)
def test_the_default_releases_on_one_shared_pool(
    model: Path, profile: str, route: str, *, released: bool
) -> None:
    """Only where cached pages take the weights' room, and only pages that the load cached."""
    report = load(model, profile, route=route)
    assert (report.released is not None) == released


def test_a_cached_shard_leaves_the_cache(model: Path) -> None:
    """On the real page cache, resident bytes fall to nothing."""
    for path in model.glob("*.safetensors"):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    report = load(model, "gb10")
    if report.resident_after_bytes is None:
        pytest.fail("cachestat is needed here: run as the files' owner on Linux 6.5 or newer")
    assert report.resident_after_bytes >= 2 * MIB
    assert report.released is not None
    assert report.released.resident_after_bytes == 0


def test_kept_files_keep_their_pages_under_every_name(model: Path, tmp_path: Path) -> None:
    """A file to keep is recognised by inode: through symbolic links and hard links."""
    first, second = sorted(model.glob("*.safetensors"))
    (tmp_path / "table").symlink_to(first)
    system = NotingSystem()
    with weightload.ReleaseQueue(keep=[tmp_path / "table"], system=system) as queue:
        load(model, system=system, release=queue)
    assert system.advised() == [second.stat().st_ino]
    assert queue.released is not None
    assert queue.released.kept == 1
    os.link(second, tmp_path / "alias")
    system = NotingSystem()
    with weightload.ReleaseQueue(keep=[tmp_path / "alias"], system=system) as queue:
        load(model, system=system, release=queue)
    assert system.advised() == [first.stat().st_ino]


def test_advice_hits_the_file_that_was_loaded(model: Path) -> None:
    """A path replaced after the load is not touched: the original descriptor is advised."""
    loaded = inodes(model)
    system = NotingSystem()
    with weightload.ReleaseQueue(system=system) as queue:
        load(model, system=system, release=queue)
        for path in model.glob("*.safetensors"):
            (model / "new").write_bytes(path.read_bytes())
            (model / "new").replace(path)
    assert set(system.advised()) == loaded
    assert not loaded & inodes(model)


def test_every_exchange_comes_before_any_advice(model: Path) -> None:
    """Main model and side models are all ready before the first page is given back."""
    system = NotingSystem()
    exchanges = [
        lambda: system.events.append(("main", 0)),
        lambda: system.events.append(("vision", 0)),
    ]
    with weightload.ReleaseQueue(exchanges=exchanges, system=system) as queue:
        load(model, system=system, release=queue)
        load(model, system=system, release=queue)
    kinds = [what for what, _ in system.events if what != "read"]
    assert kinds == ["main", "vision", "advice", "advice"]


@pytest.mark.parametrize("stage", ["load", "body", "exchange"])
def test_failure_closes_without_advice(model: Path, stage: str) -> None:
    """Wherever it fails, descriptors are closed and no page is given back."""
    system = NotingSystem()

    def ready() -> None:
        raise weightload.RankError("rank 1 failed")

    exchanges = [ready] if stage == "exchange" else []

    def fail() -> None:
        with weightload.ReleaseQueue(exchanges=exchanges, system=system) as queue:
            load(model, system=system, release=queue)
            if stage == "load":
                load(model, system=system, release=queue, only=["absent"])
            if stage == "body":
                raise KeyError(stage)

    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count of names
    with pytest.raises((weightload.RankError, weightload.UsageError, KeyError)):
        fail()
    assert system.advised() == []
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - see above


def test_a_second_release_does_nothing(model: Path) -> None:
    """Releasing twice advises once, and closing afterwards is harmless."""
    system = NotingSystem()
    with open_checkpoint(model) as files:
        queue = weightload.ReleaseQueue(system=system)
        for shard in (*files.shards, *files.shards):
            queue.add(shard)
    assert queue.release() is queue.release()
    queue.close()
    assert len(system.advised()) == 2


def test_a_path_to_keep_must_exist(tmp_path: Path) -> None:
    """A misspelt path would lose its pages: it is an error."""
    with pytest.raises(weightload.UsageError, match="No such file"):
        weightload.ReleaseQueue(keep=[tmp_path / "nowhere"])


def test_a_mapping_is_gone_before_the_advice(model: Path) -> None:
    """Mapped pages cannot be dropped: the mapping routes unmap first."""
    for path in model.glob("*.safetensors"):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    report = load(model, "gb10", route="readonly-map")
    assert report.released is not None
    assert report.released.resident_after_bytes == 0
