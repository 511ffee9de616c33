"""Giving a checkpoint's pages back to the page cache's free list, once everybody is done.

On unified memory a cached shard takes room that the weights need, so it is released
after its tensors are placed. Not before: a rank that lags may still read it, so every
load-ready exchange comes first. What advice is given goes to the descriptors that were
loaded from, once per inode, and never to files that are kept on the CPU side, whatever
other names lead to them. A failure closes the descriptors and gives no advice.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from weightload.errors import UsageError
from weightload.host.system import System

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from weightload.checkpoint.folder import Identity, Shard


@dataclass
class Released:
    """What a release did.

    Attributes:
        files: inodes that were released.
        kept: inodes that were kept because a file to keep shares them.
        resident_before_bytes: of the released files; None where the kernel will not say.
        resident_after_bytes: likewise.
    """

    files: int = 0
    kept: int = 0
    resident_before_bytes: int | None = 0
    resident_after_bytes: int | None = 0


class ReleaseQueue:
    """Descriptors of loaded shards, waiting until their pages may be released.

    A context manager: leaving it releases, leaving it with an error only closes.

    Args:
        keep: paths whose pages stay, such as lookup tables that the CPU reads.
        exchanges: called in order before anything is released, for example a
            `LoadReady` for each model that the ranks share; each returns when all are ready.
        system: the operating system's seam.

    Raises:
        UsageError: a path to keep does not exist.
    """

    def __init__(
        self,
        *,
        keep: Iterable[str | os.PathLike[str]] = (),
        exchanges: Iterable[Callable[[], None]] = (),
        system: System | None = None,
    ) -> None:
        self._system = system or System()
        self._exchanges = list(exchanges)
        self._keep = {self._inode(path) for path in keep}
        self._waiting: dict[tuple[int, int], int] = {}
        self._closing = ExitStack()
        self.released: Released | None = None

    @staticmethod
    def _inode(path: str | os.PathLike[str]) -> tuple[int, int]:
        try:
            status = os.stat(path)  # noqa: PTH116 - an fspath of any kind
        except OSError as error:
            raise UsageError(f"keep={os.fspath(path)!r}: {error.strerror}.") from None
        return status.st_dev, status.st_ino

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.release()
        else:
            self.close()

    def add(self, shard: Shard) -> None:
        """Queue a shard's own descriptor; the caller may close its copy."""
        inode = shard.identity.device, shard.identity.inode
        if inode not in self._waiting:
            descriptor = os.dup(shard.descriptor)
            self._closing.callback(os.close, descriptor)
            self._waiting[inode] = descriptor

    def release(self) -> Released:
        """Wait for every exchange, then advise; a second call returns the first one's result.

        Raises:
            RankError: another rank failed or is missing; nothing was advised.
        """
        if self.released is None:
            with self._closing:
                for exchange in self._exchanges:
                    exchange()
                self.released = self._advise()
        return self.released

    def close(self) -> None:
        """Close the descriptors without advice."""
        self._closing.close()
        self._waiting.clear()

    def _advise(self) -> Released:
        system = self._system
        done = Released()
        for inode, descriptor in self._waiting.items():
            if inode in self._keep:
                done.kept += 1
                continue
            before = system.cached_pages(descriptor)
            system.advise_unneeded(descriptor)
            after = system.cached_pages(descriptor)
            done.files += 1
            done.resident_before_bytes = _add(done.resident_before_bytes, before, system)
            done.resident_after_bytes = _add(done.resident_after_bytes, after, system)
        self._waiting.clear()
        return done


def resident_bytes(system: System, shards: Iterable[Shard]) -> int | None:
    """Bytes of the shards in the page cache; None where the kernel will not say."""
    total: int | None = 0
    for identity, descriptor in {(s.identity, s.descriptor) for s in shards}:
        pages = system.cached_pages(descriptor)
        total = _add(total, pages, system, identity)
    return total


def _add(
    total: int | None, pages: int | None, system: System, identity: Identity | None = None
) -> int | None:
    if total is None or pages is None:
        return None
    nbytes = pages * system.page_bytes
    return total + (min(nbytes, identity.file_bytes) if identity else nbytes)
