"""One shard's header, read once and believed only after every check.

The format is eight bytes of little-endian length, that many bytes of JSON, then
the data. The reference implementation's acceptance is the yardstick: what it
opens, this opens. It is lax in one place that loses bytes silently, duplicate
keys, and there this parser refuses. All sizes are compared with the file's size
before anything is allocated from them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from weightload.errors import HeaderError

if TYPE_CHECKING:
    from collections.abc import Callable

# The reference refuses longer headers (safetensors/src/tensor.rs, MAX_HEADER_SIZE).
HEADER_BYTES_MAX = 100_000_000

# Sizes in bits, because F4 and F6 elements are smaller than a byte. The names are
# those of the reference's Dtype enumeration.
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

_SIZE_LIMIT = 2**64
# An escape, or space between a string and what follows: rare, and left to the slow parser.
_NOT_PLAIN = (b"\\", b'" ', b'"\t', b'"\n', b'"\r')
_LFS_PREFIX = b"version https://git-lfs"


class Record(NamedTuple):
    """One tensor's entry.

    Attributes:
        name: the tensor's name in the checkpoint.
        dtype: a key of `DTYPE_BITS`.
        shape: elements per dimension; `()` is a scalar.
        start: first byte, counted from the start of the file.
        end: first byte after the tensor, counted from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.start


class Header(NamedTuple):
    """What one shard says of itself.

    Attributes:
        records: in the order of their bytes in the file.
        metadata: the free-form `__metadata__` strings.
        data_start: file offset of the first data byte.
    """

    records: tuple[Record, ...]
    metadata: dict[str, str]
    data_start: int


def read_header(pread: Callable[[int, int], bytes], file_bytes: int, shard: str) -> Header:
    """Read and check the header of one shard.

    Args:
        pread: returns up to `n` bytes from an offset, as `pread(n, offset)`.
        file_bytes: the size of the file, in bytes.
        shard: the shard's name, for error messages.

    Raises:
        HeaderError: the file is not a well-formed safetensors file.
    """
    start = pread(min(file_bytes, len(_LFS_PREFIX)), 0)
    if start == _LFS_PREFIX:
        raise HeaderError(
            f"{shard} is a Git-LFS pointer, not the weights themselves; download it again, "
            f"for example with `git lfs pull`."
        )
    if file_bytes < 8 or len(start) < 8:
        raise HeaderError(
            f"{shard} has {file_bytes} bytes, too few for a safetensors header; download it again."
        )
    header_bytes = int.from_bytes(start[:8], "little")
    if header_bytes > HEADER_BYTES_MAX:
        raise HeaderError(
            f"{shard} claims a header of {header_bytes} bytes, more than the format's limit of "
            f"{HEADER_BYTES_MAX}; it is not a safetensors file."
        )
    data_start = 8 + header_bytes
    if data_start > file_bytes:
        raise HeaderError(
            f"{shard} is cut off inside its header: it needs {data_start} bytes and has "
            f"{file_bytes}; download it again."
        )
    entries = _parse_json(pread(header_bytes, 8), header_bytes, shard)
    metadata = _metadata(entries.pop("__metadata__", None), shard)
    records = [_record(name, entry, data_start, shard) for name, entry in entries.items()]
    records.sort(key=_by_bytes)
    _check_layout(records, data_start, file_bytes, shard)
    return Header(tuple(records), metadata, data_start)


def _by_bytes(record: Record) -> tuple[int, int]:
    return record.start, record.end


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build one JSON object, refusing a key that occurs twice."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise HeaderError(f"the key {key!r} occurs twice")
            seen.add(key)
    return mapping


def parse_strict_json(text: bytes) -> Any:  # noqa: ANN401 - JSON can be anything until checked
    """Parse JSON as RFC 8259 has it: UTF-8, no NaN, and no duplicate key at any level.

    Raises:
        HeaderError: a key occurs twice.
        ValueError: anything else that is not JSON, or is no text: half of a surrogate pair.
        RecursionError: nesting deeper than the interpreter allows.
    """
    value = json.loads(
        text.decode("utf-8"), object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant
    )
    if b"\\u" in text:
        # An escape can spell half of a pair, which no UTF-8 can; the reference refuses it.
        json.dumps(value, ensure_ascii=False).encode()
    return value


def decode_strict_json(text: bytes) -> Any:  # noqa: ANN401 - JSON can be anything until checked
    """Parse as `parse_strict_json` does, fast where the text shows that no key occurs twice.

    Without escapes a quote is never part of a string, so that a quote before a colon ends a
    key, or begins a string that itself begins with a colon. As many of them as there are
    keys in the result then leave none over for a second occurrence of any.

    Raises:
        HeaderError: a key occurs twice.
        ValueError: anything else that is not JSON.
        RecursionError: nesting deeper than the interpreter allows.
    """
    if any(mark in text for mark in _NOT_PLAIN):
        return parse_strict_json(text)
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return parse_strict_json(text)
    entries = value.values() if isinstance(value, dict) else ()
    keys = len(entries) + sum(len(entry) for entry in entries if isinstance(entry, dict))
    return value if text.count(b'":') == keys else parse_strict_json(text)


def _parse_json(text: bytes, header_bytes: int, shard: str) -> dict[str, Any]:
    if len(text) != header_bytes:
        raise HeaderError(
            f"{shard} delivered {len(text)} of its header's {header_bytes} bytes; "
            f"it was cut while it was read."
        )
    try:
        entries = decode_strict_json(text)
    except HeaderError as error:
        raise HeaderError(
            f"{shard}: {error} in its header, so which bytes are meant is undefined; "
            f"write the file again with a current safetensors."
        ) from None
    except (ValueError, RecursionError) as error:
        raise HeaderError(
            f"{shard}: the header is not valid JSON ({error}); download it again."
        ) from None
    if not isinstance(entries, dict):
        raise HeaderError(f"{shard}: the header is not a JSON object; download it again.")
    return entries


def _metadata(value: object, shard: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise HeaderError(f"{shard}: __metadata__ must map strings to strings; write it again.")
    return value


def _is_size(value: object) -> bool:
    # A bool is an int to Python and an error to the format.
    return type(value) is int and 0 <= value < _SIZE_LIMIT


def _record(name: str, entry: object, data_start: int, shard: str) -> Record:
    if not isinstance(entry, dict):
        raise HeaderError(f"{shard}: tensor {name!r} has no entry of the right form.")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None or not isinstance(dtype, str):
        raise HeaderError(
            f"{shard}: tensor {name!r} has dtype {dtype!r}, which the format does not know."
        )
    if type(offsets) is not list or len(offsets) != 2:
        raise HeaderError(f"{shard}: tensor {name!r} lacks its two byte positions.")
    start, end = offsets
    if not (_is_size(start) and _is_size(end)):
        raise HeaderError(
            f"{shard}: tensor {name!r} has data_offsets {offsets!r}, not two byte positions."
        )
    bits_in_all = _bits_in_all(name, shape, bits, shard)
    if bits_in_all % 8 or end - start != bits_in_all // 8:
        raise HeaderError(
            f"{shard}: tensor {name!r} of dtype {dtype} and shape {shape} does not fit its "
            f"bytes {start} to {end}."
        )
    return Record(name, dtype, tuple(shape or ()), data_start + start, data_start + end)


def _bits_in_all(name: str, shape: Any, bits: int, shard: str) -> int:  # noqa: ANN401 - not checked yet
    """Multiply as the reference does, where any overflow of 64 bits is an error."""
    product = 1
    sizes: list[Any] = shape if type(shape) is list else [None]
    for size in sizes:
        if not _is_size(size):
            raise HeaderError(
                f"{shard}: tensor {name!r} has shape {shape!r}, not a list of sizes."
            )
        product *= size
        if product >= _SIZE_LIMIT:
            break
    if product * bits >= _SIZE_LIMIT:
        raise HeaderError(
            f"{shard}: tensor {name!r} of shape {shape} does not fit into 64 bits of size."
        )
    return product * bits


def _check_layout(records: list[Record], data_start: int, file_bytes: int, shard: str) -> None:
    """Check that the tensors tile the data section: no gap, no overlap, no byte left over."""
    position = data_start
    for record in records:
        if record.start != position:
            raise HeaderError(
                f"{shard}: tensor {record.name!r} starts at byte {record.start}, where byte "
                f"{position} was due; the tensors overlap or leave a gap."
            )
        position = record.end
    if position > file_bytes:
        raise HeaderError(
            f"{shard} is truncated: its header promises {position} bytes and the file has "
            f"{file_bytes}; download it again."
        )
    if position < file_bytes:
        raise HeaderError(
            f"{shard} has {file_bytes - position} bytes after its last tensor; "
            f"it is damaged or not a safetensors file."
        )
