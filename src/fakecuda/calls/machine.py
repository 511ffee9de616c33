"""What every call shares: the lock, the gates, faults, the journal, and hazards.

An entry point's method does only what is special about it. `entry` puts around it
what the driver does for all of them: check that the driver is started and the
thread has a context, give back earlier errors, answer with a tuple, and write the
call down.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fakecuda.answers import Answer
from fakecuda.choices import Choices, Late, Trail
from fakecuda.engine import Engine
from fakecuda.enums import CUresult
from fakecuda.faults import STICKY, Fault, Faults
from fakecuda.hazards import Hazard, Site, caller_site, render_site
from fakecuda.journal import Journal
from fakecuda.limits import Accounts, Limits
from fakecuda.memory import Block, Memory
from fakecuda.order import Order
from fakecuda.profile import Profile
from fakecuda.surface import SURFACE, EntryPoint, Gate
from fakecuda.watch import HostWatch
from fakecuda.work import Event, Stream

_LEGACY, _PER_THREAD = 1, 2
_SUCCESS = CUresult.CUDA_SUCCESS
# Answers that are news and not failures: nobody need look at them.
_NEWS = frozenset({CUresult.CUDA_ERROR_NOT_READY})


class Refused(Exception):  # noqa: N818 - an answer of the driver, not an error of the fake
    """A call answers with this code.

    Args:
        code: The result code.
    """

    def __init__(self, code: CUresult) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True, eq=False)
class Context:
    """A primary context.

    Attributes:
        users: How often it is retained.
        lost: The sticky error that it died of, None while it is healthy.
        excused: True when its release has failed: then it is no leak.
        legacy: Its legacy default stream.
        per_thread: Its per-thread default streams, by thread.
    """

    handle: int
    device: int
    site: Site
    legacy: Stream = field(init=False)
    users: int = 0
    lost: CUresult | None = None
    excused: bool = False
    per_thread: dict[int, Stream] = field(default_factory=dict)


class _Here(threading.local):
    """What holds for the thread that makes a call."""

    site: Site = ()
    call = 0
    name = ""
    in_callback = False

    def __init__(self) -> None:
        self.contexts: list[Context] = []


class Machine:
    """The state behind all calls of one fake driver.

    Args:
        profile: The device to be.
        choices: Who decides every "may".
        seed: Of the pattern in memory that nobody wrote.
        limits: What memory there is.
        devices: How many equal devices there are.
        stuck_after_s: How long a call may wait for held work.
    """

    def __init__(
        self,
        profile: Profile,
        choices: Choices,
        seed: str,
        limits: Limits,
        devices: int,
        stuck_after_s: float,
    ) -> None:
        self.profile = profile
        self.faults = Faults()
        self.journal = Journal()
        self._device_count = devices
        self._hazards: list[Hazard] = []
        self._reported: set[tuple[object, ...]] = set()
        self._trail = choices if isinstance(choices, Trail) else Trail(choices)
        self._mutex = threading.Lock()
        self._lock = threading.Condition(self._mutex)
        self._here = _Here()
        self._memory = Memory(seed, profile.device_granule, misalign=profile.misalign)
        self._accounts = Accounts(profile, limits, self._memory)
        watch = HostWatch(self._report)
        self._order = Order(self._report, watch)
        self._watch = watch
        self._engine = Engine(
            self._lock,
            self._trail,
            self._order,
            watch,
            self.journal.ran,
            late=isinstance(choices, Late),
            stuck_after_s=stuck_after_s,
        )
        self._started = self._closed = False
        self._calls = 0
        self._contexts: dict[int, Context] = {}
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, Event] = {}
        self._destroyed: dict[int, Stream | Event] = {}
        self._spare_handles: list[int] = []
        self._newest_handle = 0x5000_0000_0000
        self._stream_count = 0

    def _choose(self, kind: str, options: int) -> int:
        return self._trail.pick(kind, options)

    def _context(self) -> Context:
        """This thread's context; the gate has made sure that there is one."""
        return self._here.contexts[-1]

    def _new_handle(self) -> int:
        """A handle for a stream or event; the driver uses old values again."""
        if self._spare_handles and self._choose("recycle", 2):
            handle = self._spare_handles.pop()
            del self._destroyed[handle]
            return handle
        self._newest_handle += 0x40
        return self._newest_handle

    def _new_stream(self, handle: int, context: Context, flags: int, *, blocking: bool) -> Stream:
        stream = Stream(self._stream_count, handle, context, flags, self._here.site, blocking)
        self._stream_count += 1
        self._order.streams.append(stream)
        return stream

    def _stream(self, handle: int) -> Stream:
        """The stream of this handle; 0, 1 and 2 name the default streams."""
        stream = self._streams.get(handle)
        if stream is not None:
            return stream
        context = self._context()
        if handle in {0, _LEGACY}:
            return context.legacy
        if handle == _PER_THREAD:
            thread = threading.get_ident()
            if thread not in context.per_thread:
                context.per_thread[thread] = self._new_stream(handle, context, 0, blocking=True)
            return context.per_thread[thread]
        raise self._unknown_handle(handle, "stream")

    def _event(self, handle: int) -> Event:
        """The event of this handle."""
        event = self._events.get(handle)
        if event is None:
            raise self._unknown_handle(handle, "event")
        return event

    def _unknown_handle(self, handle: int, word: str) -> Refused:
        gone = self._destroyed.get(handle)
        if gone is not None:
            detail = f"this {word} was destroyed"
            self._report("USE-AFTER-DESTROY", None, gone.destroyed_at or (), detail=detail)
        return Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)

    def _report(
        self,
        hazard: str,
        site: Site | None,
        other: Site = (),
        block: Block | None = None,
        start: int = 0,
        end: int = 0,
        detail: str = "",
    ) -> None:
        """Write a hazard down, once for each pair of call sites; None is this call's."""
        site = self._here.site if site is None else site
        key = (hazard, site, other, block)
        if key in self._reported:
            return
        self._reported.add(key)
        origin: Site = ()
        if block is not None:
            origin = block.site
            if end > start:
                low, high = start - block.address, end - block.address
                detail = f"bytes [{low}, {high}) of {block.name}, {block.nbytes} bytes"
        detail = detail or f"in {self._here.name}"
        sites = (render_site(site), render_site(other), render_site(origin))
        self._hazards.append(Hazard(hazard, detail, *sites, self._calls, self._trail.text))

    # What `entry` puts around each call.

    def _pass_gate(self, gate: Gate) -> None:
        """Refuse a call for which the scene is not set.

        Raises:
            Refused: The driver is not started, there is no context, or it is lost.
        """
        if gate is Gate.OPEN:
            return
        if self._closed:
            raise Refused(CUresult.CUDA_ERROR_DEINITIALIZED)
        if not self._started:
            raise Refused(CUresult.CUDA_ERROR_NOT_INITIALIZED)
        if self._here.in_callback:
            raise Refused(CUresult.CUDA_ERROR_NOT_PERMITTED)
        if gate is Gate.INITIALISED:
            return
        if self._here.contexts:
            self._must_be_alive(self._here.contexts[-1])
        elif gate is Gate.CONTEXT:
            self._report("NO-CONTEXT", None)
            raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)

    def _must_be_alive(self, context: Context) -> None:
        """Refuse work for a context that is lost or gone.

        Raises:
            Refused: It is.
        """
        if context.lost is not None:
            raise Refused(context.lost)
        if not context.users:
            self._report("USE-AFTER-DESTROY", None, detail="the context was released")
            raise Refused(CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED)

    def _perform(self, method: Callable[..., Any], row: EntryPoint, args: tuple[Any, ...]) -> Any:
        """Do the special part of a call, with the faults that were planned for it.

        Raises:
            Refused: The call answers with an error.
        """
        self._pass_gate(row.gate)
        strikes = self.faults.strike(row.name, row.gate)
        error = None
        for strike in strikes:
            self._delay(strike)
            if not strike.deferred:
                error = error or strike.error
        in_context = row.gate is Gate.CONTEXT or row.gate is Gate.OWNER
        if error is None and in_context:
            error = self._earlier_failure()
        if error is not None:
            if (
                row.enqueues
                and int(error) not in STICKY
                and not self._choose("failed-work-runs", 2)
            ):
                # The error may be an earlier operation's: this one is under way all the same.
                method(self, *args)
            self._fail(row, args, error)
        value = method(self, *args)
        for strike in strikes:
            if strike.deferred and strike.error is not None:
                self._doom(strike.error)
        if in_context and self._engine.failure is not None:
            # What this call has waited for went wrong.
            self._fail(row, args, self._engine.failure)
        return value

    def _earlier_failure(self) -> CUresult | None:
        """The error of earlier work that no call has told of yet."""
        error, self._engine.failure = self._engine.failure, None
        return error

    def _fail(self, row: EntryPoint, args: tuple[Any, ...], error: CUresult) -> None:
        self._engine.failure = None
        self.faults.delivered += 1
        if int(error) in STICKY and self._here.contexts:
            self._context().lost = error
        self._excuse(row, args)
        raise Refused(error)

    def _delay(self, strike: Fault) -> None:
        if strike.delay_s:
            self._mutex.release()
            try:
                time.sleep(strike.delay_s)
            finally:
                self._mutex.acquire()

    def _doom(self, error: CUresult) -> None:
        """Make the operation that this call has queued fail when it runs."""
        for stream in self._order.streams:
            if stream.last is not None and stream.last.call == self._here.call:
                stream.last.failure = error

    def _excuse(self, row: EntryPoint, args: Sequence[int]) -> None:
        """What a failed call was about is in doubt: to keep it is right and no leak."""
        if row.name == "cuDevicePrimaryCtxRelease":
            for context in self._contexts.values():
                context.excused |= context.device == args[0]
            return
        for value in args:
            thing = self._streams.get(value) or self._events.get(value) or self._memory.find(value)
            if thing is not None:
                thing.excused = True

    def _answer(self, code: CUresult) -> CUresult | Answer:
        """The error code to return; it notices when it is thrown away unseen."""
        if code in _NEWS:
            return code
        site, name = self._here.site, code.name
        return Answer(code, lambda: self._report("UNCHECKED-ERROR", site, detail=name))


def entry(method: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Make a driver entry point of a method that does the special part.

    The method gives back None, one value or a tuple of values, or raises `Refused`.
    """
    row = SURFACE[method.__name__]
    width = len(row.results)

    def call(self: Machine, *args: Any) -> tuple[Any, ...]:
        _plain_integers(args)
        here = self._here
        with self._mutex:
            self._calls += 1
            here.call = self._engine.call = self._calls
            here.name, here.site = row.name, caller_site()
            try:
                value = self._perform(method, row, args)
            except Refused as refusal:
                values: tuple[Any, ...] = (None,) * width
                self.journal.called(here.call, row.name, args, (refusal.code, *values), here.site)
                result = (self._answer(refusal.code), *values)
            else:
                values = () if width == 0 else (value,) if width == 1 else value
                result = (_SUCCESS, *values)
                self.journal.called(here.call, row.name, args, result, here.site)
            self._engine.progress()
        return result

    call.__name__ = call.__qualname__ = row.name
    call.__doc__ = row.note
    return call


def _plain_integers(args: tuple[Any, ...]) -> None:
    for value in args:
        if not isinstance(value, int):
            raise TypeError(
                f"pass an int, not {type(value).__name__}: the binding lets a buffer object "
                "go when the call returns, before the copy has run"
            )
