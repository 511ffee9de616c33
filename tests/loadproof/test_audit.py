"""The audit's sample: drawn so that neither a large nor a small tensor can be left out safely."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from loadproof.measure.audit import Audit, audit, draw
from loadproof.measure.digest import Manifest, TensorDigest

if TYPE_CHECKING:
    from collections.abc import Mapping

MIB = 1 << 20
# A model as they are: one embedding, many middling matrices, many vectors.
SIZES = (
    {"embedding": 1024 * MIB}
    | {f"matrix.{number}": 30 * MIB for number in range(100)}
    | {f"bias.{number}": 4096 for number in range(200)}
)


def test_large_and_small_tensors_both_have_a_chance() -> None:
    """The embedding holds a quarter of the bytes and is drawn as often; no bias is never drawn."""
    draws = [list(draw(SIZES, 32 * MIB, random.Random(seed))) for seed in range(2000)]
    drawn = Counter(name for names in draws for name in names)
    assert 0.2 < drawn["embedding"] / len(draws) < 0.5
    assert set(drawn) == set(SIZES)
    small = sum(name.startswith("bias") for names in draws for name in names)
    assert small / len(draws) > 0.5


@pytest.mark.parametrize("wanted", [1, 4096, 32 * MIB, 500 * MIB])
def test_no_more_is_drawn_than_was_asked_for(wanted: int) -> None:
    """One is drawn each way; after that the sample ends with the first that makes it enough."""
    for seed in range(50):
        names = list(draw(SIZES, wanted, random.Random(seed)))
        assert len(set(names)) == len(names)
        before_last = sum(SIZES[name] for name in names[:-1])
        assert before_last < wanted or len(names) <= 2
        assert sum(SIZES[name] for name in names) >= wanted


def test_everything_is_drawn_when_everything_is_asked_for() -> None:
    """A budget of all bytes leaves no tensor out."""
    assert set(draw(SIZES, sum(SIZES.values()), random.Random(1))) == set(SIZES)
    assert list(draw({}, 1, random.Random(1))) == []


class Memory:
    """A device whose tensors are their own digests."""

    def manifest(self, tensors: Mapping[str, Any]) -> Manifest:
        """Give them back."""
        return Manifest(tuple(tensors.values()))


def test_what_is_wrong_or_missing_is_named() -> None:
    """A wrong tensor by its name, a set of other names as such, and the bytes that were read."""
    entries = {
        name: TensorDigest(
            name=name, dtype="U8", shape=(size,), nbytes=size, sha256=name * 64, crc32=1
        )
        for name, size in (("a", 10), ("b", 5), ("c", 0))
    }
    truth = Manifest(tuple(entries.values()))
    assert audit(truth, 15, Memory(), entries) == Audit(15, ())
    wrong = entries | {"b": msgspec.structs.replace(entries["b"], sha256="0" * 64)}
    assert audit(truth, 15, Memory(), wrong) == Audit(15, ("b",))
    assert audit(truth, 15, Memory(), {"a": entries["a"]}) == Audit(10, ("(names)",))
