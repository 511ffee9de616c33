"""Planted faults: what a trial must find, or it has proven nothing.

Each control is drawn at random for each trial, planted where a real fault would be, and has to
be blamed on exactly the right tensor, from exactly the right byte on.  A trial that misses one
cannot be believed about the faults that nobody planted.

A swapped or duplicated chunk is drawn so that it changes something: two equal chunks could be
exchanged without anybody's being able to tell.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from loadproof.measure.ground_truth import read_range
from loadproof.measure.messages import CopyChunk, FlipBit, Plant, SwapChunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadproof.measure.digest import Difference
    from loadproof.measure.ground_truth import TensorPlace

DEVICE_BIT = "device-bit"
FILE_BIT = "file-bit"
SWAPPED_CHUNKS = "swapped-chunks"
DUPLICATED_CHUNK = "duplicated-chunk"
# Planted by the leg that serves, and seen by what it serves; it blames no tensor.
SERVED_BIT = "served-bit"
CONTROLS = (DEVICE_BIT, FILE_BIT, SWAPPED_CHUNKS, DUPLICATED_CHUNK)

_CHUNK_BYTES_MAX = 64 << 10
_DRAWS_MAX = 200


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One planted fault and what became of it.

    Attributes:
        name: Which kind of fault.
        planted: What was done, in words.
        tensor: The tensor that has to be blamed.
        blamed: The tensors that were; none where only the served output is looked at.
        seen: What the comparison said about them.
        found: Whether exactly the right one was blamed, from the right byte on; or whether the
            served output changed.
    """

    name: str
    planted: str
    tensor: str
    blamed: tuple[str, ...]
    seen: tuple[str, ...] = ()
    found: bool


class Drawn(msgspec.Struct, frozen=True):
    """A control that is about to be planted.

    Attributes:
        name: Which kind of fault.
        plant: What will be done.
        planted: The same in words.
        first_byte: Where the tensor's bytes will differ first.
    """

    name: str
    plant: Plant
    planted: str
    first_byte: int


def draw_controls(places: Sequence[TensorPlace], seed: int) -> list[Drawn]:
    """Choose one of each kind; a kind that these tensors have no room for is left out.

    Raises:
        CheckpointError: A file cannot be read any more.
    """
    generator = random.Random(f"controls/{seed}")  # noqa: S311 -- reproducible, not secret
    candidates = [each for each in places if each.nbytes]
    if not candidates:
        return []
    drawn: list[Drawn | None] = [
        _draw_bit(DEVICE_BIT, candidates, generator),
        _draw_bit(FILE_BIT, candidates, generator),
        _draw_swap(candidates, generator),
        _draw_copy(candidates, generator),
    ]
    return [each for each in drawn if each is not None]


def judge_control(drawn: Drawn, found: Sequence[Difference]) -> Control:
    """Say whether the fault was blamed on its own tensor and place, and on nothing else."""
    tensor = drawn.plant.tensor
    right = len(found) == 1 and (found[0].tensor, found[0].kind) == (tensor, "bytes")
    if right and found[0].mismatch is not None:
        right = found[0].mismatch.first_byte == drawn.first_byte
    return Control(
        name=drawn.name,
        planted=drawn.planted,
        tensor=tensor,
        blamed=tuple(each.tensor for each in found),
        seen=tuple(each.sentence() for each in found),
        found=right,
    )


def _draw_bit(name: str, candidates: Sequence[TensorPlace], generator: random.Random) -> Drawn:
    chosen = generator.choice(candidates)
    plant = FlipBit(chosen.name, generator.randrange(chosen.nbytes), generator.randrange(8))
    where = "on the device after the load" if name == DEVICE_BIT else "in a copy of the file"
    return Drawn(name, plant, f"bit {plant.bit} of byte {plant.byte} flipped {where}", plant.byte)


def _draw_swap(candidates: Sequence[TensorPlace], generator: random.Random) -> Drawn | None:
    roomy = [each for each in candidates if each.nbytes > 1]
    for _ in range(_DRAWS_MAX if roomy else 0):
        chosen = generator.choice(roomy)
        nbytes = generator.randint(1, min(_CHUNK_BYTES_MAX, chosen.nbytes // 2))
        first = generator.randint(0, chosen.nbytes - 2 * nbytes)
        second = generator.randint(first + nbytes, chosen.nbytes - nbytes)
        differs = _first_difference(_read(chosen, first, nbytes), _read(chosen, second, nbytes))
        if differs is not None:
            plant = SwapChunks(chosen.name, first, second, nbytes)
            said = f"the {nbytes} bytes at {first} and at {second} swapped on the device"
            return Drawn(SWAPPED_CHUNKS, plant, said, first + differs)
    return None


def _draw_copy(candidates: Sequence[TensorPlace], generator: random.Random) -> Drawn | None:
    for _ in range(_DRAWS_MAX if len(candidates) > 1 else 0):
        source, target = generator.sample(list(candidates), 2)
        nbytes = generator.randint(1, min(_CHUNK_BYTES_MAX, source.nbytes, target.nbytes))
        source_byte = generator.randint(0, source.nbytes - nbytes)
        byte = generator.randint(0, target.nbytes - nbytes)
        differs = _first_difference(
            _read(target, byte, nbytes), _read(source, source_byte, nbytes)
        )
        if differs is not None:
            plant = CopyChunk(source.name, source_byte, target.name, byte, nbytes)
            said = (
                f"{nbytes} bytes from byte {source_byte} of {source.name!r} put over byte {byte} "
                "on the device"
            )
            return Drawn(DUPLICATED_CHUNK, plant, said, byte + differs)
    return None


def _read(place: TensorPlace, byte: int, nbytes: int) -> bytes:
    return b"".join(read_range(place, byte, nbytes))


def _first_difference(left: bytes, right: bytes) -> int | None:
    pairs = zip(left, right, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), None)
