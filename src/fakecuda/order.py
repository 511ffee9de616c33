"""What is ordered after what, whatever happens to run first.

Every operation carries a vector clock: for each stream, up to which operation of it
is certainly done when this one starts. Stream order, event waits and the rules of
the legacy default stream put entries there. The host is an agent of its own: what
it has awaited is done for everybody. Two operations that clash on some byte without
an order between them are a hazard in every schedule.
"""

from collections.abc import Iterable

from fakecuda.watch import HostWatch, Report
from fakecuda.work import Op, Stream


class Order:
    """Clocks of all streams, and the host's.

    Args:
        report: Called as `report(hazard, site, other_site, block, start, end)`.
        watch: Told what the host learns and what the device writes.
    """

    def __init__(self, report: Report, watch: HostWatch) -> None:
        self.streams: list[Stream] = []
        self._known_to_host: dict[int, int] = {}
        self._report = report
        self._watch = watch

    def place(self, stream: Stream, op: Op, after: Iterable[Op]) -> None:
        """Put an operation at the end of a stream, after what else it waits for."""
        waits = [*after, *self._legacy_rules(stream)]
        clock = stream.last.clock.copy() if stream.last else {}
        for other in waits:
            for number, sequence in other.clock.items():
                if clock.get(number, 0) < sequence:
                    clock[number] = sequence
        stream.sequence += 1
        clock[stream.number] = op.sequence = stream.sequence
        op.stream, op.clock = stream, clock
        op.waits_for = tuple(other for other in waits if not other.done)
        if op.accesses:
            self._check(op)
        stream.last = op
        stream.outstanding.append(op)

    def host_knows(self, op: Op, during_call: int) -> None:
        """The host has learnt that `op` is done, and so all that it is ordered after."""
        known = self._known_to_host
        for number, sequence in op.clock.items():
            if known.get(number, 0) < sequence:
                known[number] = sequence
        for stream in tuple(self.streams):
            sequence = known.get(stream.number, 0)
            outstanding = stream.outstanding
            while outstanding and outstanding[0].sequence <= sequence:
                self._retire(outstanding.popleft(), during_call)
            if stream.destroyed_at is not None:
                self.drop_if_drained(stream)

    def drop_if_drained(self, stream: Stream) -> None:
        """Forget a destroyed stream once nothing of it matters any more."""
        if not stream.outstanding and not stream.queue:
            self.streams.remove(stream)

    def _legacy_rules(self, stream: Stream) -> list[Op]:
        """What new work of this stream waits for by the legacy default stream's rules."""
        legacy = stream.context.legacy
        if stream is not legacy:
            return [legacy.last] if stream.blocking and legacy.last else []
        return [
            other.last
            for other in self.streams
            if other.last and other.blocking and other.context is stream.context
            if other is not stream
        ]

    def _check(self, op: Op) -> None:
        for access in op.accesses:
            if access.writes and access.block is not None:
                access.block.device_writers += 1
                if access.block.kind != "device":
                    for stream in self.streams:
                        self._watch.device_writes(access, stream.outstanding)
        for stream in self.streams:
            if stream is op.stream:
                continue
            ordered_up_to = op.clock.get(stream.number, 0)
            for other in reversed(stream.outstanding):
                if other.sequence <= ordered_up_to:
                    break
                self._check_pair(op, other)

    def _check_pair(self, op: Op, other: Op) -> None:
        for mine in op.accesses:
            for theirs in other.accesses:
                if (mine.writes or theirs.writes) and mine.overlaps(theirs):
                    hazard = "WRITE-BEFORE-DONE" if mine.writes else "READ-BEFORE-DONE"
                    start = max(mine.address, theirs.address)
                    end = min(mine.address + mine.nbytes, theirs.address + theirs.nbytes)
                    self._report(hazard, op.site, other.site, mine.block, start, end)

    def _retire(self, op: Op, during_call: int) -> None:
        for access in op.accesses:
            if access.writes and access.block is not None:
                access.block.device_writers -= 1
        self._watch.ended(op, during_call)
