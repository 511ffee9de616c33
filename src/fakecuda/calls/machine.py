"""What every call shares: the lock, the gates, faults, the journal, and hazards.

An entry point's method does only what is special about it. `entry` puts around it
what the driver does for all of them: check that the driver is started and the
thread has a context, give back earlier errors, answer with a tuple, and write the
call down.
"""

import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from fakecuda.choices import Choices, Late, Trail
from fakecuda.enums import CUresult
from fakecuda.hazards import Hazard, Site, render_site
from fakecuda.journal import Journal
from fakecuda.memory import Block, Memory
from fakecuda.profile import Profile
from fakecuda.surface import SURFACE, Gate
from fakecuda.work import Engine, Event, Stream

_LEGACY, _PER_THREAD = 1, 2
_SITE_DEPTH = 4
_SUCCESS = CUresult.CUDA_SUCCESS


class Refused(Exception):  # noqa: N818 - not an error of the fake: an answer
    """A call answers with this code.

    Args:
        code: The result code.
    """

    def __init__(self, code: CUresult) -> None:
        super().__init__(code)
        self.code = code


class Context:
    """A primary context.

    Attributes:
        users: How often it is retained.
        lost: The sticky error that killed it, None while it is healthy.
    """

    def __init__(self, handle: int, device: int) -> None:
        self.handle = handle
        self.device = device
        self.users = 0
        self.site: Site = ()
        self.lost: CUresult | None = None
        self.legacy: Stream
        self.per_thread: dict[int, Stream] = {}


class Machine:
    """The state behind all calls of one fake driver.

    Args:
        profile: The device to be.
        choices: Who decides every "may".
        seed: Of the poison pattern.
        stuck_after_s: How long a call may wait on held work.
        devices: How many equal devices there are.
    """

    def __init__(
        self, profile: Profile, choices: Choices, seed: str, stuck_after_s: float, devices: int
    ) -> None:
        self.profile = profile
        self.journal = Journal()
        self._hazards: list[Hazard] = []
        self._reported: set[tuple[object, ...]] = set()
        self._trail = choices if isinstance(choices, Trail) else Trail(choices)
        self._lock = threading.Condition(threading.Lock())
        self._local = threading.local()
        self._memory = Memory(seed, profile.device_granule, misalign=profile.misalign)
        self._engine = Engine(
            self._lock,
            self._trail,
            self._report,
            self.journal.ran,
            stuck_after_s,
            late=isinstance(choices, Late),
        )
        self._started = False
        self._calls = 0
        self._contexts: dict[int, Context] = {}
        self._current: dict[int, list[Context]] = {}
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, Event] = {}
        self._destroyed: dict[int, Stream | Event] = {}
        self._next_handle = 0x5000_0000_0000
        self._next_stream = 0
        self._device_count = devices

    # Facts about the call that runs on this thread.

    @property
    def _site(self) -> Site:
        site: Site = self._local.site
        return site

    @property
    def _call(self) -> int:
        call: int = self._local.call
        return call

    def _context(self) -> Context:
        """This thread's context; the gate has checked that there is one."""
        return self._current[threading.get_ident()][-1]

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
        """Write a hazard down, once for each pair of places."""
        site = self._local.site if site is None else site
        key = (hazard, site, other, block)
        if key in self._reported:
            return
        self._reported.add(key)
        if block is not None and end > start:
            low, high = start - block.address, end - block.address
            detail = f"{detail} bytes [{low}, {high}) of {block.name}".strip()
        self._hazards.append(
            Hazard(
                hazard,
                detail or "see the call sites",
                render_site(site),
                render_site(other),
                render_site(block.site) if block is not None else "",
                self._calls,
                self._trail.text,
            )
        )

    def _new_handle(self) -> int:
        self._next_handle += 0x40
        return self._next_handle

    def _new_stream(self, handle: int, context: Context, flags: int, *, blocking: bool) -> Stream:
        stream = Stream(self._next_stream, handle, context, flags, self._site, blocking=blocking)
        self._next_stream += 1
        self._engine.streams.append(stream)
        return stream

    def _choose(self, kind: str, options: int) -> int:
        return self._trail.pick(kind, options)

    def _stream(self, handle: int) -> Stream:
        """The stream of this handle; 0, 1 and 2 name the default streams."""
        context = self._context()
        if handle in {0, _LEGACY}:
            return context.legacy
        if handle == _PER_THREAD:
            thread = threading.get_ident()
            if thread not in context.per_thread:
                context.per_thread[thread] = self._new_stream(handle, context, 0, blocking=True)
            return context.per_thread[thread]
        stream = self._streams.get(handle)
        if stream is None:
            raise self._unknown_handle(handle, "stream")
        return stream

    def _unknown_handle(self, handle: int, word: str) -> Refused:
        gone = self._destroyed.get(handle)
        if gone is not None and gone.destroyed_at is not None:
            detail = f"this {word} was destroyed"
            self._report("USE-AFTER-DESTROY", None, gone.destroyed_at, detail=detail)
        return Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)

    def _gate(self, gate: Gate) -> None:
        if gate is Gate.OPEN:
            return
        if not self._started:
            raise Refused(CUresult.CUDA_ERROR_NOT_INITIALIZED)
        if gate is Gate.CONTEXT:
            stack = self._current.get(threading.get_ident())
            if not stack:
                self._report("NO-CONTEXT", None)
                raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
            context = stack[-1]
            if context.lost is not None:
                raise Refused(context.lost)
            if not context.users:
                self._report("USE-AFTER-DESTROY", None, detail="the context was released")
                raise Refused(CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED)


def call_site() -> Site:
    """The callers of the entry point, innermost first."""
    frame = sys._getframe(2)  # noqa: SLF001 - the stack itself is the fact wanted
    out = []
    while frame is not None and len(out) < _SITE_DEPTH:
        out.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(out)


def _plain(args: tuple[Any, ...]) -> None:
    for value in args:
        if not isinstance(value, int):
            raise TypeError(
                f"pass an int, not {type(value).__name__}: the binding lets a buffer object "
                "go when the call returns, before the copy has run"
            )


_Method = TypeVar("_Method", bound=Callable[..., Any])


def entry(method: _Method) -> Callable[..., tuple[Any, ...]]:
    """Make a driver entry point of a method that does the special part.

    The method gives back None, one value, or a tuple of values, or raises `Refused`.
    """
    name = method.__name__
    row = SURFACE[name]
    gate, width = row.gate, len(row.results)
    failed = (None,) * width

    def call(self: Machine, *args: Any) -> tuple[Any, ...]:
        _plain(args)
        local = self._local
        with self._lock:
            self._calls += 1
            local.call = self._engine.call = self._calls
            local.site = call_site()
            try:
                self._gate(gate)
                value = method(self, *args)
            except Refused as refusal:
                result: tuple[Any, ...] = (refusal.code, *failed)
            else:
                if width == 0:
                    result = (_SUCCESS,)
                elif width == 1:
                    result = (_SUCCESS, value)
                else:
                    result = (_SUCCESS, *value)
            self.journal.called(local.call, name, args, result, local.site)
            self._engine.progress()
        return result

    call.__name__ = name
    call.__qualname__ = name
    call.__doc__ = row.note
    return call
