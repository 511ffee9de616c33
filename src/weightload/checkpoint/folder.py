"""The set of shards: which files make up the checkpoint, opened once and kept by identity.

Every shard is opened here, one descriptor each, and everything later works on
that descriptor: a file renamed over the path mid-load cannot mix two versions.
The index and the headers are cross-checked both ways, because each alone has
been seen to lie (a stale index after re-quantising, an interrupted download).
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from weightload.checkpoint.header import Header, Record, parse_strict_json, read_header
from weightload.errors import CheckpointError, HeaderError, ShardChangedError, ShardMissingError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_NUMBERED = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")
_NAMES_SHOWN_MAX = 5


class Identity(NamedTuple):
    """What makes a file the same file with the same bytes.

    Attributes:
        device: the file system's number.
        inode: the file's number in it.
        file_bytes: its size.
        mtime_ns: when it was written to; whoever writes can put this back.
        ctime_ns: when anything about it changed, which nobody can put back.
        links: names that lead to it; a name that comes or goes changes the ctime too.
    """

    device: int
    inode: int
    file_bytes: int
    mtime_ns: int
    ctime_ns: int = 0
    links: int = 0

    def is_still(self, earlier: Identity) -> bool:
        """Whether nothing shows that the file was written to since."""
        named_anew = self.links != earlier.links
        return self[:4] == earlier[:4] and (named_anew or self.ctime_ns == earlier.ctime_ns)

    @classmethod
    def of(cls, descriptor: int) -> Identity:
        """Read the identity behind an open descriptor."""
        status = os.fstat(descriptor)
        times = status.st_mtime_ns, status.st_ctime_ns
        return cls(status.st_dev, status.st_ino, status.st_size, *times, status.st_nlink)


@dataclass(frozen=True, eq=False)
class Shard:
    """One open file of the checkpoint."""

    name: str
    descriptor: int
    identity: Identity
    header: Header

    def check_unchanged(self) -> None:
        """Check that the file is still the one whose header was read.

        Raises:
            ShardChangedError: size, mtime or ctime moved since it was opened.
        """
        if not Identity.of(self.descriptor).is_still(self.identity):
            raise ShardChangedError(
                f"{self.name} was changed while it was being loaded; stop whatever writes to it "
                f"and load again."
            )


@dataclass
class Checkpoint:
    """All shards, open; a context manager that closes them.

    Attributes:
        shards: in loading order, each file once however many names lead to it.
        strays: safetensors files in the folder that the checkpoint does not use.
    """

    shards: tuple[Shard, ...]
    strays: tuple[str, ...] = ()
    _stack: ExitStack = field(default_factory=ExitStack, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor; a second call does nothing."""
        self._stack.close()

    def records(self) -> Iterable[tuple[Shard, Record]]:
        """Every tensor with its shard, in the order of the bytes."""
        return ((shard, record) for shard in self.shards for record in shard.header.records)


def stored_bytes(path: str | os.PathLike[str]) -> int:
    """Size of a safetensors file, or of all those in a folder, before any is opened.

    Raises:
        CheckpointError: nothing is there.
    """
    location = Path(path)
    try:
        if not location.is_dir():
            return location.stat().st_size
        with os.scandir(location) as entries:
            names = [entry for entry in entries if entry.name.endswith(".safetensors")]
            return sum(entry.stat().st_size for entry in names if entry.is_file())
    except OSError as error:
        raise CheckpointError(f"{location}: {_why(error)}") from None


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a safetensors file, or a folder of them, and check that it is whole.

    Args:
        path: one `.safetensors` file, or a folder holding either an index with its
            shards or the shards alone.

    Raises:
        CheckpointError: nothing is there, or what is there is not a checkpoint.
        ShardMissingError: files that the index or the numbering names are absent.
        HeaderError: a shard or the index is malformed.
    """
    location = Path(path)
    try:
        is_folder = stat.S_ISDIR(location.stat().st_mode)
    except OSError as error:
        raise CheckpointError(f"{location}: {_why(error)}") from None
    if not is_folder:
        return _open_shards(location.parent, [location.name], None, ())
    present = sorted(entry.name for entry in location.glob("*.safetensors"))
    index = _find_index(location)
    if index is not None:
        weight_map = read_index(location / index)
        names = sorted(set(weight_map.values()))
        _check_present(location, names, f"{index} names")
        strays = tuple(name for name in present if name not in weight_map.values())
        return _open_shards(location, names, weight_map, strays)
    if not present:
        raise CheckpointError(
            f"{location} holds no .safetensors file; point to the folder that holds the weights, "
            f"or convert a pickle checkpoint with safetensors first."
        )
    if SINGLE_NAME in present:
        strays = tuple(name for name in present if name != SINGLE_NAME)
        return _open_shards(location, [SINGLE_NAME], None, strays)
    _check_present(location, _siblings(present), "the shards' numbering promises")
    return _open_shards(location, present, None, ())


def _why(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "no such file or folder; check the path, and that links in it lead somewhere."
    return f"cannot be opened ({error.strerror}); check its permissions and links."


def _find_index(folder: Path) -> str | None:
    found = sorted(entry.name for entry in folder.glob("*.safetensors.index.json"))
    if INDEX_NAME in found or not found:
        return INDEX_NAME if found else None
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds several indexes ({', '.join(found)}) and none is {INDEX_NAME}; "
            f"keep the one that is meant."
        )
    return found[0]


def read_index(path: Path) -> dict[str, str]:
    """Which shard holds which tensor.

    Args:
        path: of the index.

    Returns:
        File names by tensor names.

    Raises:
        HeaderError: it is no index.
    """
    try:
        content = parse_strict_json(path.read_bytes())
    except HeaderError as error:
        raise HeaderError(f"{path.name}: {error}; write the index again.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise HeaderError(f"{path.name} is not a readable index ({error}).") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise HeaderError(f"{path.name} has no weight_map; download the index again.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or "/" in shard or shard in {"", ".", ".."}:
            raise HeaderError(
                f"{path.name} maps tensor {name!r} to {shard!r}, which is not a file name."
            )
    return weight_map


def _siblings(names: Iterable[str]) -> list[str]:
    """Every file that the `-00001-of-00004` numbering of the given names promises."""
    promised: list[str] = []
    for name in names:
        match = _NUMBERED.match(name)
        if match:
            stem, count = match["stem"], match["count"]
            promised += [
                f"{stem}-{number:05d}-of-{count}.safetensors"
                for number in range(1, int(count) + 1)
            ]
    return sorted(set(promised))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN_MAX])
    more = len(names) - _NAMES_SHOWN_MAX
    return f"{shown} and {more} more" if more > 0 else shown


def _check_present(folder: Path, names: Sequence[str], who: str) -> None:
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ShardMissingError(
            f"{who} {len(missing)} of {len(names)} shards that are not in {folder}: "
            f"{_listed(missing)}; download them again."
        )


def _open_shards(
    folder: Path,
    names: Sequence[str],
    weight_map: dict[str, str] | None,
    strays: tuple[str, ...],
) -> Checkpoint:
    """Open the named files, parse each inode once, and cross-check them with the index."""
    with ExitStack() as stack:
        by_inode: dict[tuple[int, int], Shard] = {}
        by_name: dict[str, Shard] = {}
        for name in names:
            descriptor = _open_regular(folder / name)
            stack.callback(os.close, descriptor)
            identity = Identity.of(descriptor)
            key = identity.device, identity.inode
            if key not in by_inode:
                header = _read_header_of(descriptor, identity, name)
                by_inode[key] = Shard(name, descriptor, identity, header)
            by_name[name] = by_inode[key]
        shards = tuple(by_inode.values())
        if weight_map is None:
            _check_no_name_twice(shards)
        else:
            _cross_check(weight_map, by_name)
        return Checkpoint(shards, strays, stack.pop_all())


def _open_regular(path: Path) -> int:
    try:
        # O_NONBLOCK keeps a named pipe from hanging the open; regular files ignore it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path}: {_why(error)}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file; point to the weights themselves.")
    return descriptor


def _read_header_of(descriptor: int, identity: Identity, name: str) -> Header:
    def pread(count: int, offset: int) -> bytes:
        pieces = []
        while count:
            piece = os.pread(descriptor, count, offset)
            if not piece:
                break
            pieces.append(piece)
            count -= len(piece)
            offset += len(piece)
        return b"".join(pieces)

    try:
        return read_header(pread, identity.file_bytes, name)
    except OSError as error:
        raise CheckpointError(f"{name}: {_why(error)}") from None


def _check_no_name_twice(shards: Iterable[Shard]) -> None:
    owner: dict[str, str] = {}
    for shard in shards:
        for record in shard.header.records:
            other = owner.setdefault(record.name, shard.name)
            if other != shard.name:
                raise CheckpointError(
                    f"tensor {record.name!r} is in both {other} and {shard.name} and there is no "
                    f"index to say which is meant; remove the file that does not belong."
                )


def _cross_check(weight_map: dict[str, str], by_name: dict[str, Shard]) -> None:
    """Check that the index and the headers agree on every tensor, in both directions."""
    inside = {
        name: {record.name for record in shard.header.records} for name, shard in by_name.items()
    }
    lacking = [name for name, shard in weight_map.items() if name not in inside[shard]]
    if lacking:
        raise CheckpointError(
            f"the index lists {len(lacking)} tensors that their shards lack: {_listed(lacking)}; "
            f"the index and the shards are of different versions, download both again."
        )
    unlisted = sorted(set().union(*inside.values()) - weight_map.keys())
    if unlisted:
        raise CheckpointError(
            f"the shards hold {len(unlisted)} tensors that the index does not list: "
            f"{_listed(unlisted)}; the index and the shards are of different versions, "
            f"download both again."
        )
    for name, shard in weight_map.items():
        twins = [other for other, names in inside.items() if name in names and other != shard]
        if any(by_name[other] is not by_name[shard] for other in twins):
            raise CheckpointError(
                f"tensor {name!r} is in {shard}, as the index says, and also in {twins[0]}; "
                f"remove the file that does not belong."
            )
