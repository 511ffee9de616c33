"""Which tensors of the checkpoint are wanted; a wish that cannot be met is an error."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from weightload.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightload.checkpoint.folder import Checkpoint, Shard
    from weightload.checkpoint.header import Record


class ShardSelection(NamedTuple):
    """The wanted tensors of one shard, in the order of their bytes."""

    shard: Shard
    records: tuple[Record, ...]


class Selection(NamedTuple):
    """The wanted tensors of all shards that have any."""

    shards: tuple[ShardSelection, ...]

    @property
    def records(self) -> list[Record]:
        """All wanted tensors, shard by shard."""
        return [record for part in self.shards for record in part.records]

    @property
    def wanted_bytes(self) -> int:
        """Bytes of all wanted tensors."""
        return sum(record.nbytes for part in self.shards for record in part.records)


def select(
    files: Checkpoint, only: Sequence[str] | None = None, into: Iterable[str] | None = None
) -> Selection:
    """Choose tensors by patterns, or by the names of the tensors to be filled.

    Args:
        files: the open checkpoint.
        only: names or shell patterns, case-sensitive; None takes everything.
        into: exact names.

    Raises:
        UsageError: both are given, or one asks for a tensor that is not there.
    """
    if only is not None and into is not None:
        raise UsageError("give either only= or into=, not both: into= already says what to load.")
    if isinstance(only, str):
        raise UsageError(f"only= takes a list of names or patterns; write [{only!r}].")
    names = {record.name for _, record in files.records()}
    if into is not None:
        wanted = set(into)
        _refuse_unmet(sorted(wanted - names))
    elif only is not None:
        matches = {
            pattern: {name for name in names if fnmatchcase(name, pattern)} for pattern in only
        }
        _refuse_unmet([pattern for pattern in only if not matches[pattern]])
        wanted = set().union(*matches.values())
    else:
        return Selection(tuple(ShardSelection(s, s.header.records) for s in files.shards))
    parts = (
        ShardSelection(shard, tuple(r for r in shard.header.records if r.name in wanted))
        for shard in files.shards
    )
    return Selection(tuple(part for part in parts if part.records))


def _refuse_unmet(unmet: Sequence[str]) -> None:
    if unmet:
        raise UsageError(
            f"the checkpoint has no tensor {unmet[0]!r}"
            + (f", nor {len(unmet) - 1} more that were asked for" if len(unmet) > 1 else "")
            + "; its names are in the index and the shards' headers."
        )
