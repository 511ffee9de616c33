"""Seeing the host's writes: what pending copies read and fill is kept and compared.

The host writes pinned memory without telling anybody. So the fake keeps what a copy's
source (and a pinned target) held when the copy was queued, and compares when the copy
runs and again when the host learns that it is done. A difference means that the host
wrote too early, by range and not by pointer, and also when the copy happened to win
the race.
"""

import os
from collections.abc import Callable, Iterable

from fakecuda.memory import backing, differing, move, same
from fakecuda.work import Access, Kept, Op

Report = Callable[..., None]
Mover = Callable[[int, int, int], None]


class HostWatch:
    """Keeps and compares the host memory of copies.

    Args:
        report: Called as `report(hazard, site, other_site, block, start, end)`.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._spare: dict[int, list[Kept]] = {}

    def keep_source(self, op: Op, copy: Mover) -> None:
        """Keep the source's bytes."""
        op.source_kept = self._keep(op)
        copy(op.source_kept.address, op.source, op.nbytes)

    def keep_target(self, op: Op, copy: Mover) -> None:
        """Keep the target's bytes."""
        op.target_kept = self._keep(op)
        copy(op.target_kept.address, op.target, op.nbytes)

    def compare_source(self, op: Op, start: int, count: int, now: int) -> None:
        """Report if the bytes at real address `now` are not those that were kept."""
        if op.source_kept is not None:
            kept, access = op.source_kept.address, op.accesses[0]
            if self._differs("PIN-REUSE-BEFORE-COPY", op, access, start, count, kept, now):
                self._forget_source(op)

    def compare_target(self, op: Op, start: int, count: int) -> None:
        """Report if the host has written where the copy writes."""
        if op.target_kept is not None:
            kept, access = op.target_kept.address, op.accesses[1]
            if self._differs("WRITE-BEFORE-DONE", op, access, start, count, kept, op.target):
                self._forget_target(op)

    def landed(self, op: Op, start: int, count: int) -> None:
        """A piece of the copy has filled its target: that is what it holds from now on."""
        if op.target_kept is not None:
            move(op.target_kept.address + start, op.target + start, count)

    def ended(self, op: Op, during_call: int) -> None:
        """The host learns that the copy is done: compare once more, then let go."""
        # Within one call the host has had no time to write.
        if op.began_in_call != during_call:
            self._compare_all(op)
        self.forget(op)

    def memory_goes(self, op: Op) -> None:
        """The copy's memory is about to be freed: compare now and never again."""
        self._compare_all(op)
        self.forget(op)

    def device_writes(self, write: Access, queued: Iterable[Op]) -> None:
        """Work is going to change host memory: from then on, a change is no host write."""
        for other in queued:
            if other.source_kept is not None and write.overlaps(other.accesses[0]):
                if other.done:
                    self._forget_source(other)
                else:
                    other.source_moves_on = True
            if other.target_kept is not None and write.overlaps(other.accesses[1]):
                self._forget_target(other)

    def forget(self, op: Op) -> None:
        """Let go of what was kept."""
        self._forget_source(op)
        self._forget_target(op)

    def _compare_all(self, op: Op) -> None:
        if not op.pageable_source and not op.source_moves_on:
            self.compare_source(op, 0, op.nbytes, op.source)
        self.compare_target(op, 0, op.nbytes)

    def _differs(
        self,
        hazard: str,
        op: Op,
        access: Access,
        start: int,
        count: int,
        kept: int,
        now: int,
    ) -> bool:
        """Compare a piece of what was kept with what is there, and report a difference."""
        if same(kept + start, now + start, count):
            return False
        low, high = differing(kept + start, now + start, count)
        first = access.address + start + low
        # The host wrote somewhere between two calls: it has no call site of its own.
        self._report(hazard, (), op.site, access.block, first, first + high - low)
        return True

    def _keep(self, op: Op) -> Kept:
        size = _capacity(op)
        spare = self._spare.get(size)
        return spare.pop() if spare else Kept(*backing(size))

    def _forget_source(self, op: Op) -> None:
        if op.source_kept is not None:
            self._spare.setdefault(_capacity(op), []).append(op.source_kept)
            op.source_kept = None

    def _forget_target(self, op: Op) -> None:
        if op.target_kept is not None:
            self._spare.setdefault(_capacity(op), []).append(op.target_kept)
            op.target_kept = None


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
