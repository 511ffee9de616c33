"""The audit's sample: drawn so that neither a large nor a small tensor can be left out safely."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest

from loadproof.measure.audit import Audit, audit, draw
from loadproof.measure.device import manifest_of
from loadproof.measure.digest import Manifest, TensorDigest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


class Stretch(NamedTuple):
    """A tensor of one byte."""

    address: int
    dtype: str = "U8"
    shape: tuple[int, ...] = (1,)
    nbytes: int = 1

    def data_ptr(self) -> int:
        """Return where it is."""
        return self.address


def test_tensors_are_read_back_in_an_order_that_nobody_knows() -> None:
    """Nothing that arrives late can count on being read last; the manifest stays sorted."""
    tensors = {f"{number:02}": Stretch(number) for number in range(40)}
    orders: list[list[str]] = [[], []]

    def chunks(order: list[str], name: str, _: object) -> Iterator[memoryview]:
        order.append(name)
        yield memoryview(name.encode())

    first, second = (manifest_of(tensors, partial(chunks, order)) for order in orders)
    assert first == second
    assert [each.name for each in first.tensors] == sorted(tensors)
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(tensors)
    # Equal by chance once in 40! times.
    assert orders[0] != orders[1]
    assert sorted(tensors) not in orders


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
