"""Work that Ctrl-C cannot tear apart.

Python raises KeyboardInterrupt in the main thread, between any two of its steps: while a
thread is being started, or joined (CPython 3.11 and 3.12 then take it for ended, and a
second join returns at once), or between taking memory and noting that it was taken. A load
therefore runs in a thread of its own. The caller's thread waits, with handlers of signals in
place that do not raise: what a handler would raise, however often, asks the load to stop, and
is raised when the load has stopped and given everything back.
"""

from __future__ import annotations

import signal
import sys
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


class _Signals:
    """Python's handlers of signals, kept from raising into the body.

    Attributes:
        raised: what a handler raised first.
    """

    def __init__(self, stop: Callable[[BaseException], None]) -> None:
        self._stop = stop
        self._found: dict[int, Callable[[int, Any], Any]] = {}
        self.raised: BaseException | None = None

    def __enter__(self) -> Self:
        # Only the main thread handles signals, and only there may handlers be changed.
        if threading.current_thread() is threading.main_thread():
            try:
                self._replace()
            except BaseException:
                self._restore()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _replace(self) -> None:
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self._found[number] = handler
                # Another interpreter than the main one may not.
                with suppress(ValueError):
                    signal.signal(number, self._handle)

    def _restore(self) -> None:
        for number, handler in self._found.items():
            # One that the program changed meanwhile is its own.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:  # noqa: ANN401 - as signal has it
        try:
            self._found[number](number, frame)
        except BaseException as error:  # noqa: BLE001 - raised when the body has ended
            if self.raised is None:
                self.raised = error
                self._stop(error)


class _Aside:
    """One piece of work and its thread."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self.value: object = None
        self.error: BaseException | None = None
        self.over = False

    def run(self) -> None:
        """Start the thread, and wait until it has ended."""
        thread = threading.Thread(target=self._run, name="weightload")
        thread.start()
        thread.join()

    def _run(self) -> None:
        try:
            self.value = self._work()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self.error = error
        self.over = True


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
    aside, signals = _Aside(work), _Signals(stop)
    try:
        with signals:
            aside.run()
    except BaseException as error:  # noqa: BLE001 - one that came when the handlers were back
        signals.raised = error
    if aside.error is not None:
        raise aside.error
    value: _T = aside.value  # type: ignore[assignment] # it is what the work returned
    if signals.raised is not None:
        if aside.over:
            undo(value)
        raise signals.raised
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
