"""Writing what a run leaves: every file of it or none, and never beside those of another run.

A receipt beside a report of another trial would vouch for figures that are not its own.  So
everything is on the disk under temporary names before anything of an earlier run is touched;
then the earlier run's files go, the receipt first, and the new ones come, the receipt last.
Wherever that stops, a receipt that is there is whole and has its own report beside it.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from loadproof.errors import OutputError, ReceiptError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


# About what a receipt and its pages take: a disk that is full already is found before the run.
_RUN_BYTES = 2 << 20


def require_writable(folder: Path, names: Sequence[str], option: str = "--out") -> None:
    """Try, before a run, whether its files could be written; leave nothing behind.

    Args:
        folder: Where they would be; it need not be there yet.
        names: What they would be called.
        option: By which the folder is named.

    Raises:
        OutputError: They could not.
    """
    made = [each for each in (folder, *folder.parents) if not os.path.lexists(each)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".loadproof-") as file:
            file.write(bytes(_RUN_BYTES))
            file.flush()
        taken = [name for name in names if (folder / name).is_dir()]
    except OSError as error:
        raise OutputError(
            f"Nothing can be written to {folder}: {error.strerror}; "
            f"name a folder of yours with {option}."
        ) from error
    finally:
        for each in made:
            with suppress(OSError):
                each.rmdir()
    if taken:
        raise OutputError(
            f"{folder / taken[0]} is a folder, and a file has to go there; "
            f"name another folder with {option}."
        )


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is either complete or not there.

    Raises:
        ReceiptError: The disk is full, or the folder cannot be written to.
    """
    staged = None
    try:
        staged = _stage(path, content)
        staged.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise _unwritten(path, error) from error
    finally:
        _remove([] if staged is None else [staged])


def write_run(folder: Path, files: Mapping[str, bytes], names: Sequence[str]) -> None:
    """Put the files of one run into a folder, in place of those of an earlier run.

    Args:
        folder: Where; made when it is not there.
        files: Their contents by name.
        names: Every name that a run may leave, the one that vouches for the others first.

    Raises:
        ReceiptError: The disk is full, or the folder cannot be written to.  No file of this run
            is there then; those of an earlier run are, unless taking them away had begun.
    """
    staged: dict[str, Path] = {}
    placed: list[Path] = []
    path = folder
    try:
        for name, content in files.items():
            path = folder / name
            staged[name] = _stage(path, content)
        for name in names:
            path = folder / name
            path.unlink(missing_ok=True)
        _sync_folder(folder)
        for name in reversed(names):
            if name in staged:
                path = folder / name
                staged[name].replace(path)
                placed.append(path)
        _sync_folder(folder)
    except BaseException as error:
        # The one that vouches was placed last, so it goes first.
        _remove(reversed(placed))
        if isinstance(error, OSError):
            raise _unwritten(path, error) from error
        raise
    finally:
        _remove(staged.values())


def _stage(path: Path, content: bytes) -> Path:
    """Write a file's content beside its place, as far as the disk."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            # Readable by whoever may read the person's other files; the default is owner only.
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        _remove([] if temporary is None else [temporary])
        raise
    return temporary


def _remove(paths: Iterable[Path]) -> None:
    for each in paths:
        with suppress(OSError):
            each.unlink(missing_ok=True)


def _unwritten(path: Path, error: OSError) -> ReceiptError:
    return ReceiptError(
        f"{path} cannot be written: {error.strerror}; nothing of this run was left there."
    )


def _umask() -> int:
    """Return the mask of new files, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make removals and renames themselves durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
