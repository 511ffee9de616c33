"""What a run leaves: whole or absent, and a receipt only beside its own report."""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loadproof.errors import OutputError, ReceiptError
from loadproof.report.files import require_writable, write_run, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES = ("receipt", "report", "failed-leg")
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
# How often two files of a run ask the system for something that it may refuse: first to write
# them under temporary names, then to put them in the place of an earlier run's three.
STAGING, CALLS = 4, 11


def run_of(word: str, *names: str) -> dict[str, bytes]:
    """The files of one run, each with the run's own word in it."""
    return {name: word.encode() for name in names}


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fail_at(
    monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException
) -> Callable[[], int]:
    """Have the n-th call that writes, renames or removes fail, and all after it; count them."""
    calls = 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                raise error
            return real(*arguments, **options)

        return call

    monkeypatch.setattr(os, "fsync", failing(os.fsync))
    monkeypatch.setattr(Path, "replace", failing(Path.replace))
    monkeypatch.setattr(Path, "unlink", failing(Path.unlink))
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", failing(tempfile.NamedTemporaryFile))
    return lambda: calls


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()], ids=["full", "interrupted"])
@pytest.mark.parametrize("number", range(1, CALLS + 1))
def test_a_run_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException
) -> None:
    """Wherever writing stops, nothing of this run is there, and no receipt without its report."""
    old = run_of("old", "receipt", "report", "failed-leg")
    write_run(tmp_path, old, NAMES)
    with monkeypatch.context() as broken:
        fail_at(broken, number, error)
        with pytest.raises((ReceiptError, KeyboardInterrupt)) as caught:
            write_run(tmp_path, run_of("new", "receipt", "report"), NAMES)
    left = content(tmp_path)
    assert left == old or (number > STAGING and "receipt" not in left)
    assert left.items() <= old.items()
    if isinstance(caught.value, ReceiptError):
        assert "No space left on device; nothing of this run was left" in str(caught.value)


def test_every_call_of_a_run_was_failed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number above is how many calls there are, so that no place was left out."""
    write_run(tmp_path, run_of("old", *NAMES), NAMES)
    with monkeypatch.context() as counted:
        made = fail_at(counted, 0, FULL)
        write_run(tmp_path, run_of("new", "receipt", "report"), NAMES)
        # Its last two calls take back temporary names that are gone already.
        assert made() - 2 == CALLS


def test_a_run_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """No file of an earlier run stays, not even one that this run has no use for."""
    write_run(tmp_path / "new" / "folder", run_of("old", *NAMES), NAMES)
    write_run(tmp_path / "new" / "folder", run_of("new", "receipt", "report"), NAMES)
    assert content(tmp_path / "new" / "folder") == run_of("new", "receipt", "report")


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails is one sentence, and neither a new nor a temporary file is left."""
    fail_at(monkeypatch, 2, FULL)
    with pytest.raises(ReceiptError, match="No space left on device"):
        write_whole(tmp_path / "page.html", b"x")
    assert content(tmp_path) == {}


def test_an_old_file_survives_a_failed_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was there stays whole until the new one is."""
    write_whole(tmp_path / "page.html", b"old")
    fail_at(monkeypatch, 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "page.html", b"new")
    assert content(tmp_path) == {"page.html": b"old"}


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/loadproof", "taken"])
def test_a_place_that_takes_no_files_is_told_beforehand(tmp_path: Path, out: str) -> None:
    """A file, something below one, a folder that takes none, a folder in a file's place."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "taken" / "receipt").mkdir(parents=True)
    with pytest.raises(OutputError, match="--out") as caught:
        require_writable(tmp_path / out, NAMES)
    assert "\n" not in str(caught.value)


def test_trying_leaves_nothing_behind(tmp_path: Path) -> None:
    """Folders that were made for the trial are taken away, those that were there stay."""
    (tmp_path / "there").mkdir()
    require_writable(tmp_path / "there" / "a" / "b", NAMES)
    require_writable(tmp_path / "there", NAMES)
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_room_for_a_run_is_tried_before_it(tmp_path: Path) -> None:
    """A folder that takes a file's name and not its content is found out, and left as it was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(OutputError, match=r"written to .*: File too large"):
            require_writable(tmp_path / "out", NAMES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert content(tmp_path) == {}
    require_writable(tmp_path / "out", NAMES)
    assert content(tmp_path) == {}
