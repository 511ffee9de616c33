"""Seeing the host's writes: sources of pending copies are kept and compared.

The host writes pinned memory without telling anybody. So the fake keeps what a
source held when its copy was queued, and compares when the copy runs and again when
the host learns that it is done. A difference means that the host wrote too early,
by range and not by pointer, and also when the copy happened to win the race.
"""

import os
from collections.abc import Callable, Iterable

from fakecuda.memory import backing, differing, move, same
from fakecuda.work import Access, Op

Report = Callable[..., None]
Mover = Callable[[int, int, int], None]


class SourceWatch:
    """Keeps and compares the sources of copies.

    Args:
        report: Called as `report(hazard, site, other_site, block, start, end)`.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._spare: dict[int, list[tuple[object, int]]] = {}

    def start(self, op: Op, copy: Mover) -> None:
        """Keep the source's bytes."""
        spare = self._spare.get(_capacity(op))
        op.snapshot_keeper, op.snapshot = spare.pop() if spare else backing(_capacity(op))
        copy(op.snapshot, op.source, op.nbytes)

    def compare(self, op: Op, start: int, count: int, now: int) -> None:
        """Report if the bytes at real address `now` are not those that were kept."""
        if not op.snapshot or same(op.snapshot + start, now + start, count):
            return
        low, high = differing(op.snapshot + start, now + start, count)
        source = op.accesses[0]
        first = source.address + start + low
        # The host wrote somewhere between two calls: it has no call site of its own.
        self._report("PIN-REUSE-BEFORE-COPY", (), op.site, source.block, first, first + high - low)
        self.forget(op)

    def ended(self, op: Op, during_call: int) -> None:
        """The host learns that the copy is done: compare once more, then let go."""
        if op.snapshot and op.ended_in_call != during_call and not op.pageable_source:
            self.compare(op, 0, op.nbytes, op.source)
        self.forget(op)

    def source_goes(self, op: Op) -> None:
        """The source is about to be freed: compare now and never again."""
        if op.snapshot and not op.pageable_source:
            self.compare(op, 0, op.nbytes, op.source)
        self.forget(op)

    def device_writes(self, write: Access, queued: Iterable[Op]) -> None:
        """Ordered work is going to change watched sources: that is no host write."""
        for other in queued:
            if other.snapshot and other.done and write.overlaps(other.accesses[0]):
                self.forget(other)

    def forget(self, op: Op) -> None:
        """Let go of what was kept."""
        if op.snapshot:
            self._spare.setdefault(_capacity(op), []).append((op.snapshot_keeper, op.snapshot))
            op.snapshot, op.snapshot_keeper = 0, None


def _capacity(op: Op) -> int:
    """Sizes of kept memory are powers of two, so that few of them are ever made."""
    return 1 << (op.nbytes - 1).bit_length()


def move_from_anywhere(target: int, source: int, nbytes: int) -> None:
    """Copy from host memory that may be gone by now.

    What is gone leaves the target as it was, and so shows as unwritten bytes.
    """
    descriptor = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        done = 0
        while done < nbytes:
            try:
                data = os.pread(descriptor, nbytes - done, source + done)
            except OSError:
                return
            move(target + done, data, len(data))
            done += len(data)
    finally:
        os.close(descriptor)
