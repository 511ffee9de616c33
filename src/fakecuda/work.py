"""Work and its order: streams, events, and when queued work runs.

Nothing that a call enqueues happens before something forces it: a wait, a query
that the schedule answers with yes, or the schedule's own wish to make progress
after a call. Copies run in pieces and read their source while they run. Beside
the order in which things do happen, every piece of work carries a vector clock of
what it is ordered after; two accesses that clash without an order are a hazard in
every schedule, also in those where the bytes come out right.
"""

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from fakecuda.choices import Choices, Late
from fakecuda.enums import CUresult
from fakecuda.hazards import Site
from fakecuda.memory import Block, backing, differing, move, same

# A piece this large is moved with the lock released, so that other host threads go on.
_UNLOCKED_FROM_BYTES = 1 << 18
_PIECE_FROM_BYTES = 128
_POLL_S = 0.001
# The fake's device time: one piece of work and one GiB, in milliseconds.
_WORK_MS, _GIB_MS = 0.002, 40.0

Report = Callable[..., None]
Access = tuple[Block | None, int, int, bool]
"""`(block, address, nbytes, writes)`; the block is None for pageable host memory."""


class StuckError(RuntimeError):
    """A call waited longer than allowed for work that nothing lets go on."""


class Stream:
    """A queue of work.

    Attributes:
        blocking: Whether the legacy default stream waits for it and it for that one.
        holds: How often it is held; held work does not run.
        outstanding: Work whose end the host does not know, oldest first.
        last: The newest work, done or not.
    """

    __slots__ = (
        "blocking",
        "context",
        "destroyed_at",
        "flags",
        "handle",
        "holds",
        "last",
        "number",
        "outstanding",
        "queue",
        "refusals",
        "sequence",
        "site",
    )

    def __init__(
        self, number: int, handle: int, context: Any, flags: int, site: Site, *, blocking: bool
    ) -> None:
        self.number = number
        self.handle = handle
        self.context = context
        self.flags = flags
        self.site = site
        self.blocking = blocking
        self.holds = 0
        self.refusals = 0
        self.sequence = 0
        self.queue: deque[Op] = deque()
        self.outstanding: deque[Op] = deque()
        self.last: Op | None = None
        self.destroyed_at: Site | None = None


class Event:
    """A mark in a stream.

    Attributes:
        capture: The record work that it stands for, None before the first record.
        refusals: How often a query has answered "not ready" since that record.
    """

    __slots__ = ("capture", "context", "destroyed_at", "flags", "handle", "refusals", "site")

    def __init__(self, handle: int, context: Any, flags: int, site: Site) -> None:
        self.handle = handle
        self.context = context
        self.flags = flags
        self.site = site
        self.capture: Op | None = None
        self.refusals = 0
        self.destroyed_at: Site | None = None


class Op:
    """One piece of work in a stream.

    Attributes:
        kind: `copy`, `fill`, `record`, `wait`, `wait-value`, `write-value` or `call`.
        source: Real address to read from, 0 if none.
        target: Real address to write to, 0 if none.
        accesses: The ranges it touches, for ordering checks.
        clock: By stream number, the sequence up to which work is ordered before it.
        snapshot: The source's bytes when it was enqueued, while they are watched.
        awaited: Whether its end must be awaited; not so for the synchronous calls that may
            return before their bytes have landed.
        failure: What it fails with when it runs.
    """

    __slots__ = (
        "accesses",
        "action",
        "awaited",
        "call",
        "clock",
        "done",
        "ended_in_call",
        "ended_ms",
        "failure",
        "keepers",
        "kind",
        "nbytes",
        "offset",
        "piece",
        "ready",
        "running",
        "sequence",
        "site",
        "snapshot",
        "snapshot_keeper",
        "source",
        "source_is_pageable",
        "stream",
        "target",
        "value",
        "waits_for",
    )

    def __init__(self, kind: str, call: int, site: Site, nbytes: int = 0) -> None:
        self.kind = kind
        self.call = call
        self.site = site
        self.nbytes = nbytes
        self.source = self.target = self.offset = self.value = 0
        self.piece = nbytes
        self.accesses: tuple[Access, ...] = ()
        self.waits_for: tuple[Op, ...] = ()
        self.clock: dict[int, int] = {}
        self.keepers: tuple[object, ...] = ()
        self.snapshot = 0
        self.snapshot_keeper: object = None
        self.source_is_pageable = False
        self.awaited = True
        self.ready: Callable[[], bool] | None = None
        self.action: Callable[[], None] | None = None
        self.failure: CUresult | None = None
        self.done = self.running = False
        self.ended_in_call = 0
        self.ended_ms = 0.0
        self.sequence = 0
        self.stream: Stream


class Engine:
    """Runs queued work when it must, and as early as the schedule wants.

    Args:
        lock: The fake's lock; held by the caller of every method.
        choices: Who decides.
        report: Called with a hazard.
        log: Called with `(op, first byte, bytes)` after each piece that ran.
        stuck_after_s: How long a wait on held work may last.
    """

    def __init__(
        self,
        lock: threading.Condition,
        choices: Choices,
        report: Report,
        log: Callable[[Op, int, int], None],
        stuck_after_s: float,
        *,
        late: bool,
    ) -> None:
        self.lock = lock
        self.choices = choices
        self.streams: list[Stream] = []
        self.known: dict[int, int] = {}
        self.call = 0
        self.failed: CUresult | None = None
        self._report = report
        self._log = log
        self._late = late
        self._stuck_after_s = stuck_after_s
        self._time_ms = 0.0
        self._pool: dict[int, list[tuple[object, int]]] = {}

    # Adding work.

    def watch(self, op: Op) -> None:
        """Keep the source's bytes, so that a change by the host is seen."""
        spare = self._pool.get(op.nbytes)
        op.snapshot_keeper, op.snapshot = spare.pop() if spare else backing(op.nbytes)
        self.move(op.snapshot, op.source, op.nbytes)

    def stage(self, op: Op) -> None:
        """Take the source's bytes now; the copy reads these."""
        keeper, staged = backing(op.nbytes)
        self.move(staged, op.source, op.nbytes)
        op.source, op.keepers = staged, (*op.keepers, keeper)

    def stop_watching(self, op: Op) -> None:
        """The source goes away: see now whether it was changed, and never look again."""
        if op.snapshot:
            self._compare(op, 0, op.nbytes, op.source)
        self._forget_snapshot(op)

    def enqueue(self, stream: Stream, op: Op, after: Iterable[Op] = ()) -> None:
        """Append work to a stream; `after` is what it waits for beside the stream's order."""
        waits = [other for other in (*after, *self._legacy_order(stream)) if other is not None]
        clock = dict(stream.last.clock) if stream.last else {}
        for other in waits:
            for number, sequence in other.clock.items():
                if clock.get(number, 0) < sequence:
                    clock[number] = sequence
        stream.sequence += 1
        op.stream, op.sequence = stream, stream.sequence
        clock[stream.number] = op.sequence
        op.clock = clock
        op.waits_for = tuple(other for other in waits if not other.done)
        if op.nbytes >= _PIECE_FROM_BYTES:
            op.piece = (op.nbytes + 1) // 2
        if op.accesses:
            self._check_order(op)
        stream.last = op
        stream.queue.append(op)
        stream.outstanding.append(op)

    def _legacy_order(self, stream: Stream) -> Iterable[Op]:
        """What the legacy default stream's rules put before new work of this stream."""
        context = stream.context
        if stream is context.legacy:
            return [
                other.last
                for other in self.streams
                if other.context is context
                and other is not stream
                and other.blocking
                and other.last is not None
            ]
        if stream.blocking and context.legacy.last is not None:
            return [context.legacy.last]
        return ()

    def _check_order(self, op: Op) -> None:
        for access in op.accesses:
            if access[3] and access[0] is not None:
                access[0].device_writers += 1
                if access[0].kind != "device":
                    self._stop_rechecks(op, access)
        for stream in self.streams:
            if stream is op.stream:
                continue
            ordered_up_to = op.clock.get(stream.number, 0)
            for other in reversed(stream.outstanding):
                if other.sequence <= ordered_up_to:
                    break
                clash = _clash(op, other)
                if clash is not None:
                    hazard, block, start, end = clash
                    self._report(hazard, op.site, other.site, block, start, end)

    def _stop_rechecks(self, op: Op, write: Access) -> None:
        """Later work that writes a watched source changes it rightly."""
        for other in op.stream.outstanding:
            if other.snapshot and other.done and _overlap(write, other.accesses[0]):
                self._forget_snapshot(other)

    # Running work.

    def progress(self) -> None:
        """Let the device run ahead as far as the schedule wants."""
        if self._late:
            return
        while True:
            heads = [head for stream in self.streams if (head := self._head(stream))]
            if not heads:
                return
            answer = self.choices.pick("progress", len(heads) + 1)
            if answer == 0:
                return
            self._run(heads[answer - 1])

    def force(self, target: Op | None) -> None:
        """Run work until `target` is done; waits while it is held."""
        deadline = 0.0
        while target is not None and not target.done:
            needed, why = self._needed(target)
            if needed is None:
                now = time.monotonic()
                deadline = deadline or now + self._stuck_after_s
                if now > deadline:
                    raise StuckError(
                        f"waited {self._stuck_after_s} s for a {target.kind} of call "
                        f"{target.call}: {why}; release the stream from another thread"
                    )
                self.lock.wait(_POLL_S)
                continue
            deadline = 0.0
            self._run(needed if self._late else self._any_order(needed))

    def _any_order(self, needed: Op) -> Op:
        """Choose the needed work or, first, any other that could run."""
        heads = [head for stream in self.streams if (head := self._head(stream))]
        heads.remove(needed)
        if not heads:
            return needed
        return [needed, *heads][self.choices.pick("order", len(heads) + 1)]

    def attempt(self, target: Op) -> bool:
        """Run work towards `target` without waiting; answer whether it is done."""
        while not target.done:
            needed, _ = self._needed(target)
            if needed is None:
                return False
            self._run(needed)
        return True

    def observe(self, op: Op | None) -> None:
        """The host now knows that `op`, and all that it is ordered after, is done."""
        if op is None:
            return
        for number, sequence in op.clock.items():
            if self.known.get(number, 0) < sequence:
                self.known[number] = sequence
        for stream in tuple(self.streams):
            known = self.known.get(stream.number, 0)
            while stream.outstanding and stream.outstanding[0].sequence <= known:
                self._retire(stream.outstanding.popleft())
            if stream.destroyed_at and not stream.outstanding and not stream.queue:
                self.streams.remove(stream)

    def recheck(self, op: Op) -> None:
        """Whether the host changed a source after the copy ran and before it knew."""
        if op.snapshot and op.ended_in_call != self.call and not op.source_is_pageable:
            self._compare(op, 0, op.nbytes, op.source)

    def touching(self, block: Block) -> list[Op]:
        """Work on a block whose end the host does not know."""
        return [
            op
            for stream in self.streams
            for op in stream.outstanding
            if any(access[0] is block for access in op.accesses)
        ]

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Copy real bytes; large ones with the lock released."""
        if nbytes < _UNLOCKED_FROM_BYTES:
            move(target, source, nbytes)
            return
        self.lock.release()
        try:
            move(target, source, nbytes)
        finally:
            self.lock.acquire()

    def _head(self, stream: Stream) -> Op | None:
        """The stream's next work, if it can run now."""
        if not stream.queue or stream.holds:
            return None
        op = stream.queue[0]
        if op.running or not all(other.done for other in op.waits_for):
            return None
        return None if op.ready and not op.ready() else op

    def _needed(self, target: Op) -> tuple[Op | None, str]:
        """The work to run next on the way to `target`, or why there is none."""
        while True:
            stream = target.stream
            if stream.holds:
                return None, "its stream is held"
            op = stream.queue[0]
            waits_for = next((other for other in op.waits_for if not other.done), None)
            if waits_for is not None:
                target = waits_for
                continue
            if op.running:
                return None, "another thread runs it"
            if op.ready and not op.ready():
                return None, "a memory value it waits for has not come"
            return op, ""

    def _run(self, op: Op) -> None:
        """Run one piece of the work at the head of its stream."""
        start = op.offset
        count = min(op.piece, op.nbytes - start)
        op.running = True
        try:
            if op.failure is not None:
                self.failed = self.failed or op.failure
                count = op.nbytes - start
            elif op.kind == "copy" and count:
                self._copy_piece(op, start, count)
            elif op.kind == "fill" and count:
                ctypes.memset(op.target + start, op.value, count)
            elif op.action is not None:
                op.action()
        finally:
            op.running = False
        op.offset += count
        self._time_ms += _WORK_MS + count / (1 << 30) * _GIB_MS
        if op.offset >= op.nbytes:
            op.done = True
            op.ended_in_call = self.call
            op.ended_ms = self._time_ms
            op.waits_for = ()
            op.keepers = ()
            op.stream.queue.popleft()
        self._log(op, start, count)
        self.lock.notify_all()

    def _copy_piece(self, op: Op, start: int, count: int) -> None:
        if op.source_is_pageable:
            _move_from_anywhere(op.target + start, op.source + start, count)
            self._compare(op, start, count, op.target)
            return
        if op.snapshot:
            self._compare(op, start, count, op.source)
        self.move(op.target + start, op.source + start, count)

    def _compare(self, op: Op, start: int, count: int, now: int) -> None:
        if not op.snapshot or same(op.snapshot + start, now + start, count):
            return
        low, high = differing(op.snapshot + start, now + start, count)
        block, address = op.accesses[0][0], op.accesses[0][1]
        first = address + start + low
        self._report("PIN-REUSE-BEFORE-COPY", None, op.site, block, first, first + high - low)
        self._forget_snapshot(op)

    def _retire(self, op: Op) -> None:
        for access in op.accesses:
            if access[3] and access[0] is not None:
                access[0].device_writers -= 1
        self.recheck(op)
        self._forget_snapshot(op)

    def _forget_snapshot(self, op: Op) -> None:
        if op.snapshot:
            self._pool.setdefault(op.nbytes, []).append((op.snapshot_keeper, op.snapshot))
            op.snapshot, op.snapshot_keeper = 0, None


def is_late(choices: Choices) -> bool:
    """Whether a source never lets the device run ahead, so that asking it is a waste."""
    return isinstance(choices, Late)


def _overlap(one: Access, other: Access) -> bool:
    return one[0] is other[0] and one[1] < other[1] + other[2] and other[1] < one[1] + one[2]


def _clash(op: Op, other: Op) -> tuple[str, Block | None, int, int] | None:
    """The hazard between two unordered pieces of work, if they touch the same bytes."""
    for mine in op.accesses:
        for theirs in other.accesses:
            if (mine[3] or theirs[3]) and _overlap(mine, theirs):
                start = max(mine[1], theirs[1])
                end = min(mine[1] + mine[2], theirs[1] + theirs[2])
                hazard = "WRITE-BEFORE-DONE" if mine[3] else "READ-BEFORE-DONE"
                return hazard, mine[0], start, end
    return None


def _move_from_anywhere(target: int, source: int, nbytes: int) -> None:
    """Copy from host memory that may be gone by now; what is gone leaves the target alone."""
    view = (ctypes.c_char * nbytes).from_address(target)
    with open("/proc/self/mem", "rb", buffering=0) as own:  # noqa: PTH123 - no path object
        done = 0
        while done < nbytes:
            try:
                data = os.pread(own.fileno(), nbytes - done, source + done)
            except OSError:
                return
            view[done : done + len(data)] = data
            done += len(data)
