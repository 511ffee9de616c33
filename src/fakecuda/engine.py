"""When work runs: as late as it may, or as early as the schedule wants.

Nothing that a call queues happens before something forces it: a wait, a query that
the schedule answers with yes, or the schedule's wish to make progress after a call.
Copies run in pieces and read their source while they run, so a source that changes
half way arrives torn.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from fakecuda.choices import Choices
from fakecuda.memory import Block, backing, move
from fakecuda.order import Order
from fakecuda.watch import HostWatch, move_from_anywhere
from fakecuda.work import Op, Stream

if TYPE_CHECKING:
    from fakecuda.enums import CUresult

# A copy this large is moved with the lock released, so that other host threads go on.
_UNLOCKED_FROM_BYTES = 1 << 18
_PIECES_FROM_BYTES = 128
_POLL_S = 0.001
# Device time, for elapsed times only: a fixed cost and a plausible rate.
_OP_MS, _GIB_MS = 0.002, 40.0


class StuckError(RuntimeError):
    """A call waited longer than allowed for work that nothing lets go on."""


class Engine:
    """Runs queued work.

    Args:
        lock: The fake's lock; whoever calls a method holds it.
        choices: Who decides.
        order: Knows the streams and what the host has awaited.
        watch: Compares the host memory of copies.
        log: Called as `log(op, first_byte, nbytes)` for each piece that ran.
        late: The choices never want progress, so they need not be asked.
        stuck_after_s: How long a call may wait for held work.
    """

    def __init__(
        self,
        lock: threading.Condition,
        choices: Choices,
        order: Order,
        watch: HostWatch,
        log: Callable[[Op, int, int], None],
        *,
        late: bool,
        stuck_after_s: float,
    ) -> None:
        self.call = 0
        self.failure: CUresult | None = None
        self._lock = lock
        self._choices = choices
        self._order = order
        self._watch = watch
        self._log = log
        self._late = late
        self._stuck_after_s = stuck_after_s
        self._time_ms = 0.0

    def queue(self, stream: Stream, op: Op, after: Iterable[Op] = ()) -> None:
        """Add work to a stream."""
        op.piece = op.nbytes if op.nbytes < _PIECES_FROM_BYTES else (op.nbytes + 1) // 2
        self._order.place(stream, op, after)
        stream.queue.append(op)

    def watch_source(self, op: Op) -> None:
        """Keep the source's bytes to see whether the host changes them."""
        self._watch.keep_source(op, self.move)

    def watch_target(self, op: Op) -> None:
        """Keep the target's bytes to see whether the host changes them."""
        self._watch.keep_target(op, self.move)

    def stage(self, op: Op) -> None:
        """Take the source's bytes now; the copy reads these."""
        keeper, staged = backing(op.nbytes)
        self.move(staged, op.source, op.nbytes)
        op.source, op.keepers = staged, (*op.keepers, keeper)

    def progress(self) -> None:
        """Let the device run ahead as far as the schedule wants."""
        while not self._late:
            heads = self._heads()
            answer = self._choices.pick("progress", len(heads) + 1) if heads else 0
            if answer == 0:
                return
            self._run(heads[answer - 1])

    def finish(self, op: Op | None) -> None:
        """Run what is needed until `op` is done, waiting while it is held.

        Raises:
            StuckError: It waited too long.
        """
        deadline_s = 0.0
        while op is not None and not op.done:
            needed, why = self._needed(op)
            if needed is not None:
                deadline_s = 0.0
                self._run(self._next(needed))
                continue
            now_s = time.monotonic()
            deadline_s = deadline_s or now_s + self._stuck_after_s
            if now_s > deadline_s:
                raise StuckError(
                    f"waited {self._stuck_after_s} s for the {op.kind} of call {op.call}: "
                    f"{why}; let it go on from another thread"
                )
            self._lock.wait(_POLL_S)

    def try_to_finish(self, op: Op) -> bool:
        """Run what is needed for `op` without waiting; answer whether it is done."""
        while not op.done:
            needed, _ = self._needed(op)
            if needed is None:
                return False
            self._run(self._next(needed))
        return True

    def await_all(self, ops: Iterable[Op | None]) -> None:
        """Finish operations, and let the host know that they are done."""
        known = [op for op in ops if op is not None]
        for op in known:
            self.finish(op)
        for op in known:
            self._order.host_knows(op, self.call)

    def host_knows(self, op: Op | None) -> None:
        """The host learns that `op` is done."""
        if op is not None:
            self._order.host_knows(op, self.call)

    @staticmethod
    def memory_goes(op: Op) -> None:
        """The caller takes back memory of its own under work that has not run.

        Only the work must not touch it blindly, for it may be unmapped: a source is read
        if it is still there, a target is left alone.
        """
        reads_it = op.accesses[0].block is not None and op.accesses[0].block.kind == "registered"
        op.pageable_source = reads_it and not op.accesses[0].writes
        if not op.pageable_source:
            op.action = _nothing

    def touching(self, block: Block) -> list[Op]:
        """Work on a block whose end the host does not know."""
        return [
            op
            for stream in self._order.streams
            for op in stream.outstanding
            if any(access.block is block for access in op.accesses)
        ]

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Copy real bytes; many of them with the lock released."""
        if nbytes < _UNLOCKED_FROM_BYTES:
            move(target, source, nbytes)
            return
        self._lock.release()
        try:
            move(target, source, nbytes)
        finally:
            self._lock.acquire()

    def _heads(self) -> list[Op]:
        """The operations that could run now of themselves, one for each stream that has one."""
        heads = []
        for stream in self._order.streams:
            if stream.queue:
                op = stream.queue[0]
                if not (op.running or op.lingers) and _may_start(op):
                    heads.append(op)
        return heads

    def _needed(self, op: Op) -> tuple[Op | None, str]:
        """The operation to run next on the way to `op`, or why there is none."""
        while True:
            head = op.stream.queue[0]
            waits_for = next((other for other in head.waits_for if not other.done), None)
            if waits_for is not None:
                op = waits_for
            elif head.running:
                return None, "another thread runs it"
            elif head.ready is not None and not head.ready():
                what = "its stream is held" if head.kind == "hold" else "a value has not come"
                return None, what
            else:
                return head, ""

    def _next(self, needed: Op) -> Op:
        """The needed operation or, if the schedule wants, another that could run."""
        if self._late:
            return needed
        others = [head for head in self._heads() if head is not needed]
        if not others:
            return needed
        return [needed, *others][self._choices.pick("order", len(others) + 1)]

    def _run(self, op: Op) -> None:
        """Run one piece of the operation at the head of its stream."""
        start, count = op.offset, min(op.piece, op.nbytes - op.offset)
        op.running = True
        if start == 0:
            op.began_in_call = self.call
        try:
            if op.failure is not None:
                self.failure = self.failure or op.failure
                count = op.nbytes - start
            elif op.action is not None:
                op.action()
            elif op.kind == "copy":
                self._copy_piece(op, start, count)
            elif op.kind == "fill":
                ctypes.memset(op.target + start, op.value, count)
        finally:
            op.running = False
        self._time_ms += _OP_MS + count / (1 << 30) * _GIB_MS
        op.offset += count
        if op.offset >= op.nbytes:
            self._end(op)
        self._log(op, start, count)
        self._lock.notify_all()

    def _copy_piece(self, op: Op, start: int, count: int) -> None:
        if op.pageable_source:
            move_from_anywhere(op.target + start, op.source + start, count)
            self._watch.compare_source(op, start, count, op.target)
            return
        self._watch.compare_source(op, start, count, op.source)
        self._watch.compare_target(op, start, count)
        self.move(op.target + start, op.source + start, count)
        self._watch.landed(op, start, count)

    def _end(self, op: Op) -> None:
        op.done = True
        op.ended_ms = self._time_ms
        op.waits_for = op.keepers = ()
        stream = op.stream
        stream.queue.popleft()
        if op.kind == "call" or (op.kind == "write-value" and not _on_device(op)):
            # The host sees its own function run, and may see the value arrive.
            self._order.host_knows(op, self.call)
        elif stream.destroyed_at is not None:
            self._order.drop_if_drained(stream)


def _may_start(op: Op) -> bool:
    if op.waits_for and not all(other.done for other in op.waits_for):
        return False
    return op.ready is None or op.ready()


def _nothing() -> None:
    """Work whose target is gone."""


def _on_device(op: Op) -> bool:
    block = op.accesses[0].block
    return block is not None and block.kind == "device"
