"""What the checkpoint really holds, read without the loader under test.

A second, deliberately small reader of safetensors: standard JSON, plain buffered reads, one
tensor after the other.  It shares no code with any loader, so a fault in a loader's reader
cannot hide behind the same fault here.  Where it is not certain which bytes are meant (two
indexes, an index that its shards contradict, a number missing among the shards), it says so
and does not choose: a loader that chose otherwise could not be told from a wrong one.

Format: https://huggingface.co/docs/safetensors, "Format" (8 bytes little-endian header
length, JSON header, data; offsets count from the end of the header).
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from loadproof.errors import CheckpointError
from loadproof.measure.digest import Manifest, TensorDigest, digest_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import BinaryIO

_INDEX_ENDING = ".safetensors.index.json"
_NUMBERED = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.safetensors")
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


class _Layout(NamedTuple):
    """The files of a checkpoint, and which tensor its index puts where; None without an index."""

    paths: list[Path]
    shard_of: dict[str, str] | None


def shard_paths(checkpoint: Path) -> list[Path]:
    """Return the files that make up a checkpoint: those of its index, or its only file.

    Raises:
        CheckpointError: There is no such folder or file, a shard of it is missing, or it has
            several indexes.
    """
    return _layout(checkpoint).paths


def tensor_places(checkpoint: Path) -> list[TensorPlace]:
    """Return every tensor of a checkpoint, sorted by name.

    Raises:
        CheckpointError: A shard is missing, cut short, a Git-LFS pointer or not safetensors, or
            the index and the shards do not name the same tensors.
    """
    layout = _layout(checkpoint)
    places: dict[str, TensorPlace] = {}
    for path in layout.paths:
        for place in _shard_places(path):
            if place.name in places:
                raise CheckpointError(
                    f"Tensor {place.name!r} is in two shards of {checkpoint}; remove the one "
                    "that does not belong."
                )
            places[place.name] = place
    if layout.shard_of is not None:
        _require_agreement(checkpoint, layout.shard_of, places)
    return [places[name] for name in sorted(places)]


def require_weights(checkpoint: Path, places: Sequence[TensorPlace]) -> None:
    """Refuse a checkpoint in which there is nothing to load, or that no leg can be told of.

    Raises:
        CheckpointError: It has no tensors, or none with a byte in it; or its path is not UTF-8.
    """
    try:
        str(checkpoint.resolve()).encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(checkpoint).decode("utf-8", "backslashreplace")
        raise CheckpointError(
            f"The path of {shown} holds bytes that are not UTF-8, and a leg is told it in JSON; "
            "move it to where no folder's name has such."
        ) from error
    if not any(each.nbytes for each in places):
        raise CheckpointError(
            f"{checkpoint} holds {len(places)} tensors and not one byte of weights, so there is "
            "nothing to compare; name another checkpoint."
        )


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
    return read_range(place, 0, place.nbytes)


def read_range(place: TensorPlace, first: int, nbytes: int) -> Iterator[bytes]:
    """Read some of a tensor's bytes from its file, in chunks.

    Args:
        place: Where the tensor lies.
        first: Offset into its bytes.
        nbytes: How many; they lie inside the tensor.

    Raises:
        CheckpointError: The file cannot be read, or is shorter than it was.
    """
    left = nbytes
    try:
        with Path(place.path).open("rb") as file:
            file.seek(place.offset + first)
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise CheckpointError(
                        f"{place.path} ended inside tensor {place.name!r}; it changed meanwhile."
                    )
                left -= len(chunk)
                yield chunk
    except OSError as error:
        raise _unreadable(Path(place.path), error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error.strerror}.")


def _layout(checkpoint: Path) -> _Layout:
    """Find the files of a checkpoint, every one of them there."""
    try:
        kind = checkpoint.stat().st_mode
        names = sorted(each.name for each in checkpoint.iterdir()) if stat.S_ISDIR(kind) else None
    except FileNotFoundError as error:
        raise CheckpointError(
            f"There is no checkpoint at {checkpoint}; name a folder or a file of safetensors."
        ) from error
    except OSError as error:
        raise _unreadable(checkpoint, error) from error
    if names is None:
        return _Layout([checkpoint], None)
    shards = [name for name in names if name.endswith(".safetensors")]
    indexes = [name for name in names if name.endswith(_INDEX_ENDING)]
    shard_of = None
    if len(indexes) > 1:
        raise CheckpointError(
            f"{checkpoint} has several indexes ({', '.join(indexes)}), so it is not certain which "
            "weights are meant; name a folder that has one."
        )
    if indexes:
        shard_of = _read_index(checkpoint / indexes[0])
        shards = sorted(set(shard_of.values()))
    elif _SINGLE in shards:
        shards = [_SINGLE]
    else:
        shards = _with_siblings(shards)
    if not shards:
        raise CheckpointError(
            f"{checkpoint} holds no .safetensors file; name the folder that holds the weights."
        )
    missing = [name for name in shards if name not in names]
    if missing:
        raise CheckpointError(
            f"{checkpoint} lacks {len(missing)} of its {len(shards)} shards, "
            f"first {missing[0]}; download the checkpoint again."
        )
    return _Layout([checkpoint / name for name in shards], shard_of)


def _with_siblings(names: Sequence[str]) -> list[str]:
    """Add every shard that the numbering of the others promises."""
    promised = set(names)
    for name in names:
        numbered = _NUMBERED.fullmatch(name)
        if numbered is not None:
            stem, count = numbered["stem"], numbered["count"]
            promised |= {
                f"{stem}-{number:05d}-of-{count}.safetensors"
                for number in range(1, int(count) + 1)
            }
    return sorted(promised)


def _read_index(index: Path) -> dict[str, str]:
    """Read which tensor is in which shard."""
    if not index.is_file():
        raise CheckpointError(f"{index} is not a regular file; download the index again.")
    try:
        shard_of = _strict_json(index.read_bytes())["weight_map"]
        names = set(shard_of.values())
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise CheckpointError(f"{index} is not an index of shards; download it again.") from error
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CheckpointError(f"{index} names no shard, or one outside its own folder.")
    return dict(shard_of)


def _require_agreement(
    checkpoint: Path, shard_of: Mapping[str, str], places: Mapping[str, TensorPlace]
) -> None:
    """Check index and shards both ways: the same tensors, each in the shard it is said to be in.

    Raises:
        CheckpointError: They differ.
    """
    found = {name: Path(place.path).name for name, place in places.items()}
    for name in sorted(shard_of.keys() | found.keys()):
        said, seen = shard_of.get(name), found.get(name)
        if said == seen:
            continue
        if said is None:
            what = f"does not name tensor {name!r}, which is in {seen}"
        elif seen is None:
            what = f"puts tensor {name!r} into {said}, which does not hold it"
        else:
            what = f"puts tensor {name!r} into {said}, and it is in {seen}"
        raise CheckpointError(
            f"The index of {checkpoint} {what}: index and shards are of different versions; "
            "download both again."
        )


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
        raise _unreadable(path, error) from error
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
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise CheckpointError(
            f"{path} has a tensor whose name, {name!r}, holds half of a surrogate pair and "
            "cannot be written as UTF-8; write the file again under another name."
        )
    try:
        begin, end = record["data_offsets"]
        dtype, shape = record["dtype"], tuple(record["shape"])
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
        raise CheckpointError(
            f"{path} describes tensor {name!r} wrongly: it takes a known dtype, a shape and two "
            "byte positions; download the file again."
        ) from error
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
