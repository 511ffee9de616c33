"""One leg, seen from the parent: start a fresh process, watch it, and leave nothing running.

The process leads a session of its own, so that Ctrl-C reaches the harness alone and the
harness ends the whole group, whatever the loader started in it.  If the harness itself is
killed, the kernel ends the leg (see ``child``).  How a leg ended is always an outcome: a
result, or a failure with a code; a leg is never dropped and never run again.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import msgspec

from loadproof.measure.memory import MemoryPeaks, MemorySampler
from loadproof.measure.messages import Elsewhere, Failure, Message, Request, Result, Stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from typing import IO

    from loadproof.measure.template import ForkedLeg, Template

_decoder = msgspec.json.Decoder(Message)


class Ended(msgspec.Struct, frozen=True):
    """How one leg ended.

    Attributes:
        outcome: What it saw, or why it saw nothing.
        memory: The peaks that the parent saw meanwhile.
        said: What the process wrote to its standard error.
    """

    outcome: Result | Failure
    memory: MemoryPeaks
    said: str


def run_leg(
    request: Request, template: Template, timeout_s: float, mapped_files: Sequence[str] = ()
) -> Ended:
    """Run one leg to its end.

    Args:
        request: What to do.
        template: What it is forked from.
        timeout_s: After this the leg's processes are killed and it counts as failed.
        mapped_files: Names of files whose private copies in memory are watched for.

    Raises:
        LegError: The template is gone, or stands still.
    """
    sampler = MemorySampler(mapped_files)
    try:
        process, said = _start(template)
    except OSError as error:
        why = f"Its process could not be started: {error.strerror}."
        return Ended(Failure("leg-not-started", why), sampler.stop(), "")
    with said:
        sampler.start(process.pid)
        timed_out = threading.Event()
        watchdog = threading.Timer(timeout_s, _expire, (process.pid, timed_out))
        watchdog.daemon = True
        watchdog.start()
        try:
            messages = _converse(process, request, sampler)
        finally:
            # The group is ended before its leader is waited for: until then the leader's
            # process id, which names the group, cannot be given to anybody else.
            _kill_group(process.pid)
            try:
                process.wait()
            finally:
                watchdog.cancel()
                memory = sampler.stop()
        said.seek(0)
        text = said.read().decode("utf-8", "replace")
    outcome = _outcome(messages, process.returncode)
    if timed_out.is_set():
        outcome = Failure("leg-timeout", f"It did not end within {timeout_s:g} s and was killed.")
    return Ended(outcome, memory, text)


def _start(template: Template) -> tuple[ForkedLeg, IO[bytes]]:
    """Start a leg's process, its standard error going to a file that has no name.

    Raises:
        OSError: There is no room for the file or for the pipes.
        LegError: The template is gone.
    """
    with ExitStack() as stack:
        said = stack.enter_context(tempfile.TemporaryFile())
        process = template.fork(said.fileno())
        stack.pop_all()
    return process, said


def _converse(
    process: ForkedLeg, request: Request, sampler: MemorySampler
) -> list[Message | None]:
    """Send the request and read messages to the end; None stands for a line that is none."""
    with suppress(BrokenPipeError), process.stdin as source:
        source.write(msgspec.json.encode(request))
    messages: list[Message | None] = []
    with process.stdout:
        for line in _lines(process.said()):
            try:
                messages.append(_decoder.decode(line))
            except msgspec.DecodeError:
                messages.append(None)
            if isinstance(messages[-1], Elsewhere):
                sampler.turn_to(messages[-1].pid)
            if isinstance(messages[-1], Result | Failure):
                break
    # Let it end by itself, but do not collect it yet: its id has to stay taken.
    process.await_end()
    return messages


def _lines(chunks: Iterable[bytes]) -> Iterator[bytearray]:
    """Split what is said into lines; what follows the last is one too."""
    rest = bytearray()
    for chunk in chunks:
        rest += chunk
        if b"\n" in chunk:
            *whole, rest = rest.split(b"\n")
            yield from whole
    if rest:
        yield rest


def _expire(pid: int, timed_out: threading.Event) -> None:
    timed_out.set()
    _kill_group(pid)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _outcome(messages: list[Message | None], status: int) -> Result | Failure:
    """Reduce what was said to one outcome; a process that said nothing final was killed."""
    if messages and isinstance(messages[-1], Result | Failure):
        return messages[-1]
    stages = [each.name for each in messages if isinstance(each, Stage)]
    step = stages[-1] if stages else "start"
    if status < 0:
        name = signal.Signals(-status).name
        return Failure("leg-killed", f"Its process was killed by {name} during {step!r}.")
    return Failure(
        "leg-mute", f"Its process ended with status {status} during {step!r} and said nothing."
    )
