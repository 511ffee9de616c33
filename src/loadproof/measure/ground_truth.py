"""What the checkpoint really holds, read without the loader under test.

A second, deliberately small reader of safetensors: standard JSON, plain buffered reads, one
tensor after the other.  It shares no code with any loader, so a fault in a loader's reader
cannot hide behind the same fault here.

Format: https://huggingface.co/docs/safetensors, "Format" (8 bytes little-endian header
length, JSON header, data; offsets count from the end of the header).
"""

from __future__ import annotations

import json
import math
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadproof.errors import CheckpointError
from loadproof.measure.digest import Manifest, TensorDigest, digest_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_CHUNK_BYTES = 4 << 20
# The format's own limit on the header.
_HEADER_BYTES_MAX = 100_000_000
_LFS_FIRST_WORDS = b"version https://git-lfs"

# Bits of one element, by the format's dtype names.
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


class TensorPlace(msgspec.Struct, frozen=True):
    """Where one tensor's bytes lie.

    Attributes:
        name: The tensor's name.
        dtype: The format's dtype name, such as ``BF16``.
        shape: Elements along each axis.
        path: The shard.
        offset: First byte, from the start of the file.
        nbytes: Length in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str
    offset: int
    nbytes: int


def shard_paths(checkpoint: Path) -> list[Path]:
    """Return the files that make up a checkpoint: those of its index, or its only file.

    Raises:
        CheckpointError: There is no such folder or file, or a shard of it is missing.
    """
    if checkpoint.is_file():
        return [checkpoint]
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"There is no checkpoint at {checkpoint}; name a folder or a file of safetensors."
        )
    present = sorted(checkpoint.glob("*.safetensors"))
    indexes = sorted(checkpoint.glob("*.safetensors.index.json"))
    if indexes:
        index = checkpoint / _INDEX if (checkpoint / _INDEX) in indexes else indexes[0]
        paths = [checkpoint / name for name in _indexed_names(index)]
    else:
        paths = [each for each in present if each.name == _SINGLE] or present
    if not paths:
        raise CheckpointError(
            f"{checkpoint} holds no .safetensors file; name the folder that holds the weights."
        )
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise CheckpointError(
            f"{checkpoint} lacks {len(missing)} of its {len(paths)} shards, "
            f"first {missing[0]}; download the checkpoint again."
        )
    return paths


def tensor_places(checkpoint: Path) -> list[TensorPlace]:
    """Return every tensor of a checkpoint, sorted by name.

    Raises:
        CheckpointError: A shard is missing, cut short, a Git-LFS pointer or not safetensors.
    """
    places: dict[str, TensorPlace] = {}
    for path in shard_paths(checkpoint):
        for place in _shard_places(path):
            if place.name in places:
                raise CheckpointError(
                    f"Tensor {place.name!r} is in two shards of {checkpoint}; remove the one "
                    "that does not belong."
                )
            places[place.name] = place
    return [places[name] for name in sorted(places)]


def file_manifest(places: list[TensorPlace]) -> Manifest:
    """Hash every tensor's bytes as they are in the files.

    Raises:
        CheckpointError: A file cannot be read, or changed since its header was.
    """
    return Manifest(
        tensors=tuple(
            TensorDigest(
                name=each.name,
                dtype=each.dtype,
                shape=each.shape,
                nbytes=each.nbytes,
                **digest_chunks(read_chunks(each)),
            )
            for each in places
        )
    )


def read_chunks(place: TensorPlace) -> Iterator[bytes]:
    """Read one tensor's bytes from its file, in chunks.

    Raises:
        CheckpointError: The file cannot be read, or is shorter than it was.
    """
    left = place.nbytes
    try:
        with Path(place.path).open("rb") as file:
            file.seek(place.offset)
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise CheckpointError(
                        f"{place.path} ended inside tensor {place.name!r}; it changed meanwhile."
                    )
                left -= len(chunk)
                yield chunk
    except OSError as error:
        raise CheckpointError(f"{place.path} cannot be read: {error.strerror}.") from error


def _indexed_names(index: Path) -> list[str]:
    if not index.is_file():
        raise CheckpointError(f"{index} is not a regular file; download the index again.")
    try:
        names = sorted(set(_strict_json(index.read_bytes())["weight_map"].values()))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise CheckpointError(f"{index} is not an index of shards; download it again.") from error
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CheckpointError(f"{index} names a shard outside its own folder.")
    return names


def _shard_places(path: Path) -> list[TensorPlace]:
    """Parse one shard's header and check that its tensors tile the file's data exactly."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is not a regular file; name the weights themselves.")
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            header, header_bytes = _header(file, file_bytes, path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    start = 8 + header_bytes
    places = [
        _place(path, name, record, start)
        for name, record in header.items()
        if name != "__metadata__"
    ]
    end = start
    for place in sorted(places, key=lambda each: (each.offset, each.nbytes)):
        if place.offset != end:
            raise CheckpointError(
                f"{path} leaves a gap or an overlap before tensor {place.name!r}; write it again."
            )
        end += place.nbytes
    if end > file_bytes:
        raise CheckpointError(
            f"{path} is cut short: its header promises {end} bytes and it has {file_bytes}; "
            "download it again."
        )
    if end < file_bytes:
        raise CheckpointError(
            f"{path} has {file_bytes - end} bytes after its last tensor; download it again."
        )
    return places


def _strict_json(text: bytes) -> Any:  # noqa: ANN401 -- JSON can be anything until checked
    """Parse JSON in which no key occurs twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) != len(pairs):
            raise ValueError("a key occurs twice")
        return mapping

    return json.loads(text, object_pairs_hook=unique)


def _header(file: BinaryIO, file_bytes: int, path: Path) -> tuple[dict[str, Any], int]:
    first = file.read(8)
    if (first + file.read(len(_LFS_FIRST_WORDS) - 8)) == _LFS_FIRST_WORDS:
        raise CheckpointError(
            f"{path} is a Git-LFS pointer, not the weights; run git lfs pull, or download it."
        )
    (length,) = struct.unpack("<Q", first) if len(first) == 8 else (file_bytes,)
    if length > min(file_bytes - 8, _HEADER_BYTES_MAX):
        raise CheckpointError(
            f"{path} is cut short or not safetensors: its header does not fit into the file; "
            "download it again."
        )
    file.seek(8)
    try:
        header = _strict_json(file.read(length))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} has a header that is not JSON, or names a key twice; download it again."
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a header that is not an object; download it again.")
    return header, length


def _place(path: Path, name: str, record: Any, start: int) -> TensorPlace:  # noqa: ANN401 -- JSON
    try:
        begin, end = record["data_offsets"]
        dtype, shape = record["dtype"], tuple(record["shape"])
        name.encode("utf-8")
        bits = DTYPE_BITS[dtype] * math.prod(shape)
        # A bool is an int to Python; a float would fit and mean nothing.
        whole = all(type(number) is int for number in (begin, end, *shape))
        sound = (
            whole
            and 0 <= begin <= end
            and bits == 8 * (end - begin)
            and all(n >= 0 for n in shape)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} describes tensor {name!r} wrongly: {error!r}.") from error
    if not sound:
        raise CheckpointError(
            f"{path} gives tensor {name!r} a byte range that does not fit its dtype and shape."
        )
    return TensorPlace(
        name=name,
        dtype=dtype,
        shape=shape,
        path=str(path),
        offset=start + begin,
        nbytes=end - begin,
    )
