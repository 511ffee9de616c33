"""The independent reader, and the digests that everything is compared by."""

from __future__ import annotations

import json
import os
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from fixtures.checkpoints import Tensor, write_checkpoint
from loadproof.errors import CheckpointError
from loadproof.measure.controls import draw_controls
from loadproof.measure.digest import (
    Difference,
    Manifest,
    TensorDigest,
    differences,
    digest_chunks,
)
from loadproof.measure.ground_truth import (
    file_manifest,
    read_chunks,
    require_weights,
    shard_paths,
    tensor_places,
)

if TYPE_CHECKING:
    from pathlib import Path


def manifest_of(folder: Path) -> Manifest:
    """Hash a checkpoint's files."""
    return file_manifest(tensor_places(folder))


def test_the_bytes_are_those_that_safetensors_reads(tmp_path: Path) -> None:
    """A file by the reference writer has, tensor by tensor, the bytes of the reference reader."""
    generator = np.random.default_rng(3)
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "a": generator.standard_normal((3, 5)).astype(np.float32),
        "b": generator.integers(0, 99, (7,), dtype=np.int64),
        "c": np.zeros((0, 4), np.float16),
        "d": np.array(2.5),
    }
    save_file(arrays, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "numpy") as reference:
        for each in manifest_of(tmp_path).tensors:
            array = reference.get_tensor(each.name)
            assert digest_chunks([array.tobytes()])["sha256"] == each.sha256
            assert (array.shape, array.nbytes) == (each.shape, each.nbytes)


def test_shards_come_from_the_index(tmp_path: Path) -> None:
    """Indexed shards are read, a stray file beside them is not."""
    tensors = [[Tensor("a", "F32", (3,))], [Tensor("b", "BF16", (2, 2))]]
    write_checkpoint(tmp_path, tensors, seed=1)
    (tmp_path / "stray.safetensors").write_bytes(b"junk")
    assert [each.name for each in manifest_of(tmp_path).tensors] == ["a", "b"]
    assert len(shard_paths(tmp_path)) == 2


def test_a_file_is_a_checkpoint_too(checkpoint: Path) -> None:
    """The path of the one file gives the same digest as its folder's."""
    alone = manifest_of(checkpoint / "model.safetensors")
    assert alone.digest() == manifest_of(checkpoint).digest()


def _header(entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"
F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "cut short or not safetensors"),
        (b"1234567", "cut short or not safetensors"),
        (struct.pack("<Q", 1 << 62), "cut short or not safetensors"),
        (LFS, "Git-LFS pointer"),
        (_header({"a": F32}), "cut short"),
        (_header({"a": F32}) + b"123", "cut short"),
        (struct.pack("<Q", 4) + b"nope", "not JSON"),
        (_header([1]), "not an object"),
        (_header({"a": F32 | {"dtype": "F33"}}) + b"1234", "wrongly"),
        (_header({"a": F32 | {"shape": [2]}}) + b"1234", "does not fit"),
        (_header({"a": F32 | {"data_offsets": [4, 0]}}) + b"1234", "does not fit"),
        (_header({"a": {"dtype": "F32"}}) + b"1234", "wrongly"),
    ],
)
def test_a_broken_file_is_one_sentence(tmp_path: Path, content: bytes, complaint: str) -> None:
    """Every way of being broken has a sentence that names the file."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=complaint) as caught:
        manifest_of(tmp_path)
    assert "model.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_things_are_named(tmp_path: Path) -> None:
    """A missing folder, an empty one and an absent shard each have their sentence."""
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        shard_paths(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        shard_paths(tmp_path)
    write_checkpoint(tmp_path, [[Tensor("a", "F32", (3,))], [Tensor("b", "F32", (3,))]], seed=1)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="first model-00002-of-00002"):
        shard_paths(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', "{}", '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_told(tmp_path: Path, text: str) -> None:
    """An index that maps nothing to a file is refused."""
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="index"):
        shard_paths(tmp_path)


def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    """A shard by a path is refused."""
    text = json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="outside its own folder"):
        shard_paths(tmp_path)


def entry(**changes: object) -> TensorDigest:
    """Make one entry."""
    values = {"name": "t", "dtype": "F32", "shape": (2, 3), "nbytes": 24} | digest_chunks([b"x"])
    return msgspec.convert(values | changes, TensorDigest)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"dtype": "I32"}, "dtype"),
        ({"shape": (3, 2)}, "shape"),
        ({"nbytes": 25}, "length"),
        (digest_chunks([b"y"]), "bytes"),
        ({"crc32": 1}, "digests-disagree"),
        ({"sha256": "0" * 64}, "digests-disagree"),
    ],
)
def test_each_kind_of_difference_is_told(changes: dict[str, object], kind: str) -> None:
    """The same bytes under another dtype or shape differ, and either digest alone is seen."""
    found = differences(Manifest((entry(),)), Manifest((entry(**changes),)))
    assert found == (Difference("t", kind),)  # type: ignore[arg-type] # a parameter
    assert Manifest((entry(),)).digest() != Manifest((entry(**changes),)).digest()


def test_missing_renamed_and_unexpected_tensors_differ() -> None:
    """A renamed tensor is one missing and one unexpected."""
    found = differences(Manifest((entry(),)), Manifest((entry(name="u"),)))
    assert found == (Difference("t", "missing"), Difference("u", "unexpected"))


@given(st.binary(max_size=200), st.integers(1, 50))
def test_chunks_do_not_matter(content: bytes, size: int) -> None:
    """The digests are of the bytes, however they are cut."""
    chunks = [content[at : at + size] for at in range(0, len(content), size)]
    assert digest_chunks(chunks) == digest_chunks([content])


def _file_of(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


ONE = b'"dtype":"U8","shape":[2],"data_offsets":'


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        (b"[" * 5000, b"", "not JSON"),
        (b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0.0,2.0]}}', b"ab", "does not fit"),
        (b'{"a":{"dtype":"U8","shape":[2.0],"data_offsets":[0,2]}}', b"ab", "does not fit"),
        (b'{"a\\ud800":{' + ONE + b"[0,2]}}", b"ab", "half of a surrogate pair"),
        (b'{"a":{' + ONE + b'[0,2]},"a":{' + ONE + b"[0,2]}}", b"ab", "twice"),
        (b'{"a":{' + ONE + b"[0,2]}}", b"abc", "1 bytes after"),
        (b'{"a":{' + ONE + b"[1,3]}}", b"abc", "gap or an overlap"),
        (b'{"a":{' + ONE + b'[0,2]},"b":{' + ONE + b"[0,2]}}", b"ab", "gap or an overlap"),
    ],
)
def test_what_the_format_forbids_is_refused(
    tmp_path: Path, header: bytes, data: bytes, says: str
) -> None:
    """Bytes whose meaning is not certain are hashed by nobody."""
    _file_of(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=says):
        tensor_places(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_is_refused_without_waiting_on_it(tmp_path: Path, name: str) -> None:
    """A named pipe with the right name does not hang the reader."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="not a regular file"):
        tensor_places(tmp_path)


def _two_shards(folder: Path) -> dict[str, Any]:
    """Write two shards with their index; return the index."""
    write_checkpoint(folder, [[Tensor("a", "F32", (3,))], [Tensor("b", "F32", (3,))]], seed=1)
    index: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    return index


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        ({"a": FIRST, "b": SECOND, "c": SECOND}, f"puts tensor 'c' into {SECOND}, which does not"),
        ({"a": FIRST, "b": FIRST}, f"puts tensor 'b' into {FIRST}, which does not hold it"),
        ({"a": SECOND, "b": FIRST}, f"puts tensor 'a' into {SECOND}, and it is in {FIRST}"),
        ({"b": SECOND, "c": FIRST}, f"does not name tensor 'a', which is in {FIRST}"),
        ({"a": FIRST, "b": "model-00003-of-00003.safetensors"}, "first model-00003-of-00003"),
        ({}, "names no shard"),
    ],
)
def test_an_index_and_its_shards_must_agree(
    tmp_path: Path, weight_map: dict[str, str], says: str
) -> None:
    """Both ways: what the index names is in that shard, and what a shard holds is named."""
    index = _two_shards(tmp_path)
    text = json.dumps(index | {"weight_map": weight_map})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=says) as caught:
        tensor_places(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_number_that_is_missing_without_an_index_is_told(tmp_path: Path) -> None:
    """Shards that number themselves promise their siblings."""
    shards = [[Tensor(name, "F32", (3,))] for name in "abc"]
    write_checkpoint(tmp_path, shards, seed=1)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert [each.name for each in tensor_places(tmp_path)] == ["a", "b", "c"]
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of its 3 shards, first model-00002-of"):
        tensor_places(tmp_path)


def test_several_indexes_are_refused(tmp_path: Path) -> None:
    """Which of two indexes is meant is not for the reader to choose."""
    index = _two_shards(tmp_path)
    (tmp_path / "model.fp16.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="has several indexes"):
        shard_paths(tmp_path)


def test_a_file_that_goes_away_is_one_sentence(checkpoint: Path) -> None:
    """Reading a tensor's bytes, for a digest or for a control, tells what the system said."""
    places = tensor_places(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    for read in (
        lambda: list(read_chunks(places[0])),
        lambda: file_manifest(places),
        lambda: draw_controls(places, 1),
    ):
        with pytest.raises(CheckpointError, match="cannot be read: No such file or directory"):
            read()


def test_a_path_that_the_system_refuses_is_one_sentence(tmp_path: Path) -> None:
    """Whatever the system says of a path becomes a sentence."""
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        shard_paths(tmp_path / ("a" * 300))


@pytest.mark.parametrize("tensors", [[], [Tensor("empty", "F32", (0, 4))]])
def test_a_checkpoint_of_no_bytes_is_refused(tmp_path: Path, tensors: list[Tensor]) -> None:
    """With nothing in it there is nothing to load and nothing to compare."""
    write_checkpoint(tmp_path, [tensors], seed=1)
    with pytest.raises(CheckpointError, match="not one byte of weights"):
        require_weights(tmp_path, tensor_places(tmp_path))
