"""The set of shards: whole or refused, each file opened once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fixtures.checkpoints import Tensor, write_checkpoint, write_shard
from weightload.checkpoint.folder import INDEX_NAME, open_checkpoint
from weightload.errors import (
    CheckpointError,
    HeaderError,
    ShardChangedError,
    ShardMissingError,
)

A, B, C = (Tensor(name, "F32", (4,)) for name in "abc")
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    """A folder of two shards with an index."""
    write_checkpoint(tmp_path, [[A], [B, C]], seed=1)
    return tmp_path


def open_descriptors() -> int:
    """Descriptors that this process holds."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def rewrite_index(folder: Path, weight_map: dict[str, str]) -> None:
    """Replace the index's map."""
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def refuse(path: Path, error: type[CheckpointError], says: str) -> None:
    """Opening fails with one sentence, and leaves no descriptor open."""
    before = open_descriptors()
    with pytest.raises(error, match=says):
        open_checkpoint(path)
    assert open_descriptors() == before


def test_an_indexed_folder_opens_whole(two_shards: Path) -> None:
    """All tensors, in shard order, and closing gives every descriptor back."""
    before = open_descriptors()
    with open_checkpoint(two_shards) as files:
        assert [record.name for _, record in files.records()] == ["a", "b", "c"]
    assert open_descriptors() == before


def test_numbered_shards_open_without_an_index(two_shards: Path) -> None:
    """The numbering alone says that the set is whole."""
    (two_shards / INDEX_NAME).unlink()
    with open_checkpoint(two_shards) as files:
        assert len(files.shards) == 2


def test_one_file_opens_by_itself(two_shards: Path) -> None:
    """A path to a file loads that file."""
    with open_checkpoint(two_shards / SECOND) as files:
        assert [record.name for _, record in files.records()] == ["b", "c"]


def test_strays_are_named_and_ignored(two_shards: Path) -> None:
    """A safetensors file that the index does not name is not part of the checkpoint."""
    write_shard(two_shards / "consolidated.safetensors", [A], seed=9)
    with open_checkpoint(two_shards) as files:
        assert files.strays == ("consolidated.safetensors",)
        assert len(files.shards) == 2


def test_missing_folder(tmp_path: Path) -> None:
    """A path that leads nowhere."""
    refuse(tmp_path / "nowhere", CheckpointError, "no such file or folder")


def test_folder_without_safetensors(tmp_path: Path) -> None:
    """A folder of something else."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refuse(tmp_path, CheckpointError, "holds no .safetensors file")


def test_absent_shards_are_all_named(two_shards: Path) -> None:
    """The index names files that are not there."""
    for name in (FIRST, SECOND):
        (two_shards / name).unlink()
    refuse(two_shards, ShardMissingError, f"{FIRST}, {SECOND}")


def test_absent_shard_without_an_index(two_shards: Path) -> None:
    """The numbering promises a file that is not there."""
    (two_shards / INDEX_NAME).unlink()
    (two_shards / FIRST).unlink()
    refuse(two_shards, ShardMissingError, FIRST)


def test_index_lists_a_tensor_that_its_shard_lacks(two_shards: Path) -> None:
    """A stale index, one way."""
    rewrite_index(two_shards, {"a": FIRST, "b": SECOND, "c": SECOND, "x": SECOND})
    refuse(two_shards, CheckpointError, "lack: x")


def test_shard_holds_a_tensor_that_the_index_does_not_list(two_shards: Path) -> None:
    """A stale index, the other way."""
    rewrite_index(two_shards, {"a": FIRST, "b": SECOND})
    refuse(two_shards, CheckpointError, "does not list: c")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """With an index and without, a name that means two things is an error."""
    write_checkpoint(tmp_path, [[A, B], [A, C]], seed=1)
    refuse(tmp_path, CheckpointError, "'a' is in")
    (tmp_path / INDEX_NAME).unlink()
    refuse(tmp_path, CheckpointError, "'a' is in both")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not a readable index"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "not a file name"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' occurs twice"),
    ],
)
def test_malformed_index(two_shards: Path, content: str, says: str) -> None:
    """An index is as strict as a header."""
    (two_shards / INDEX_NAME).write_text(content)
    refuse(two_shards, HeaderError, says)


@pytest.mark.parametrize("cut", [1, 15, 16])
def test_truncated_shard(two_shards: Path, cut: int) -> None:
    """A shard shorter than its header promises is refused before any byte is copied."""
    size = (two_shards / SECOND).stat().st_size
    os.truncate(two_shards / SECOND, size - cut)
    refuse(two_shards, HeaderError, "truncated")


def test_links_of_a_hub_cache(two_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Snapshots are links into blobs; two names of one inode are one shard."""
    snapshot = tmp_path_factory.mktemp("snapshot")
    (snapshot / "x.safetensors").symlink_to(two_shards / FIRST)
    (snapshot / "y.safetensors").symlink_to(two_shards / FIRST)
    with open_checkpoint(snapshot) as files:
        assert [shard.name for shard in files.shards] == ["x.safetensors"]


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    """A dangling link and a loop are sentences, not tracebacks."""
    (tmp_path / "model.safetensors").symlink_to("gone")
    refuse(tmp_path, CheckpointError, "no such file")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("model.safetensors")
    refuse(tmp_path, CheckpointError, "symbolic links")


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_what_is_not_a_file(tmp_path: Path, kind: str) -> None:
    """A folder or a named pipe with the right name is refused, without waiting on it."""
    path = tmp_path / "model.safetensors"
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    refuse(tmp_path, CheckpointError, "not a regular file")


def test_a_rewritten_shard_is_noticed(two_shards: Path) -> None:
    """Writing to an open shard changes its identity; replacing its path does not."""
    with open_checkpoint(two_shards) as files:
        write_shard(two_shards / "new", [A], seed=5)
        (two_shards / "new").replace(two_shards / FIRST)
        with (two_shards / SECOND).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        os.utime(two_shards / SECOND, ns=(1, 1))
        files.shards[0].check_unchanged()
        with pytest.raises(ShardChangedError, match=SECOND):
            files.shards[1].check_unchanged()


def test_a_rewritten_shard_is_noticed_though_its_mtime_was_put_back(two_shards: Path) -> None:
    """As copying onto it with the times preserved does; another name for it is no change."""
    path = two_shards / SECOND
    with open_checkpoint(two_shards) as files:
        shard = files.shards[1]
        (two_shards / "another").hardlink_to(path)
        shard.check_unchanged()
        (two_shards / "another").unlink()
        before = path.stat()
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_mtime_ns == shard.identity.mtime_ns
        with pytest.raises(ShardChangedError, match=SECOND):
            shard.check_unchanged()


def test_each_header_is_read_once(two_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard costs one open and the reads of one header, however many tensors it has."""
    opened: list[str] = []
    real_open = os.open

    def counting(path: Path, flags: int) -> int:
        opened.append(path.name)
        return real_open(path, flags)

    monkeypatch.setattr(os, "open", counting)
    with open_checkpoint(two_shards):
        assert opened == [FIRST, SECOND]
