"""Runs of small tensors as one copy.

A copy costs a few microseconds whatever its size, so twenty thousand tensors of 64
bytes would cost more than their gigabyte-sized neighbours. On the device such
tensors stand 256 bytes apart; here a run of them is laid out the same way in the
free end of the slot, and brought by one copy. The bytes between them are nobody's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightload.plan import DEVICE_ALIGNMENT_BYTES, round_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from weightload.plan import Slice

# Moving more than this by the processor costs as much as the copy call that it saves.
SMALL_BYTES_MAX = 8 << 10


class Run(NamedTuple):
    """Slices for one copy.

    Attributes:
        address: device address of the first byte.
        nbytes: length on the device, from the first byte to the last.
        slices: one slice of any size, or several small ones.
    """

    address: int
    nbytes: int
    slices: Sequence[Slice]


def runs(
    slices: Sequence[Slice], addresses: Sequence[int], room_bytes: int, *, spaced: bool
) -> Iterator[Run]:
    """Group a span's slices into copies.

    Args:
        slices: in file order.
        addresses: device address of each tensor's first byte.
        room_bytes: bytes of the slot into which a run can be laid out.
        spaced: whether the bytes between neighbours on the device may be overwritten.
    """
    group: list[Slice] = []
    start = end = 0
    for piece in slices:
        address = addresses[piece.tensor] + piece.tensor_offset
        small = piece.nbytes <= SMALL_BYTES_MAX
        near = address == (round_up(end, DEVICE_ALIGNMENT_BYTES) if spaced else end)
        fits = address + piece.nbytes - start <= room_bytes
        if group and not (small and near and fits):
            yield Run(start, end - start, group)
            group = []
        if not group:
            start = address
        group.append(piece)
        end = address + piece.nbytes
        if not small:
            yield Run(start, end - start, group)
            group = []
    if group:
        yield Run(start, end - start, group)


def lay_out(run: Run, addresses: Sequence[int], slot: memoryview, at: int) -> None:
    """Write a run's bytes into the slot as they will stand on the device."""
    shift = at - run.address
    for piece in run.slices:
        target = addresses[piece.tensor] + piece.tensor_offset + shift
        slot[target : target + piece.nbytes] = slot[
            piece.slot_offset : piece.slot_offset + piece.nbytes
        ]
