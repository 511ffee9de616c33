"""The process that legs are forked from.

Each leg is a process of its own, but starting Python and importing torch are not what a leg
measures, and take seconds where a load takes a fraction of one.  This process does it once,
before any arm's folder is on the path and without touching a device, and is forked for every
leg.

It keeps a leg's process id taken until the harness has ended the whole group, and the kernel
ends it with the harness, and every leg with it (see ``process``).
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import socket
import struct
import subprocess
import sys
import traceback
import warnings
from contextlib import suppress
from typing import IO, TYPE_CHECKING, NoReturn, Self

from loadproof.errors import LegError
from loadproof.measure import child
from loadproof.measure.process import end_with

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

# What serve legs import, as the harness's own, before an arm's folder is on the path.  They ask
# nobody on the network, and the hub's client reads that once.  On the CPU torch's threads sleep
# while they wait for each other: where other work is done beside them, those that spin instead
# take from each other what they wait for, and a fraction of a second becomes many.
SERVER_MODULE = "loadproof.measure.server"
SERVER_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}

# What is asked of the process: fork a leg whose standard files come along, or collect one.
_FORK, _COLLECT = 1, 2
_QUESTION, _ANSWER = struct.Struct("=Bq"), struct.Struct("=q")

# Importing torch and transformers for the first time, from a slow disk, takes minutes.
_START_TIMEOUT_S = 600.0
# A fork takes milliseconds, and seconds on a machine that swaps.  A process that stands still
# for longer than this was stopped, and would hold the harness up for ever.
_ANSWER_TIMEOUT_S = 120.0
# No pipe of Linux holds more unless root has said so: one read empties it.
_PIPE_BYTES = 1 << 20


class Template:
    """The harness's side: starts the process, and legs from it."""

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the process, and wait until it is ready.

        Args:
            modules: What it imports.
            environment: Variables beside the harness's own.

        Raises:
            LegError: It could not import them, or not in time.
        """
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(os.getpid())]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*command, *modules],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={**os.environ, **(environment or {})},
                )
        except OSError as error:
            ours.close()
            raise LegError(
                f"no process could be started to fork legs from ({error.strerror}); free memory "
                "or raise the limit on processes."
            ) from error
        self._socket = ours
        try:
            self._hear(_START_TIMEOUT_S)
        except LegError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process; it has no legs left."""
        self._socket.close()
        try:
            self._process.wait(_ANSWER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def fork(self, stderr: int) -> ForkedLeg:
        """Start a leg.

        Args:
            stderr: Where its standard error goes.

        Raises:
            LegError: The process is gone or stands still, or could not fork.
        """
        (read_in, write_in), (read_out, write_out) = os.pipe(), os.pipe()
        try:
            pid = self._ask(_FORK, files=[read_in, write_out, stderr])
        except LegError:
            os.close(write_in)
            os.close(read_out)
            raise
        finally:
            os.close(read_in)
            os.close(write_out)
        return ForkedLeg(self, pid, os.fdopen(write_in, "wb"), os.fdopen(read_out, "rb"))

    def collect(self, pid: int) -> int:
        """How a leg that has ended ended, as subprocess counts it."""
        return self._ask(_COLLECT, pid)

    def _ask(self, what: int, number: int = 0, files: Sequence[int] = ()) -> int:
        # A process that is gone is found by its silence.
        with suppress(OSError):
            socket.send_fds(self._socket, [_QUESTION.pack(what, number)], files)
        return self._hear(_ANSWER_TIMEOUT_S)

    def _hear(self, patience_s: float) -> int:
        self._socket.settimeout(patience_s)
        try:
            answer = self._socket.recv(_ANSWER.size)
        except TimeoutError as error:
            # Its legs end with it.
            self._process.kill()
            raise LegError(
                f"the process that legs are forked from did not answer within {patience_s:g} s "
                "and was killed; see that nothing stops it (SIGSTOP) and that memory is free."
            ) from error
        except OSError:
            answer = b""
        if not answer:
            raise LegError(
                "the process that legs are forked from ended; run `python -c 'import torch'` to "
                "see why, and look for the kernel's out-of-memory messages."
            )
        (found,) = _ANSWER.unpack(answer)
        return int(found)


class ForkedLeg:
    """One leg's process, as far as the harness needs it.

    Attributes:
        pid: Of the process, which leads a session and a group of its own.
        stdin: Its standard input.
        stdout: Its standard output.
        returncode: How it ended, once it was waited for.
    """

    def __init__(self, template: Template, pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._template = template
        self._ended = os.pidfd_open(pid)
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode = 0

    def said(self) -> Iterator[bytes]:
        """Return what it says, as it comes, until it has said all or has ended.

        Others may hold its output open for longer than it lives: what they say afterwards, and
        whether they end, is not waited for.
        """
        output = self.stdout.fileno()
        os.set_blocking(output, False)
        ready = select.poll()
        ready.register(output, select.POLLIN)
        ready.register(self._ended, select.POLLIN)
        ended = False
        while not ended:
            ended = self._ended in dict(ready.poll())
            try:
                chunk = os.read(output, _PIPE_BYTES)
            except BlockingIOError:
                continue
            if not chunk:
                return
            yield chunk

    def await_end(self) -> None:
        """Wait until it has ended, and leave its process id taken."""
        ended = select.poll()
        ended.register(self._ended, select.POLLIN)
        ended.poll()

    def wait(self) -> None:
        """Wait until it has ended, and collect it."""
        self.await_end()
        os.close(self._ended)
        self.returncode = self._template.collect(self.pid)


def main(end: int, parent: int, modules: Sequence[str]) -> None:
    """Import, then fork and collect until the harness closes its end."""
    end_with(parent)
    for name in modules:
        importlib.import_module(name)
    # What is here now is never garbage, and looking at it would copy its pages in every leg.
    gc.collect()
    gc.freeze()
    # A harness that is interrupted may close its end before it has heard the last answer.
    with suppress(ConnectionError):
        _serve(socket.socket(fileno=end))


def _serve(asked: socket.socket) -> None:
    asked.send(_ANSWER.pack(0))
    while True:
        question, files, _, _ = socket.recv_fds(asked, _QUESTION.size, 3)
        if not question:
            return
        what, number = _QUESTION.unpack(question)
        if what == _FORK:
            number = _fork_leg(asked, files)
        else:
            _, status = os.waitpid(number, 0)
            number = os.waitstatus_to_exitcode(status)
        asked.send(_ANSWER.pack(number))


def _fork_leg(asked: socket.socket, files: Sequence[int]) -> int:
    """Fork a leg, and return its id once it leads a group of its own."""
    led, leads = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        # Libraries keep threads that wait for work; no leg uses them before they are made anew.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        end_with(parent)
        os.setsid()
        asked.close()
        for standard, file in enumerate(files):
            os.dup2(file, standard)
        for file in (*files, led, leads):
            os.close(file)
        _run_child()
    for file in (*files, leads):
        os.close(file)
    os.read(led, 1)
    os.close(led)
    return pid


def _run_child() -> NoReturn:
    """Do what a leg does; nothing of the template is ever run in it."""
    try:
        child.main()
    except BaseException:  # noqa: BLE001 -- told on standard error, where the harness looks
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
