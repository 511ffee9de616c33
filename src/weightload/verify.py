"""Content verification while the bytes pass: no second read, no second copy.

A digest needs a tensor's bytes in order, so with verification one thread brings a
whole tensor, and different threads bring different tensors. The bytes hashed are the
ones in the slot that the copy engine reads.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from weightload.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from weightload.checkpoint.header import Record
    from weightload.plan import Slice

ALGORITHM = "sha256"
_NAMES_SHOWN_MAX = 5


def check_algorithm(name: str) -> None:
    """Check a caller's word for the digest.

    Raises:
        UsageError: it is not `sha256`.
    """
    if name != ALGORITHM:
        raise UsageError(f"verify={name!r} is not offered; use verify={ALGORITHM!r}.")


class Verifier:
    """Digests of one load. Different tensors may be added from different threads."""

    def __init__(self, expected: Mapping[str, str] | None) -> None:
        self._expected = expected
        self._digests: dict[str, str] = {}

    def hasher(self, records: Sequence[Record]) -> BatchHasher:
        """A hasher for one batch of whole tensors of one shard."""
        return BatchHasher(records, self._digests)

    def finish(self, records: Iterable[Record]) -> dict[str, str]:
        """The manifest, compared with the expected one.

        Args:
            records: every tensor that was loaded.

        Raises:
            VerificationError: a tensor differs, or the expected manifest lacks it.
        """
        empty = hashlib.new(ALGORITHM).hexdigest()
        manifest = {record.name: self._digests.get(record.name, empty) for record in records}
        if self._expected is not None:
            expected = self._expected
            wrong = [name for name, digest in manifest.items() if expected.get(name) != digest]
            if wrong:
                raise VerificationError(
                    f"{len(wrong)} of {len(manifest)} tensors are not those of the manifest: "
                    f"{', '.join(wrong[:_NAMES_SHOWN_MAX])}; download the checkpoint again, or "
                    f"check that the manifest is this version's."
                )
        return manifest


class BatchHasher:
    """Hashes the slices of one batch, in file order, by one thread."""

    def __init__(self, records: Sequence[Record], digests: dict[str, str]) -> None:
        self._records = records
        self._digests = digests
        self._hash = hashlib.new(ALGORITHM)

    def update(self, slot: memoryview, slices: Sequence[Slice]) -> None:
        """Take in the slices of the span that lies in `slot`."""
        for piece in slices:
            self._hash.update(slot[piece.slot_offset : piece.slot_offset + piece.nbytes])
            record = self._records[piece.tensor]
            if piece.tensor_offset + piece.nbytes == record.nbytes:
                self._digests[record.name] = self._hash.hexdigest()
                self._hash = hashlib.new(ALGORITHM)
