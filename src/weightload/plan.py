"""Spans and slices: which aligned reads bring which bytes to which place on the device.

Pure functions, no input or output, so that every boundary can be tested. A file
is cut on a fixed grid of slot-sized windows; a span is the part of one window
that is wanted, widened down and up to the alignment. The grid makes every span
fit a slot whatever the tensors' offsets are, and neighbouring tensors share a
read. Destinations are laid out here too: 256-byte steps inside slabs, because
small driver allocations waste up to 1.76 times their size on a GB10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightload.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from weightload.checkpoint.header import Record

_MANY_SLICES = 32
# Linux reads no more than two GiB less a page at once, and a slot is one read.
_SLOT_BYTES_MAX = 1 << 30
# cuMemAlloc promises at least 256 bytes, and kernels are tuned to expect it.
DEVICE_ALIGNMENT_BYTES = 256


class Slice(NamedTuple):
    """The part of a span that belongs to one tensor.

    Attributes:
        tensor: position of the tensor among its shard's wanted ones.
        slot_offset: first byte inside the slot.
        tensor_offset: first byte inside the tensor.
        nbytes: length in bytes, at least 1.
    """

    tensor: int
    slot_offset: int
    tensor_offset: int
    nbytes: int


class Span(NamedTuple):
    """One aligned read.

    Attributes:
        offset: file offset of the first byte read; a multiple of the alignment.
        nbytes: bytes to ask for; a multiple of the alignment.
        wanted_end: bytes that must arrive, counted from `offset`; the rest is padding
            that may lie beyond the end of the file.
        slices: where the wanted bytes go, in file order; the first one's
            `slot_offset` is the span's lead.
    """

    offset: int
    nbytes: int
    wanted_end: int
    slices: tuple[Slice, ...]


class Place(NamedTuple):
    """Where one tensor lives on the device: a slab, and an offset in it."""

    slab: int
    offset: int


class Layout(NamedTuple):
    """Slabs in bytes, and one place per tensor in the order given."""

    slab_bytes: tuple[int, ...]
    places: tuple[Place, ...]


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step


def check_slot(slot_bytes: int, alignment: int) -> None:
    """Check that a slot can hold aligned reads.

    Raises:
        UsageError: `slot_bytes` is not a positive multiple of `alignment`, or above 1 GiB.
    """
    if slot_bytes <= 0 or slot_bytes % alignment:
        raise UsageError(
            f"a slot of {slot_bytes} bytes is not a multiple of the alignment, {alignment}."
        )
    if slot_bytes > _SLOT_BYTES_MAX:
        raise UsageError(
            f"a slot of {slot_bytes} bytes is more than one read brings; give slot_bytes of at "
            f"most {_SLOT_BYTES_MAX}."
        )


def plan_batches(
    records: Sequence[Record], slot_bytes: int, alignment: int, *, whole_tensors: bool
) -> Iterator[list[Span]]:
    """Plan one shard as batches: the spans of a batch are brought by one thread, in order.

    Args:
        records: as for `plan_spans`.
        slot_bytes: as for `plan_spans`.
        alignment: as for `plan_spans`.
        whole_tensors: whether every tensor lies in one batch. Batches then hold about
            two slots of small tensors or one large tensor, and the page at a boundary
            is read twice. Otherwise each span is a batch.
    """
    if not whole_tensors:
        for span in plan_spans(records, slot_bytes, alignment):
            yield [span]
        return
    first = 0
    for number, record in enumerate(records, start=1):
        following = records[number].nbytes if number < len(records) else 2 * slot_bytes
        if record.end - records[first].start + following >= 2 * slot_bytes:
            batch = list(plan_spans(records[first:number], slot_bytes, alignment, first))
            first = number
            if batch:
                yield batch


def plan_spans(
    records: Iterable[Record], slot_bytes: int, alignment: int, first: int = 0
) -> Iterator[Span]:
    """Plan the reads that bring the given tensors of one shard.

    Args:
        records: tensors of one shard, ordered by `start`, not overlapping.
        slot_bytes: capacity of one slot; see `check_slot`.
        alignment: of file offsets and lengths, in bytes; a power of two.
        first: number of the first tensor given, among the shard's.

    Yields:
        Spans in file order, which do not overlap: no byte of the file is read twice.
    """
    slices: list[Slice] = []
    offset = end = window_end = 0
    for tensor, record in enumerate(records, start=first):
        position = record.start
        while position < record.end:
            # A piece joins the open span when it begins on pages that the span reads anyway.
            joins = position < window_end and position <= round_up(end, alignment)
            if not joins:
                if slices:
                    yield _span(offset, end, alignment, slices)
                    slices = []
                if not position % slot_bytes and position + slot_bytes <= record.end:
                    # A whole window of one tensor, as most are, needs no more thought.
                    whole = Slice(tensor, 0, position - record.start, slot_bytes)
                    yield Span(position, slot_bytes, slot_bytes, (whole,))
                    position += slot_bytes
                    continue
                offset = position // alignment * alignment
                window_end = position // slot_bytes * slot_bytes + slot_bytes
            end = min(record.end, window_end)
            slices.append(
                Slice(tensor, position - offset, position - record.start, end - position)
            )
            position = end
            if len(slices) == _MANY_SLICES:
                # Many small tensors leave half of the slot free, to be laid out in.
                half = offset + slot_bytes // 2 // alignment * alignment
                window_end = min(window_end, half) if end <= half else window_end
    if slices:
        yield _span(offset, end, alignment, slices)


def _span(offset: int, end: int, alignment: int, slices: list[Slice]) -> Span:
    return Span(offset, round_up(end, alignment) - offset, end - offset, tuple(slices))


def plan_layout(sizes: Iterable[int], slab_bytes: int) -> Layout:
    """Give every tensor a 256-aligned place in a slab.

    A tensor of at least half a slab has one of its own, so that dropping it gives
    its memory back; the others share slabs in order. No slab is larger than its
    contents. Empty tensors have a place and take no bytes.

    Args:
        sizes: tensor lengths in bytes.
        slab_bytes: the largest shared slab, in bytes.
    """
    slabs: list[int] = []
    places: list[Place] = []
    shared: int | None = None
    for nbytes in sizes:
        taken = round_up(nbytes, DEVICE_ALIGNMENT_BYTES)
        if taken >= slab_bytes // 2:
            places.append(Place(len(slabs), 0))
            slabs.append(taken)
            continue
        if shared is None or slabs[shared] + taken > slab_bytes:
            shared = len(slabs)
            slabs.append(0)
        places.append(Place(shared, slabs[shared]))
        slabs[shared] += taken
    return Layout(tuple(slabs), tuple(places))
