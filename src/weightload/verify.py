"""Content verification while the bytes pass: no second read, no second copy.

A digest needs a tensor's bytes in order, so with verification one thread brings and
hashes a whole tensor, and different threads bring different ones. A tensor so large that
the others would wait for its thread is hashed by a second one beside it. The bytes hashed
are the ones in the slot that the copy engine reads.
"""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from weightload.errors import UsageError, VerificationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Executor, Future

    from weightload.checkpoint.header import Record
    from weightload.plan import Slice

ALGORITHM = "sha256"
_NAMES_SHOWN_MAX = 5
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


def check_algorithm(name: str) -> None:
    """Check a caller's word for the digest.

    Raises:
        UsageError: it is not `sha256`.
    """
    if name != ALGORITHM:
        raise UsageError(f"verify={name!r} is not offered; use verify={ALGORITHM!r}.")


def check_manifest(manifest: Mapping[Any, Any]) -> dict[str, str]:
    """Check a caller's digests, and give them in lower case, as they are compared.

    Raises:
        UsageError: a name is no text, or a digest no 64 hexadecimal digits.
    """
    for name, digest in manifest.items():
        if not isinstance(name, str):
            raise UsageError(f"manifest= names {name!r}, and a tensor's name has to be a str.")
        if not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
            raise UsageError(
                f"manifest= gives {name!r} the digest {digest!r}, and it has to be the 64 "
                f"hexadecimal digits of a SHA-256."
            )
    return {name: digest.lower() for name, digest in manifest.items()}


class Verifier:
    """Digests of one load. Different tensors may be added from different threads."""

    def __init__(self, expected: Mapping[str, str] | None) -> None:
        self._expected = expected
        self._digests: dict[str, str] = {}
        self._pool: Executor | None = None

    @contextmanager
    def overlapping(self, threads: int) -> Iterator[None]:
        """Hash large batches in threads beside the readers while the body runs.

        A reader may then keep one slot while it asks for another; see `Ring.take`.
        """
        with ThreadPoolExecutor(threads, "weightload-hash") as self._pool:
            yield
        self._pool = None

    def hasher(self, records: Sequence[Record], *, large: bool) -> BatchHasher:
        """A hasher for one batch of whole tensors of one shard."""
        return BatchHasher(records, self._digests, self._pool if large else None)

    def finish(self, records: Iterable[Record], *, whole: bool) -> dict[str, str]:
        """The manifest, compared with the expected one.

        Args:
            records: every tensor that was loaded.
            whole: they are all of the checkpoint's, so the expected manifest names no other.

        Raises:
            VerificationError: a tensor differs, or one of the two manifests lacks it.
        """
        empty = hashlib.new(ALGORITHM).hexdigest()
        manifest = {record.name: self._digests.get(record.name, empty) for record in records}
        if self._expected is not None:
            _compare(manifest, self._expected, whole=whole)
        return manifest


def _compare(manifest: Mapping[str, str], expected: Mapping[str, str], *, whole: bool) -> None:
    wrong = [name for name, digest in manifest.items() if expected.get(name) != digest]
    lacking = [name for name in expected if name not in manifest] if whole else []
    found = []
    if wrong:
        found.append(
            f"{len(wrong)} of {len(manifest)} tensors are not those of the manifest: "
            f"{', '.join(wrong[:_NAMES_SHOWN_MAX])}"
        )
    if lacking:
        found.append(
            f"the checkpoint lacks {len(lacking)} of {len(expected)} tensors of the manifest: "
            f"{', '.join(lacking[:_NAMES_SHOWN_MAX])}"
        )
    if found:
        raise VerificationError(
            f"{'; '.join(found)}; download the checkpoint again, or check that the manifest is "
            f"this version's."
        )


class BatchHasher:
    """Hashes the slices of one batch, in file order.

    With a pool, hashing one span overlaps reading the next, which a large tensor needs:
    its digest is one long chain that no second thread can share.
    """

    def __init__(
        self, records: Sequence[Record], digests: dict[str, str], pool: Executor | None
    ) -> None:
        self._records = records
        self._digests = digests
        self._pool = pool
        self._hash = hashlib.new(ALGORITHM)
        self._pending: tuple[Future[None], Callable[[], None]] | None = None

    def update(self, source: memoryview, slices: Sequence[Slice]) -> None:
        """Take in the slices of the span that lies in `source`."""
        for piece in slices:
            self._hash.update(source[piece.slot_offset : piece.slot_offset + piece.nbytes])
            record = self._records[piece.tensor]
            if piece.tensor_offset + piece.nbytes == record.nbytes:
                self._digests[record.name] = self._hash.hexdigest()
                self._hash = hashlib.new(ALGORITHM)

    def update_then(
        self, source: memoryview, slices: Sequence[Slice], then: Callable[[], None]
    ) -> None:
        """Take in a span and call `then` when its bytes are no longer needed.

        With a pool that is at the latest in the next call, or in `finish`.
        """
        self.finish()
        if self._pool is None:
            self.update(source, slices)
            then()
        else:
            self._pending = self._pool.submit(self.update, source, slices), then

    def finish(self) -> None:
        """Wait for the span that is still being hashed, if any."""
        if self._pending is not None:
            (future, then), self._pending = self._pending, None
            future.result()
            then()
