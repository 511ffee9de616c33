"""Temporary folders: gone with their owner, sooner or later, and never before."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest

from fixtures.processes import written
from loadproof.plan.scratch import scratch_folder

if TYPE_CHECKING:
    from pathlib import Path

HOLDS = """
import sys, time
from pathlib import Path
from loadproof.plan.scratch import scratch_folder

with scratch_folder("arms") as folder:
    (folder / "code.py").write_text("x = 1")
    told = Path(sys.argv[1])
    told.with_suffix(".part").write_text(str(folder))
    told.with_suffix(".part").rename(told)
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the test's own in the place of /tmp."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_killed_owners_folder_goes_and_a_live_ones_stays(
    tmp_path: Path, temporary: Path
) -> None:
    """SIGKILL leaves a folder behind; the next to come removes it, and no other."""
    told = tmp_path / "told"
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(told)]) as owner:
        try:
            left = temporary / os.path.basename(written(told))  # noqa: PTH119 -- of a string
            with scratch_folder("arms") as mine:
                assert (left / "code.py").is_file()
                with scratch_folder("file-bit"):
                    assert mine.is_dir()
        finally:
            owner.kill()
            owner.wait()
    assert (left / "code.py").is_file()
    with scratch_folder("arms") as mine:
        assert list(temporary.iterdir()) == [mine]
    assert list(temporary.iterdir()) == []


def test_what_has_no_owner_yet_and_what_is_not_ours_stays(temporary: Path, tmp_path: Path) -> None:
    """A folder that was only just made, one of another name, and what a link leads to."""
    for name in ("loadproof-arms-new", "somebody-elses"):
        (temporary / name).mkdir()
    (tmp_path / "elsewhere").mkdir()
    for folder in (temporary / "somebody-elses", tmp_path / "elsewhere"):
        (folder / ".owner").write_text("1\n")
    (temporary / "loadproof-arms-link").symlink_to(tmp_path / "elsewhere")
    with scratch_folder("arms"):
        pass
    names = {"loadproof-arms-new", "loadproof-arms-link", "somebody-elses"}
    assert {path.name for path in temporary.iterdir()} == names
    assert (tmp_path / "elsewhere" / ".owner").is_file()


def test_without_locks_nothing_is_removed(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file system has no locks, no folder has an owner, and none is taken away."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with scratch_folder("arms") as first, scratch_folder("arms") as second:
        assert sorted(temporary.iterdir()) == sorted([first, second])
    assert list(temporary.iterdir()) == []
