"""Running a build so that nothing of it outlives the harness, however that ends.

A build starts processes of its own: pip starts a backend, and that a compiler.  What ties a leg to
the harness (see ``measure.process``) would reach the first of them alone.  So a keeper stands
between: the build leads a session of its own, and the keeper ends everything in that session's
group when the build has ended, or when the pipe that it listens to is closed.  Only the harness
holds the other end, and the kernel closes it even after SIGKILL.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def run_build(words: Sequence[str], folder: Path, scratch: Path) -> tuple[int, str]:
    """Run a command in a folder, without input.

    Args:
        words: The command.
        folder: Where it runs.
        scratch: What it takes for the folder of temporary files.

    Returns:
        Its status, and what it wrote: standard error first.

    Raises:
        OSError: No process can be started.
    """
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(folder), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # A build that is killed does not clean up; whoever owns this folder does.
        env={**os.environ, "TMPDIR": str(scratch)},
        # Ctrl-C reaches the harness alone, which closes the pipe.
        start_new_session=True,
    )
    with keeper:
        # communicate() would close it at once.
        pipe, keeper.stdin = keeper.stdin, None
        try:
            said, complained = keeper.communicate()
        finally:
            if pipe is not None:
                pipe.close()
            keeper.wait()
    return keeper.returncode, complained + said


def main(folder: str, words: Sequence[str]) -> int:
    """Keep one build: start it, wait for its end or the harness's, and end what is left of it."""
    try:
        build = subprocess.Popen(
            words, cwd=folder, stdin=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        sys.stderr.write(f"{words[0]!r} cannot be run: {error.strerror}\n")
        return 1
    either = select.poll()
    either.register(sys.stdin.fileno(), select.POLLIN)
    either.register(os.pidfd_open(build.pid), select.POLLIN)
    either.poll()
    # Until it is waited for, its id, which names the group, cannot be given to anybody else.
    with suppress(ProcessLookupError):
        os.killpg(build.pid, signal.SIGKILL)
    return build.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
