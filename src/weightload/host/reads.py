"""Reads that deliver every wanted byte or say which tensor lost it.

Both routes fill the slot directly: `direct` past the page cache, `buffered`
through it. One read call may return less than asked at any time, so every read
loops; a direct read that stopped off the alignment goes back to the last aligned
byte before it goes on, since O_DIRECT accepts no other offset.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from weightload.errors import ReadError

if TYPE_CHECKING:
    from weightload.checkpoint.folder import Shard
    from weightload.host.system import System
    from weightload.plan import Span


class DirectRefusedError(Exception):
    """The file system opened the file with O_DIRECT and then refused to read it."""


class ShardReader:
    """Reads spans of one shard by one route; safe to call from several threads."""

    def __init__(
        self, system: System, shard: Shard, descriptor: int, direct_alignment: int | None
    ) -> None:
        """Read through `descriptor`, past the page cache if an alignment is given."""
        self._system = system
        self._shard = shard
        self._descriptor = descriptor
        self._alignment = direct_alignment

    def fill(self, span: Span, target: memoryview) -> int:
        """Read one span into the start of a slot.

        Args:
            span: what to read.
            target: the slot's bytes, at least `span.nbytes` of them.

        Returns:
            The number of read calls it took.

        Raises:
            ReadError: the file ended early or the device failed.
            DirectRefusedError: O_DIRECT turned out not to work on this file.
        """
        # Padding is read only where the alignment of direct reads demands it.
        end = span.nbytes if self._alignment else span.wanted_end
        done = calls = 0
        while done < span.wanted_end:
            position = span.offset + done
            try:
                got = self._system.read(self._descriptor, target[done:end], position)
            except OSError as error:
                raise self._failure(error, position) from error
            calls += 1
            if got <= 0:
                raise ReadError(
                    f"{self._shard.name} ended at byte {position}, inside tensor "
                    f"{self._tensor_at(position)!r}; the file was cut while it was "
                    f"being loaded, download it again."
                )
            reached = done + got
            if self._alignment and reached < span.wanted_end:
                reached -= reached % self._alignment
                if reached <= done:
                    raise DirectRefusedError
            done = reached
        return calls

    def _failure(self, error: OSError, position: int) -> Exception:
        if self._alignment and error.errno == errno.EINVAL:
            return DirectRefusedError()
        return ReadError(
            f"{self._shard.name} could not be read at byte {position}, inside tensor "
            f"{self._tensor_at(position)!r}: {error.strerror}; check the disk."
        )

    def _tensor_at(self, position: int) -> str:
        for record in self._shard.header.records:
            if position < record.end:
                return record.name
        return self._shard.header.records[-1].name
