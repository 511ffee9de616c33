"""Work that Ctrl-C cannot tear apart.

Python raises KeyboardInterrupt in the main thread, between any two of its steps: while a
thread is being started, or joined (CPython 3.11 and 3.12 then take it for ended, and a
second join returns at once), or between taking memory and noting that it was taken. A load
therefore runs in a thread of its own. The caller's thread waits; an interrupt there asks the
load to stop, and is raised when the load has stopped and given everything back.
"""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


class _Aside:
    """One piece of work and its thread."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._thread = threading.Thread(target=self._run, name="weightload")
        # Whoever takes it first decides whether the work begins.
        self._claim = threading.Lock()
        self._ended = threading.Lock()
        self._ended.acquire()
        self.value: object = None
        self.error: BaseException | None = None
        self.over = False

    def _run(self) -> None:
        if not self._claim.acquire(blocking=False):
            return
        try:
            self.value = self._work()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.error = error
        self.over = True
        self._ended.release()

    def start(self) -> None:
        """Begin; an interrupt is raised only if the work has not begun and never will."""
        try:
            self._thread.start()
        except BaseException:
            if self._claim.acquire(blocking=False):
                raise
            raise _BegunError from None

    def wait(self) -> None:
        """Wait until the work is over; an interrupt here leaves it to be called again."""
        while not self.over:
            self._ended.acquire()


class _BegunError(Exception):
    """An interrupt came while the thread was being started, and it runs."""


def run_aside(
    work: Callable[[], _T], stop: Callable[[BaseException], None], undo: Callable[[_T], None]
) -> _T:
    """Do some work in a thread of its own, and wait for it whatever happens.

    Args:
        work: what to do.
        stop: called with the interrupt, from the caller's thread; the work should then end
            soon, and may raise it.
        undo: called with what the work returned although it was to stop.

    Returns:
        What the work returned.

    Raises:
        BaseException: what the work raised, or the interrupt.
    """
    aside = _Aside(work)
    interrupt: BaseException | None = None
    try:
        aside.start()
    except _BegunError as begun:
        interrupt = begun.__context__ or KeyboardInterrupt()
        stop(interrupt)
    while not aside.over:
        try:
            aside.wait()
        except BaseException as error:  # noqa: BLE001 - raised when the work is over
            if interrupt is None:
                interrupt = error
                stop(error)
    if aside.error is not None:
        raise aside.error
    value: _T = aside.value  # type: ignore[assignment] # it is what the work returned
    if interrupt is not None:
        undo(value)
        raise interrupt
    return value


def torch_stream(ordinal: int) -> AbstractContextManager[object]:
    """This thread's current stream of torch, to be entered in another thread.

    Args:
        ordinal: the device.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or ordinal >= torch.cuda.device_count():
        # Without a context no stream but the default one can be current.
        return nullcontext()
    context: AbstractContextManager[object] = torch.cuda.stream(torch.cuda.current_stream(ordinal))
    return context
