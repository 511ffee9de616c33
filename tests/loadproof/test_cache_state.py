"""The page-cache state: what the kernel says, and nothing else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from loadproof.measure import cache_state

if TYPE_CHECKING:
    from pathlib import Path


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


def test_a_kernel_without_cachestat_is_unknown(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unanswered question is not an answer."""
    monkeypatch.setattr(cache_state, "_SYS_CACHESTAT", 99_999)
    assert cache_state.look([file]).state == "unknown"
