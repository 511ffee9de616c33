"""The order of the legs."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadproof.plan.schedule import ARMS, mirrored_blocks


@given(blocks=st.integers(0, 20), seed=st.integers(0, 2**32))
def test_a_block_is_an_order_and_its_mirror(blocks: int, seed: int) -> None:
    """Every block holds each arm twice, the second half backwards."""
    turns = mirrored_blocks(ARMS, blocks, seed)
    assert len(turns) == 8 * blocks
    for block in range(blocks):
        own = [turn for turn in turns if turn.block == block]
        assert Counter(turn.arm for turn in own) == dict.fromkeys(ARMS, 2)
        first, second = own[:4], own[4:]
        assert [turn.arm for turn in first] == [turn.arm for turn in reversed(second)]
        assert [turn.half for turn in own] == [0] * 4 + [1] * 4


def test_a_seed_gives_one_order_and_another_seed_another() -> None:
    """The schedule follows from the seed alone."""
    assert mirrored_blocks(ARMS, 8, 1) == mirrored_blocks(ARMS, 8, 1)
    assert mirrored_blocks(ARMS, 8, 1) != mirrored_blocks(ARMS, 8, 2)


def test_every_arm_comes_first_about_equally_often() -> None:
    """No arm is favoured by its place."""
    firsts = Counter(mirrored_blocks(ARMS, 1, seed)[0].arm for seed in range(4000))
    assert all(900 < firsts[arm] < 1100 for arm in ARMS)


def test_a_linear_drift_cancels_within_a_block() -> None:
    """The mean place of every arm in a block is the same."""
    turns = mirrored_blocks(ARMS, 5, 3)
    for block in range(5):
        places = {
            arm: [n for n, turn in enumerate(turns) if (turn.block, turn.arm) == (block, arm)]
            for arm in ARMS
        }
        assert len({sum(each) for each in places.values()}) == 1


@pytest.mark.parametrize("arms", [(), ("A", "A")])
def test_arms_that_cannot_be_scheduled(arms: tuple[str, ...]) -> None:
    """No arms, or the same one twice, is refused."""
    with pytest.raises(ValueError, match="cannot schedule"):
        mirrored_blocks(arms, 1, 0)
