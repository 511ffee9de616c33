"""Planted faults: what a trial must find, or it has proven nothing.

A control is drawn at random for each trial, planted where a real fault would be, and has to be
blamed on exactly the right tensor.  A trial that misses one cannot be believed about the
faults that nobody planted.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from loadproof.measure.messages import Plant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from loadproof.measure.digest import Difference, Manifest

DEVICE_BIT = "device-bit"


class Control(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One planted fault and what became of it.

    Attributes:
        name: Which kind of fault.
        planted: What was done, in words.
        tensor: The tensor that has to be blamed.
        blamed: The tensors that were.
        found: Whether exactly the right one was blamed, for its bytes.
    """

    name: str
    planted: str
    tensor: str
    blamed: tuple[str, ...]
    found: bool


def draw_bit(truth: Manifest, seed: int) -> Plant | None:
    """Choose one bit of one tensor; None when no tensor has a byte."""
    candidates = [each for each in truth.tensors if each.nbytes]
    if not candidates:
        return None
    generator = random.Random(seed)  # noqa: S311 -- reproducible, not secret
    chosen = generator.choice(candidates)
    return Plant(chosen.name, generator.randrange(chosen.nbytes), generator.randrange(8))


def judge_bit(plant: Plant, found: Sequence[Difference]) -> Control:
    """Say whether the flipped bit was blamed on its own tensor and on nothing else."""
    return Control(
        name=DEVICE_BIT,
        planted=f"bit {plant.bit} of byte {plant.byte} flipped on the device after the load",
        tensor=plant.tensor,
        blamed=tuple(each.tensor for each in found),
        found=[(each.tensor, each.kind) for each in found] == [(plant.tensor, "bytes")],
    )
