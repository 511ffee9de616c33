"""Work beside the caller's thread: an interrupt never leaves it running, and never loses it."""

from __future__ import annotations

import signal
import threading

import pytest

from weightload.aside import run_aside


class _Storm:
    """Work that a storm of interrupts falls on until it is told to stop."""

    def __init__(self, *, to_the_end: int) -> None:
        self.told: list[BaseException] = []
        self.undone: list[str] = []
        self._told = threading.Event()
        self._to_the_end = to_the_end

    def work(self) -> str:
        """Interrupt the main thread until it says stop, and some times more."""
        while not self._told.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        for _ in range(self._to_the_end):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return "value"

    def stop(self, error: BaseException) -> None:
        """Be told, and be interrupted in that as well."""
        self.told.append(error)
        signal.raise_signal(signal.SIGINT)
        self._told.set()


@pytest.mark.parametrize("to_the_end", [0, 1, 1000])
def test_any_number_of_interrupts_is_one_when_the_work_has_stopped(to_the_end: int) -> None:
    """Told to stop once, undone once, and raised when no thread of the work is left."""
    storm = _Storm(to_the_end=to_the_end)
    with pytest.raises(KeyboardInterrupt) as caught:
        run_aside(storm.work, storm.stop, storm.undone.append)
    assert storm.told == [caught.value]
    assert storm.undone == ["value"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_does_not_raise_is_called_at_once() -> None:
    """A program's own signals are handled while it loads, and its handlers stay its own."""
    seen = threading.Event()
    found = signal.signal(signal.SIGUSR1, lambda *_: seen.set())

    def work() -> bool:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return seen.wait(60)

    try:
        assert run_aside(work, lambda _: None, lambda _: None)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, found)


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    """What the program's own handler puts in its place is not undone."""

    def other(*_: object) -> None:
        """Do nothing."""

    def first(*_: object) -> None:
        signal.signal(signal.SIGUSR1, other)
        seen.set()

    seen = threading.Event()
    found = signal.signal(signal.SIGUSR1, first)

    def work() -> bool:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        return seen.wait(60)

    try:
        assert run_aside(work, lambda _: None, lambda _: None)
        assert signal.getsignal(signal.SIGUSR1) is other
    finally:
        signal.signal(signal.SIGUSR1, found)


def test_a_thread_that_cannot_be_started_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was done, so nothing is undone, and the handlers are as they were."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    done: list[str] = []
    with pytest.raises(RuntimeError, match="new thread"):
        run_aside(lambda: "value", lambda _: None, done.append)
    assert done == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_what_the_work_raises_is_raised_in_the_callers_thread() -> None:
    """The same error, not a copy."""
    error = ValueError("one")

    def work() -> None:
        raise error

    with pytest.raises(ValueError, match="one") as caught:
        run_aside(work, lambda _: None, lambda _: None)
    assert caught.value is error
