"""Temporary folders that do not outlive a harness for long, even one that was killed.

A harness that ends in any other way removes its own.  After SIGKILL nobody is left to do it, so
each folder is locked by its owner, and whoever makes the next one first removes those whose
lock is free.  The kernel frees a lock with the process that held it, so a process id that was
given to somebody else cannot mislead anybody, and a live trial keeps its folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFIX = "loadproof-"
# Written once the lock is held: a folder without it has only just been made.
_OWNER = ".owner"


@contextmanager
def scratch_folder(what: str) -> Iterator[Path]:
    """Make a folder for the body of a ``with``, after removing those that nobody owns any more.

    Args:
        what: A word for its name.

    Raises:
        OSError: It cannot be made.
    """
    _remove_stale(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(
        prefix=f"{_PREFIX}{what}-", ignore_cleanup_errors=True
    ) as name:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # Where there are no locks the folder is without an owner, and stays after SIGKILL.
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                Path(name, _OWNER).write_text(f"{os.getpid()}\n", "utf-8")
            yield Path(name)
        finally:
            os.close(descriptor)


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        # Another user's cannot be opened, and one that goes meanwhile is what is wanted.
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                ours = os.fstat(descriptor).st_uid == os.geteuid()
                if ours and (folder / _OWNER).is_file():
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
