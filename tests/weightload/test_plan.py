"""Spans and slices: what is read, and where each byte goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightload.checkpoint.header import Record
from weightload.errors import UsageError
from weightload.plan import (
    DEVICE_ALIGNMENT_BYTES,
    check_slot,
    plan_batches,
    plan_layout,
    plan_spans,
    round_up,
)

ALIGNMENT = 4096
# Every boundary that alignment can get wrong.
EDGES = st.sampled_from([0, 1, 2, 4095, 4096, 4097, 8191, 8192, 12288, 70_001])


def records_from(start: int, pieces: list[tuple[int, bool]]) -> list[Record]:
    """Consecutive tensors from a start offset; unwanted ones leave a gap."""
    records = []
    for number, (nbytes, wanted) in enumerate(pieces):
        if wanted:
            records.append(Record(f"t{number}", "U8", (nbytes,), start, start + nbytes))
        start += nbytes
    return records


PIECES = st.lists(st.tuples(EDGES, st.booleans()), max_size=12)


@given(start=EDGES, pieces=PIECES, slot_pages=st.integers(1, 5))
def test_spans_deliver_every_wanted_byte_once(
    start: int, pieces: list[tuple[int, bool]], slot_pages: int
) -> None:
    """Copying every slice out of its span rebuilds every tensor."""
    records = records_from(start, pieces)
    file = bytes((7 * i + 3) % 251 for i in range(max([r.end for r in records], default=0)))
    tensors = [bytearray(record.nbytes) for record in records]
    delivered = 0
    for span in plan_spans(records, slot_pages * ALIGNMENT, ALIGNMENT):
        slot = file[span.offset : span.offset + span.nbytes]
        assert span.wanted_end <= len(slot)
        for piece in span.slices:
            source = slot[piece.slot_offset : piece.slot_offset + piece.nbytes]
            assert len(source) == piece.nbytes > 0
            target = tensors[piece.tensor]
            target[piece.tensor_offset : piece.tensor_offset + piece.nbytes] = source
            delivered += piece.nbytes
    assert delivered == sum(record.nbytes for record in records)
    assert [bytes(t) for t in tensors] == [file[r.start : r.end] for r in records]


@given(start=EDGES, pieces=PIECES, slot_pages=st.integers(1, 5))
def test_spans_are_aligned_fit_a_slot_and_never_overlap(
    start: int, pieces: list[tuple[int, bool]], slot_pages: int
) -> None:
    """Every read obeys O_DIRECT's rules, and no byte of the file is read twice."""
    slot_bytes = slot_pages * ALIGNMENT
    read_to = 0
    for span in plan_spans(records_from(start, pieces), slot_bytes, ALIGNMENT):
        assert span.offset % ALIGNMENT == 0
        assert span.nbytes % ALIGNMENT == 0
        assert 0 < span.nbytes <= slot_bytes
        assert span.offset >= read_to
        assert span.nbytes - span.wanted_end < ALIGNMENT
        assert span.slices[0].slot_offset < ALIGNMENT
        read_to = span.offset + span.nbytes


@given(start=EDGES, pieces=PIECES, slot_pages=st.integers(1, 5))
def test_batches_of_whole_tensors_hold_whole_tensors(
    start: int, pieces: list[tuple[int, bool]], slot_pages: int
) -> None:
    """Each tensor's slices lie in one batch, in order, and add up to all its bytes."""
    records = records_from(start, pieces)
    slot_bytes = slot_pages * ALIGNMENT
    delivered = [0] * len(records)
    for batch in plan_batches(records, slot_bytes, ALIGNMENT, whole_tensors=True):
        for piece in (piece for span in batch for piece in span.slices):
            assert piece.tensor_offset == delivered[piece.tensor]
            delivered[piece.tensor] += piece.nbytes
        touched = {piece.tensor for span in batch for piece in span.slices}
        assert all(delivered[tensor] == records[tensor].nbytes for tensor in touched)
    assert delivered == [record.nbytes for record in records]


def test_neighbours_share_a_read() -> None:
    """Many small tensors side by side cost one read, not one each."""
    records = records_from(100, [(16, True)] * 500)
    (span,) = plan_spans(records, 4 << 20, ALIGNMENT)
    assert len(span.slices) == 500


@pytest.mark.parametrize("nbytes", [16, 700, 5000])
def test_many_small_tensors_leave_room_in_the_slot(nbytes: int) -> None:
    """Spans of many small tensors fill half a slot, and still no byte is read twice."""
    slot_bytes = 64 * ALIGNMENT
    records = records_from(100, [(nbytes, True)] * (3 * slot_bytes // nbytes))
    spans = list(plan_spans(records, slot_bytes, ALIGNMENT))
    many = [span for span in spans if len(span.slices) > 100]
    assert all(span.nbytes <= slot_bytes // 2 for span in many)
    ends = [span.offset + span.nbytes for span in spans]
    assert all(span.offset >= end for span, end in zip(spans[1:], ends, strict=False))


def test_a_gap_is_not_read() -> None:
    """A tensor that is not wanted is not read along."""
    records = records_from(0, [(4096, True), (1 << 20, False), (4096, True)])
    spans = plan_spans(records, 4 << 20, ALIGNMENT)
    assert [span.nbytes for span in spans] == [4096, 4096]


def test_slot_of_odd_size_is_refused() -> None:
    """A slot that cannot hold aligned reads is an error, not a wrong read."""
    with pytest.raises(UsageError, match="not a multiple"):
        check_slot(4097, ALIGNMENT)


@given(
    sizes=st.lists(st.one_of(EDGES, st.integers(0, 5 << 20)), max_size=40),
    slab_bytes=st.sampled_from([1 << 16, 1 << 20]),
)
def test_places_are_aligned_and_disjoint(sizes: list[int], slab_bytes: int) -> None:
    """No two tensors share a byte, all start 256-aligned, none leaves its slab."""
    layout = plan_layout(sizes, slab_bytes)
    assert len(layout.places) == len(sizes)
    taken: dict[int, int] = {}
    for nbytes, place in zip(sizes, layout.places, strict=True):
        assert place.offset % DEVICE_ALIGNMENT_BYTES == 0
        assert place.offset == taken.get(place.slab, 0)
        taken[place.slab] = place.offset + round_up(nbytes, DEVICE_ALIGNMENT_BYTES)
        assert place.offset + nbytes <= layout.slab_bytes[place.slab]
    assert [taken[slab] for slab in range(len(layout.slab_bytes))] == list(layout.slab_bytes)
