"""What legs are forked from: legs are strangers to each other, and whatever ends it is told."""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from loadproof.errors import LegError
from loadproof.measure import template as template_module
from loadproof.measure.leg import run_leg
from loadproof.measure.messages import Failure, Request, Result
from loadproof.measure.template import Template

if TYPE_CHECKING:
    from collections.abc import Callable

    Stub = Callable[..., Request]

# Loads for real, through the loader of this repository.
REAL = """
    from weightload import load as _load

    def load(*arguments, **options):
        return _load(*arguments, **options)
    """


def test_a_template_that_cannot_import_says_so() -> None:
    """A module that is missing is an error before any leg, and the process is gone."""
    with pytest.raises(LegError, match="forked from"):
        Template(["no_such_module"])
    assert psutil.Process().children(recursive=True) == []


def test_a_template_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that cannot be started is one sentence."""
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(LegError, match="could be started"):
        Template([])


def test_a_template_that_was_killed_says_so(stub: Stub) -> None:
    """A leg that can no longer be forked is an error, and nothing waits for it."""
    with Template([]) as template:
        (process,) = psutil.Process().children()
        process.kill()
        with pytest.raises(LegError, match="forked from"):
            run_leg(stub(REAL), template, 60.0)


def test_a_template_whose_harness_does_not_listen_ends_quietly() -> None:
    """A harness that is interrupted while it starts one leaves no traceback of it."""
    ours, theirs = socket.socketpair()
    words = [sys.executable, "-P", "-m", template_module.__name__, str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(
            [*words, str(os.getpid())],
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
    with process:
        select.select([ours], [], [], 60.0)
        # What it has said by now is lost, and that is what it meets.
        ours.close()
        _, complained = process.communicate(timeout=60.0)
    assert (process.returncode, complained) == (0, "")


def test_a_template_that_was_stopped_says_so(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that stands still is given up after a while, and ended."""
    monkeypatch.setattr(template_module, "_ANSWER_TIMEOUT_S", 0.2)
    with Template([]) as template:
        (process,) = psutil.Process().children()
        process.suspend()
        with pytest.raises(LegError, match="did not answer"):
            run_leg(stub(REAL), template, 60.0)
    assert not process.is_running()


def test_a_template_that_was_stopped_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stands still when no leg is left holds nobody up."""
    monkeypatch.setattr(template_module, "_ANSWER_TIMEOUT_S", 0.2)
    with Template([]):
        (process,) = psutil.Process().children()
        process.suspend()
    assert not process.is_running()


def test_legs_are_strangers_to_each_other(stub: Stub) -> None:
    """What a leg imports and sets stays in it, and each leads a session of its own."""
    source = """
        import os, sys
        from weightload import load as _load

        assert not hasattr(sys, "was_here") and os.getsid(0) == os.getpid()
        sys.was_here = True

        def load(*arguments, **options):
            return _load(*arguments, **options)
        """
    request = stub(source)
    with Template([]) as template:
        for _ in range(2):
            ended = run_leg(request, template, 60.0)
            assert isinstance(ended.outcome, Result), ended.said
    assert psutil.Process().children(recursive=True) == []


def test_the_template_holds_no_loader() -> None:
    """Whatever an arm brings is imported in its own legs: the template has none of it."""
    source = (
        "import sys, loadproof.measure.template; "
        "print(sorted({'weightload', 'torch', 'transformers'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", source], capture_output=True, check=True)
    assert told.stdout.strip() == b"[]"


@pytest.mark.parametrize(("module", "name"), [(tempfile, "TemporaryFile"), (os, "pipe")])
def test_a_leg_that_cannot_be_started_is_a_failure_with_a_code(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    """Without room for its output or for its pipes a leg has an outcome all the same."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    request = stub(REAL)
    with Template([]) as template:
        monkeypatch.setattr(module, name, full)
        found = run_leg(request, template, 60.0).outcome
    sentence = "Its process could not be started: No space left on device."
    assert found == Failure("leg-not-started", sentence)
