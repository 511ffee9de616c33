"""Work beside the caller's thread: an interrupt never leaves it running, and never loses it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from weightload.aside import run_aside

if TYPE_CHECKING:
    from collections.abc import Callable


def interrupted_start(monkeypatch: pytest.MonkeyPatch, *, runs: bool) -> None:
    """Have Thread.start interrupted before the thread begins, or when it has begun."""
    honest: Callable[[threading.Thread], None] = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if runs:
            honest(thread)
            thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)


def test_an_interrupt_before_the_thread_begins_does_no_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work never begins, and is not waited for."""
    done: list[str] = []
    interrupted_start(monkeypatch, runs=False)

    def work() -> str:
        done.append("work")
        return "value"

    with pytest.raises(KeyboardInterrupt):
        run_aside(work, lambda _: done.append("stop"), done.append)
    assert done == []


def test_an_interrupt_when_the_thread_has_begun_undoes_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The work is told to stop, waited for, and undone; the interrupt itself is raised."""
    done: list[object] = []
    interrupted_start(monkeypatch, runs=True)
    with pytest.raises(KeyboardInterrupt):
        run_aside(lambda: "value", lambda error: done.append(type(error)), done.append)
    assert done == [KeyboardInterrupt, "value"]


def test_what_the_work_raises_is_raised_in_the_callers_thread() -> None:
    """The same error, not a copy."""
    error = ValueError("one")

    def work() -> None:
        raise error

    with pytest.raises(ValueError, match="one") as caught:
        run_aside(work, lambda _: None, lambda _: None)
    assert caught.value is error
