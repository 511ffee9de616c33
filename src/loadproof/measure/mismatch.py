"""What wrong bytes look like: a name for the fault, from the bytes alone.

A digest says that a tensor is wrong.  Whether its bytes are zeros (a hole), the pattern that
memory held before the load (never written), another tensor's (a wrong target), or those that
one slot of the ring held before (refilled too early) says where to look.
"""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from loadproof.measure.digest import Mismatch, differences
from loadproof.measure.ground_truth import read_chunks, tensor_places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from loadproof.measure.digest import Content, Manifest
    from loadproof.measure.ground_truth import TensorPlace
    from loadproof.measure.messages import Truth

TENSORS_MAX = 16
# Random bytes agree by chance once in 256; this many in a row do not.
_EQUAL_BYTES_END = 16
# Enough to recognise a stretch by, and to look for in the files.
_SAMPLE_BYTES = 64 << 10
_NEEDLE_BYTES = 32
_NEEDLE_BYTES_MIN = 8


class _Run(NamedTuple):
    """The first stretch of wrong bytes."""

    first_byte: int
    nbytes: int
    wanted: bytes
    seen: bytes


def explain(
    truth: Truth,
    found: Manifest,
    read_back: Callable[[str], Iterator[memoryview]],
    poison: Callable[[], bytes],
    slot_bytes: int,
) -> dict[str, Mismatch]:
    """Look into the first tensors whose bytes are wrong.

    Args:
        truth: The files and their digests.
        found: The device's digests.
        read_back: Reads a tensor's bytes from the device, in chunks.
        poison: Gives the pattern that the memory held before the load; asked for when needed.
        slot_bytes: Size of a staging slot by the loader's own report; 0 when it has none.
    """
    wrong = [each.tensor for each in differences(truth.manifest, found) if each.kind == "bytes"]
    if not wrong:
        return {}
    places = {each.name: each for each in tensor_places(Path(truth.checkpoint))}
    explained = {}
    for name in wrong[:TENSORS_MAX]:
        run = _first_run(read_chunks(places[name]), read_back(name))
        if run is not None:
            explained[name] = _describe(run, places[name], places, poison(), slot_bytes)
    return explained


def _first_run(wanted: Iterable[bytes], seen: Iterator[memoryview]) -> _Run | None:
    """Find the first wrong stretch; both sides may come in chunks of any size."""
    import numpy as np  # noqa: PLC0415 -- only a leg that found a fault needs it

    first = last = -1
    position = 0
    wanted_kept, seen_kept = bytearray(), bytearray()
    for left, right in _in_step(wanted, seen):
        wrong = position + np.flatnonzero(np.frombuffer(left, "u1") != np.frombuffer(right, "u1"))
        if first < 0 and len(wrong):
            first = last = int(wrong[0])
        if first >= 0:
            start, room = max(first - position, 0), _SAMPLE_BYTES - len(seen_kept)
            wanted_kept += left[start : start + room]
            seen_kept += right[start : start + room]
            gaps = np.flatnonzero(np.diff(wrong, prepend=last) > _EQUAL_BYTES_END)
            within = wrong[: gaps[0]] if len(gaps) else wrong
            last = int(within[-1]) if len(within) else last
            if len(gaps) or position + len(left) - last > _EQUAL_BYTES_END:
                break
        position += len(left)
    if first < 0:
        return None
    return _Run(first, last - first + 1, bytes(wanted_kept), bytes(seen_kept))


def _in_step(
    wanted: Iterable[bytes], seen: Iterator[memoryview]
) -> Iterator[tuple[memoryview, memoryview]]:
    """Cut two streams of chunks into pairs of equal length."""
    left, right = memoryview(b""), memoryview(b"")
    lefts, rights = iter(wanted), seen
    while True:
        left = left or memoryview(next(lefts, b""))
        right = right or memoryview(next(rights, memoryview(b"")))
        count = min(len(left), len(right))
        if not count:
            return
        yield left[:count], right[:count]
        left, right = left[count:], right[count:]


def _describe(
    run: _Run,
    place: TensorPlace,
    places: dict[str, TensorPlace],
    poison: bytes,
    slot_bytes: int,
) -> Mismatch:
    seen = run.seen[: run.nbytes]
    content: Content = "unknown"
    found_in = found_at = None
    if run.nbytes == 1 and (run.wanted[0] ^ seen[0]).bit_count() == 1:
        content = "one-bit"
    elif not any(seen):
        content = "zeros"
    elif poison and len(seen) >= _NEEDLE_BYTES_MIN and seen[:_NEEDLE_BYTES] in poison + poison:
        content = "poison"
    elif len(seen) >= _NEEDLE_BYTES_MIN:
        source = _find(seen[:_NEEDLE_BYTES], place, places)
        if source is not None:
            found_in, found_at = source.name, source.byte
            content = "same-tensor" if found_in == place.name else "other-tensor"
            moved = place.offset + run.first_byte - source.file_offset
            same_shard = places[found_in].path == place.path
            if same_shard and slot_bytes and moved > 0 and moved % slot_bytes == 0:
                content = "previous-slot"
    return Mismatch(
        first_byte=run.first_byte,
        run_bytes=run.nbytes,
        content=content,
        found_in=found_in,
        found_at=found_at,
    )


class _Found(NamedTuple):
    name: str
    byte: int
    file_offset: int


def _find(needle: bytes, place: TensorPlace, places: dict[str, TensorPlace]) -> _Found | None:
    """Look for bytes in the checkpoint's files, the tensor's own shard first."""
    others = sorted({each.path for each in places.values()} - {place.path})
    for path in itertools.chain([place.path], others):
        with (
            Path(path).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            offset = content.find(needle)
        for each in places.values() if offset >= 0 else ():
            if each.path == path and each.offset <= offset < each.offset + each.nbytes:
                return _Found(each.name, offset - each.offset, offset)
    return None
