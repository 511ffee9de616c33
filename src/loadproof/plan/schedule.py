"""In which order the legs run: random blocks, each followed by its own mirror image.

A block is a random order of the arms and then the same order backwards, so that within a
block every arm has the same mean position and a drift that is linear in time cancels.  The
whole schedule follows from the seed, which the receipt carries.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

# The arms of a trial, by the letters that receipts and tables use.
BASELINE = "A"  # the baseline
AGAIN = "A'"  # the same code again: what "no difference" looks like on this machine today
CANDIDATE = "B"  # the candidate
DELAYED = "S"  # the baseline with a planted delay: what the trial must be able to see
# Not an arm: transformers' own load of the files, which served output is compared with.
REFERENCE = "reference"
ARMS = (BASELINE, AGAIN, CANDIDATE, DELAYED)


class Turn(NamedTuple):
    """One place in the schedule, where one leg runs.

    Attributes:
        block: Index of the mirrored block, from 0.
        half: 0 for the random order, 1 for its mirror.
        arm: Which arm runs here.
    """

    block: int
    half: int
    arm: str


def mirrored_blocks(arms: Sequence[str], blocks: int, seed: int) -> tuple[Turn, ...]:
    """Return the order of all timing legs: ``2 * len(arms) * blocks`` places.

    Raises:
        ValueError: No arms, an arm named twice, or a negative number of blocks.
    """
    if not arms or len(set(arms)) != len(arms) or blocks < 0:
        raise ValueError(f"cannot schedule {blocks} blocks of {list(arms)}")
    generator = random.Random(seed)  # noqa: S311 -- a reproducible order, not a secret
    turns: list[Turn] = []
    for block in range(blocks):
        order = generator.sample(list(arms), len(arms))
        turns += [Turn(block, 0, arm) for arm in order]
        turns += [Turn(block, 1, arm) for arm in reversed(order)]
    return tuple(turns)
