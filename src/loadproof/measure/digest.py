"""Which bytes a tensor holds: two digests of each, bound to name, dtype, shape and length.

SHA-256 is the identity.  CRC-32 runs beside it over the same chunks: the two are unrelated
pieces of code, so a fault in how chunks are fed shows as one agreeing and the other not.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Literal, TypedDict
from zlib import crc32

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from typing_extensions import Buffer


class TensorDigest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor's identity.

    Attributes:
        name: The tensor's name.
        dtype: The safetensors dtype name, such as ``BF16``.
        shape: Elements along each axis.
        nbytes: Length in bytes.
        sha256: Hex SHA-256 of the raw bytes.
        crc32: CRC-32 of the same bytes.
        alias: Another tensor whose memory this one shares; None in files, whose tensors never
            overlap.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str
    crc32: int
    alias: str | None = None


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every tensor of a checkpoint or of a device, sorted by name."""

    tensors: tuple[TensorDigest, ...]

    def digest(self) -> str:
        """Return the hex SHA-256 over all entries: one number for all weights."""
        return sha256(msgspec.json.encode(self.tensors)).hexdigest()

    def nbytes(self) -> int:
        """Return the length of all tensors together, in bytes."""
        return sum(each.nbytes for each in self.tensors)


Content = Literal[
    "one-bit", "zeros", "poison", "previous-slot", "same-tensor", "other-tensor", "unknown"
]


class Mismatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the wrong bytes of a tensor look like, which says where to look for the fault.

    Attributes:
        first_byte: Offset of the first wrong byte.
        run_bytes: Length of the first wrong stretch; a few equal bytes inside do not end it.
        content: What is there instead.
        found_in: The tensor whose bytes they are, when they are some tensor's.
        found_at: Where in that tensor.
    """

    first_byte: int
    run_bytes: int
    content: Content
    found_in: str | None = None
    found_at: int | None = None


class Difference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor that is not what it should be.

    Attributes:
        tensor: Its name.
        kind: What is wrong with it.
        mismatch: What the wrong bytes look like, as far as it was looked into.
    """

    tensor: str
    kind: Literal[
        "missing",
        "unexpected",
        "dtype",
        "shape",
        "length",
        "alias",
        "bytes",
        "digests-disagree",
    ]
    mismatch: Mismatch | None = None

    def sentence(self) -> str:
        """Say what is wrong, for people."""
        if self.mismatch is None:
            return self.kind
        found = self.mismatch
        where = f"{self.kind}, from byte {found.first_byte:,} for {found.run_bytes:,}"
        if found.found_in is not None:
            return f"{where}: {found.content} (byte {found.found_at:,} of {found.found_in!r})"
        return f"{where}: {found.content}"


class _Digests(TypedDict):
    sha256: str
    crc32: int


def digest_chunks(chunks: Iterable[Buffer]) -> _Digests:
    """Run both digests over a tensor's bytes, chunk by chunk."""
    hasher, check = sha256(), 0
    for chunk in chunks:
        hasher.update(chunk)
        check = crc32(chunk, check)
    return {"sha256": hasher.hexdigest(), "crc32": check}


def differences(
    expected: Manifest, found: Manifest, mismatches: Mapping[str, Mismatch] | None = None
) -> tuple[Difference, ...]:
    """Return every tensor in which two manifests differ, sorted by name.

    Args:
        expected: What the files hold.
        found: What the device holds.
        mismatches: What was found out about wrong bytes, by tensor.
    """
    known = mismatches or {}
    wanted = {each.name: each for each in expected.tensors}
    present = {each.name: each for each in found.tensors}
    pairs: list[tuple[str, Any]] = [
        (name, _difference(wanted.get(name), present.get(name)))
        for name in sorted(wanted.keys() | present.keys())
    ]
    return tuple(
        Difference(name, kind, known.get(name)) for name, kind in pairs if kind is not None
    )


def _difference(wanted: TensorDigest | None, present: TensorDigest | None) -> str | None:
    if wanted is None:
        return "unexpected"
    if present is None:
        return "missing"
    kind = None
    if wanted.dtype != present.dtype:
        kind = "dtype"
    elif wanted.shape != present.shape:
        kind = "shape"
    elif wanted.nbytes != present.nbytes:
        kind = "length"
    elif wanted.alias != present.alias:
        kind = "alias"
    elif (wanted.sha256 == present.sha256) != (wanted.crc32 == present.crc32):
        kind = "digests-disagree"
    elif wanted.sha256 != present.sha256:
        kind = "bytes"
    return kind
