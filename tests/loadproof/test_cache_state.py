"""The page-cache state: what the kernel says, and nothing else."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from loadproof.measure import cache_state


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of 8 MiB on the disk."""
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(8 << 20))
    return path


def test_warm_is_told_after_warming(file: Path) -> None:
    """A file that was read is resident."""
    cache_state.warm([file])
    found = cache_state.look([file])
    assert (found.state, found.resident_bytes, found.total_bytes) == ("warm", 8 << 20, 8 << 20)


def test_cold_is_told_after_eviction(file: Path) -> None:
    """A file whose pages were given back is not resident, whatever was read before."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert cache_state.look([file]).state == "cold"


def test_half_is_mixed(file: Path) -> None:
    """A file of which half was evicted is neither warm nor cold."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 4 << 20, os.POSIX_FADV_DONTNEED)
    found = cache_state.look([file])
    assert (found.state, found.resident_bytes) == ("mixed", 4 << 20)


def test_a_file_of_somebody_else_is_unknown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel lies to those who do not own a file, so they are told nothing."""
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    found = cache_state.look([file])
    assert (found.state, found.resident_bytes) == ("unknown", None)
    assert found.why == "the files belong to another user"


def test_a_kernel_without_cachestat_is_asked_by_mincore(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older kernel answers the owner of a file through a mapping, to the page."""
    monkeypatch.setattr(cache_state, "_SYS_CACHESTAT", 99_999)
    cache_state.warm([file])
    assert cache_state.look([file]).state == "warm"
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 4 << 20, os.POSIX_FADV_DONTNEED)
    assert cache_state.look([file]).resident_bytes == 4 << 20


def test_an_unanswered_question_is_unknown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the kernel answers neither way, nothing is claimed."""
    monkeypatch.setattr(cache_state, "_SYS_CACHESTAT", 99_999)
    monkeypatch.setattr(cache_state, "_mincore_pages", lambda *_: None)
    assert cache_state.look([file]).state == "unknown"


def test_on_an_overlay_cachestat_is_not_believed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its inode holds no pages and would look cold for ever."""
    monkeypatch.setattr(cache_state, "_magic", lambda _: 0x794C7630)
    monkeypatch.setattr(cache_state, "_cachestat_pages", lambda _: 0)
    cache_state.warm([file])
    assert cache_state.look([file]).state == "warm"


@pytest.mark.parametrize("wanted", ["warm", "cold"])
def test_a_state_is_prepared_and_proven(file: Path, wanted: cache_state.Wanted) -> None:
    """What was asked for is what the kernel then says, from either side."""
    cache_state.prepare([file], "cold" if wanted == "warm" else "warm")
    assert cache_state.prepare([file], wanted).state == wanted


def test_as_is_touches_nothing(file: Path) -> None:
    """A half-resident file stays so."""
    cache_state.evict([file])
    with file.open("rb") as opened:
        opened.read(1 << 20)
    before = cache_state.look([file])
    assert cache_state.prepare([file], "as-is") == before


def test_memory_is_no_storage_to_be_cold_from() -> None:
    """A file in tmpfs is never called cold."""
    folder = Path("/dev/shm")  # noqa: S108 -- tmpfs is the point
    if cache_state._magic(folder) not in cache_state._MEMORY_MAGICS:
        pytest.skip("the memory file system here is no tmpfs")
    with tempfile.NamedTemporaryFile(dir=folder) as opened:
        opened.write(os.urandom(1 << 20))
        opened.flush()
        found = cache_state.prepare([Path(opened.name)], "cold")
        assert (found.state, found.why) == ("unknown", "tmpfs has no storage to be cold from")
        assert cache_state.prepare([Path(opened.name)], "warm").state == "warm"


@pytest.mark.parametrize(
    ("read_bytes", "state"),
    [(8 << 20, "cold"), (7 << 20, "unknown"), (0, "unknown"), (None, "unknown")],
)
def test_a_cold_start_is_proven_again_by_what_was_read(
    file: Path, read_bytes: int | None, state: str
) -> None:
    """A leg that fetched less than the files from storage did not start cold."""
    before = cache_state.prepare([file], "cold")
    assert cache_state.reprove(before, "cold", read_bytes).state == state
    assert cache_state.reprove(before, "as-is", read_bytes) == before
