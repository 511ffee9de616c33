"""Reading back a sample of what a timing leg loaded, after its clock has stopped.

A loader that is fast because it did not load, or that loads rightly only where it is hashed, is
found here.  Reading everything back in every leg would take longer than the loads, so the
policy says how much; which tensors is drawn only then, so that no loader can know it.
"""

from __future__ import annotations

from itertools import chain
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from loadproof.measure.digest import Manifest


class Reads(Protocol):
    """What an audit needs of a device."""

    def manifest(self, tensors: Mapping[str, Any]) -> Manifest:
        """Read tensors back and hash them."""


class Audit(NamedTuple):
    """What a timing leg read back after its clock had stopped.

    Attributes:
        nbytes: How many bytes of tensors; None when it was not asked to.
        wrong: The tensors that were not the files'.
    """

    nbytes: int | None = None
    wrong: tuple[str, ...] = ()


def audit(truth: Manifest, wanted_bytes: int, device: Reads, loaded: Mapping[str, Any]) -> Audit:
    """Read back a random sample of the tensors and compare it with the files.

    Args:
        truth: What the files hold.
        wanted_bytes: Tensors are drawn until they have this many bytes.
        device: Where they are.
        loaded: What the loader handed out.
    """
    expected = {each.name: each for each in truth.tensors}
    wrong = [] if set(loaded) == set(expected) else ["(names)"]
    sizes = {name: expected[name].nbytes for name in expected.keys() & set(loaded)}
    sizes = {name: size for name, size in sizes.items() if size}
    drawn = draw(sizes, wanted_bytes, SystemRandom())
    found = device.manifest({name: loaded[name] for name in drawn})
    wrong += [each.name for each in found.tensors if each.sha256 != expected[each.name].sha256]
    return Audit(found.nbytes(), tuple(wrong))


def draw(sizes: Mapping[str, int], wanted_bytes: int, generator: Random) -> Iterator[str]:
    """Draw tensors by turns: one with a chance in proportion to its bytes, one with an equal one.

    By bytes alone a small tensor would hardly ever be drawn, and by number alone the one that
    holds most of a model would seldom be.  At least one is drawn each way.

    Args:
        sizes: Bytes of each tensor, all above 0.
        wanted_bytes: No more are drawn once they have this many.
        generator: Where chance comes from.
    """
    # The first of many clocks to ring, each at the rate of its tensor's bytes, is a draw in
    # proportion to them, and the second to ring is one from the rest.
    by_bytes = sorted(sizes, key=lambda name: generator.expovariate(sizes[name]))
    equally = generator.sample(sorted(sizes), len(sizes))
    drawn: set[str] = set()
    drawn_bytes = 0
    for turn, name in enumerate(chain.from_iterable(zip(by_bytes, equally, strict=True))):
        if turn >= 2 and drawn_bytes >= wanted_bytes:
            return
        if name not in drawn:
            drawn.add(name)
            drawn_bytes += sizes[name]
            yield name
