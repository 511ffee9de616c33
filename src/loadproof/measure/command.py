"""The process of a loader that is a program, seen from the process of its leg.

The clock is the harness's: it runs from the line that asks for the load until the line that
says it is done has been read and the loader's processes stand still.  They are halted there and
then, so what is looked at afterwards is what was there when the clock stopped; what a loader's
own clock says is not asked.

However a loader behaves, there is one outcome with a code.  One that says nothing at all is ended
by the leg's own limit: it lives in the group of the leg's process, and the kernel ends it when
that process dies.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec

from loadproof.errors import LegError
from loadproof.measure import protocol
from loadproof.measure.memory import storage_read_bytes
from loadproof.measure.process import end_with

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadproof.measure.messages import LoaderIdentity

# A tensor takes about 150 bytes of a line: this is enough for some 400,000.
LINE_BYTES_MAX = 64 << 20
_PIECE_BYTES = 1 << 20
# How long processes may take to stop, at first.
_PATIENCE_S = 0.02
_STILL = "TtZX"  # proc_pid_stat(5): stopped, traced, zombie, dead

_decoder = msgspec.json.Decoder(protocol.Answer)
_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class CommandError(LegError):
    """A loader's process failed, ended or broke the protocol.

    Attributes:
        code: The stable word for it.
    """

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class CommandLoader:
    """A loader's process.

    Attributes:
        pid: Its id.
        identity: Who it says it is; None until it was greeted.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Start it.

        Args:
            command: The words that start it.

        Raises:
            CommandError: It cannot be started.
        """
        self.identity: LoaderIdentity | None = None
        self._heard = bytearray()
        self._step = "hello"
        try:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # This process has one thread yet, so running Python after the fork is safe.
                preexec_fn=partial(end_with, os.getpid()),  # noqa: PLW1509
            )
        except OSError as error:
            raise CommandError(
                "loader-ended", f"The loader cannot be started: {error.strerror}."
            ) from error
        self.pid = self._process.pid

    def greet(self, device: str) -> None:
        """Wait until it is ready to load.

        Args:
            device: What it is told to load onto.

        Raises:
            CommandError: It ended, or said something else.
        """
        self._say(protocol.Hello(device=device))
        ready = self._decoded(self._line(), protocol.Ready)
        if ready.protocol != protocol.VERSION:
            raise CommandError(
                "protocol-version",
                f"The loader speaks version {ready.protocol} of the protocol, and this harness "
                f"version {protocol.VERSION}.",
            )
        self.identity = ready.loader

    def timed_load(
        self, load: protocol.Load, delay_fraction: float
    ) -> tuple[protocol.Loaded, float]:
        """Ask for the load, and return what was loaded and how long that took.

        Args:
            load: What to load.
            delay_fraction: Sleep for this fraction of the load's own time, inside the timed part.

        Raises:
            CommandError: It failed, ended, or said something else.
        """
        self._step = "load"
        if self._heard or select.select([self._answers], [], [], 0)[0]:
            # One that answers before it is asked could be done before the clock begins.
            self._fail_out_of_turn()
        begun = perf_counter()
        self._say(load)
        line = self._line()
        self._halt()
        if delay_fraction:
            sleep(delay_fraction * (perf_counter() - begun))
        elapsed_s = perf_counter() - begun
        loaded = self._decoded(line, protocol.Loaded)
        wrong = protocol.misplaced(loaded)
        if wrong is not None:
            raise CommandError("protocol-tensors", f"The loader's answer is not right: {wrong}.")
        return loaded, elapsed_s

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the halted processes run meanwhile."""
        self._signal(signal.SIGCONT)
        yield
        self._halt()

    def release(self) -> None:
        """Let it run again, free its memory and end.

        Raises:
            CommandError: It did not end as it should.
        """
        self._step = "release"
        self._signal(signal.SIGCONT)
        self._say(protocol.Release())
        self._decoded(self._line(), protocol.Bye)
        if self._process.wait():
            raise self._ended()

    def read_bytes(self) -> int | None:
        """Return how many bytes the kernel fetched from storage for its processes so far."""
        counts = [storage_read_bytes(pid) for pid in self._family()]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    @property
    def _answers(self) -> int:
        if self._process.stdout is None:
            raise AssertionError
        return self._process.stdout.fileno()

    def _say(self, message: protocol.Asked) -> None:
        if self._process.stdin is None:
            raise AssertionError
        content = memoryview(msgspec.json.encode(message) + b"\n")
        try:
            while content:
                content = content[self._process.stdin.write(content) :]
        except BrokenPipeError:
            # What it said before it left may say why.
            self._fail_out_of_turn()

    def _line(self) -> bytes:
        """Read one line, without its end."""
        looked_at = 0
        while (end := self._heard.find(b"\n", looked_at)) < 0:
            looked_at = len(self._heard)
            if looked_at > LINE_BYTES_MAX:
                raise CommandError(
                    "protocol-line", f"A line of the loader is longer than {LINE_BYTES_MAX} bytes."
                )
            piece = os.read(self._answers, _PIECE_BYTES)
            if not piece:
                self._process.wait()
                raise self._ended()
            self._heard += piece
        line = bytes(self._heard[:end])
        del self._heard[: end + 1]
        return line

    def _decoded(self, line: bytes, kind: type[_Kind]) -> _Kind:
        """Return the answer that a line is; it has to be of this kind."""
        answer = self._answer(line)
        if not isinstance(answer, kind):
            raise CommandError(
                "protocol-order",
                f"The loader said {_name(type(answer))!r}, and {_name(kind)!r} was its turn.",
            )
        return answer

    def _answer(self, line: bytes) -> protocol.Ready | protocol.Loaded | protocol.Bye:
        try:
            answer: protocol.Answer = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CommandError(
                "protocol-line",
                f"A line of the loader is no answer to {self._step!r}: {error}; what is not for "
                "the harness belongs on standard error.",
            ) from error
        if isinstance(answer, protocol.Error):
            raise CommandError("loader-raised", f"The loader says: {answer.message}")
        return answer

    def _fail_out_of_turn(self) -> NoReturn:
        """Fail by what the loader did when it was not its turn: an error, its end, an answer."""
        answer = self._answer(self._line())
        raise CommandError(
            "protocol-order", f"The loader said {_name(type(answer))!r} before it was asked."
        )

    def _ended(self) -> CommandError:
        status = self._process.returncode
        how = f"ended with status {status}"
        if status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        return CommandError("loader-ended", f"The loader's process {how} at {self._step!r}.")

    def _halt(self) -> None:
        """Stop the loader's processes, and come back when no thread of them runs any more."""
        patience_s = _PATIENCE_S
        since = perf_counter()
        while moving := [pid for pid in self._family() if _moves(pid)]:
            for pid in moving:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            if perf_counter() - since > patience_s:
                # One that is just starting another stops only when that one has become a
                # program, and so never if it was stopped before: all go on for a moment.
                self._signal(signal.SIGCONT)
                sleep(patience_s)
                patience_s *= 2
                since = perf_counter()

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._family():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _family(self) -> list[int]:
        """Return the process, its children and theirs, as far as the kernel names them."""
        found = [self.pid]
        for pid in found:  # It grows meanwhile.
            for task in _tasks(pid):
                with suppress(OSError):
                    found += map(int, (task / "children").read_text("ascii").split())
        return found


def _name(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag)


def _moves(pid: int) -> bool:
    """Say whether any thread of a process may still do something."""
    for task in _tasks(pid):
        with suppress(OSError):
            # The name of a process, in parentheses, may hold anything.
            if (task / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[
                0
            ] not in _STILL:
                return True
    return False


def _tasks(pid: int) -> list[Path]:
    with suppress(OSError):
        return list(Path(f"/proc/{pid}/task").iterdir())
    return []
