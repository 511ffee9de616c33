"""What wrong bytes look like: where they begin, how far they go, and whose they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.checkpoints import Tensor, write_checkpoint
from fixtures.legs import run
from loadproof.measure.digest import Manifest, TensorDigest, digest_chunks
from loadproof.measure.ground_truth import file_manifest, read_chunks, tensor_places
from loadproof.measure.messages import Request, Result, Truth
from loadproof.measure.mismatch import _first_run, explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from loadproof.measure.digest import Mismatch

POISON = bytes(range(1, 65))
SLOT = 4096


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Two shards of random bytes."""
    write_checkpoint(
        tmp_path,
        [[Tensor("a", "U8", (3 * SLOT,)), Tensor("b", "U8", (500,))], [Tensor("c", "U8", (700,))]],
        seed=3,
    )
    return tmp_path


def content_of(files: Path, name: str) -> bytes:
    """A tensor's bytes in the files."""
    place = next(each for each in tensor_places(files) if each.name == name)
    return b"".join(read_chunks(place))


def explained(files: Path, name: str, seen: bytes) -> Mismatch:
    """What is said of a device on which this tensor holds other bytes."""
    truth = file_manifest(tensor_places(files))
    found = Manifest(
        tuple(
            TensorDigest(
                name=each.name,
                dtype=each.dtype,
                shape=each.shape,
                nbytes=each.nbytes,
                **digest_chunks([seen if each.name == name else content_of(files, each.name)]),
            )
            for each in truth.tensors
        )
    )

    def read_back(asked: str) -> Iterator[memoryview]:
        assert asked == name
        yield memoryview(seen)[:100]
        yield memoryview(seen)[100:]

    result = explain(Truth(str(files), truth), found, read_back, lambda: POISON, SLOT)
    assert set(result) == {name}
    return result[name]


def put(content: bytes, byte: int, new: bytes) -> bytes:
    """Overwrite part of some bytes."""
    return content[:byte] + new + content[byte + len(new) :]


def test_one_bit(files: Path) -> None:
    """A single flipped bit is told from a wrong byte."""
    content = content_of(files, "b")
    one = explained(files, "b", put(content, 77, bytes([content[77] ^ 8])))
    assert (one.first_byte, one.run_bytes, one.content) == (77, 1, "one-bit")
    assert explained(files, "b", put(content, 77, bytes([content[77] ^ 9]))).content == "unknown"


def test_zeros_and_poison(files: Path) -> None:
    """A hole and memory that nobody wrote are named."""
    content = content_of(files, "a")
    hole = explained(files, "a", put(content, 1000, bytes(600)))
    assert hole.content == "zeros"
    assert abs(hole.first_byte - 1000) < 16
    assert abs(hole.run_bytes - 600) < 32
    skipped = explained(files, "a", put(content, 50, POISON[40:] + POISON * 3))
    assert (skipped.first_byte, skipped.content) == (50, "poison")


def test_whose_bytes_they_are(files: Path) -> None:
    """Another tensor's bytes, in another shard too, and the tensor's own from elsewhere."""
    content = content_of(files, "b")
    other = explained(files, "b", put(content, 10, content_of(files, "c")[200:500]))
    assert (other.content, other.found_in, other.found_at) == ("other-tensor", "c", 200)
    own = explained(files, "b", put(content, 300, content[40:140]))
    assert (own.content, own.found_in, own.found_at) == ("same-tensor", "b", 40)


def test_what_a_slot_held_before(files: Path) -> None:
    """Bytes from exactly one slot earlier in the shard are a slot that was refilled too early."""
    content = content_of(files, "a")
    stale = explained(files, "a", put(content, SLOT + 100, content[100:1100]))
    assert (stale.content, stale.found_in, stale.found_at) == ("previous-slot", "a", 100)


@given(
    wanted=st.binary(min_size=1, max_size=300),
    marks=st.sets(st.integers(0, 299), min_size=1, max_size=30),
    pieces=st.lists(st.integers(1, 50), min_size=1, max_size=8),
)
def test_the_run_is_that_of_a_plain_scan(
    wanted: bytes, marks: set[int], pieces: list[int]
) -> None:
    """However the bytes are cut into chunks, the first stretch is what one loop finds."""
    at = sorted(mark for mark in marks if mark < len(wanted))
    seen = bytes(byte ^ (255 if n in at else 0) for n, byte in enumerate(wanted))
    run = _first_run(_cut(wanted, pieces), map(memoryview, _cut(seen, pieces[::-1])))
    if not at:
        assert run is None
        return
    last = at[0]
    for mark in at[1:]:
        if mark - last > 16:
            break
        last = mark
    assert run is not None
    assert (run.first_byte, run.nbytes) == (at[0], last - at[0] + 1)
    assert run.seen[: run.nbytes] == seen[at[0] : last + 1]


def _cut(content: bytes, sizes: list[int]) -> Iterator[bytes]:
    position, turn = 0, 0
    while position < len(content):
        size = sizes[turn % len(sizes)]
        yield content[position : position + size]
        position, turn = position + size, turn + 1


SKIPS_ONE = """
from weightload import load as _load


class Loaded(dict):
    pass


def load(checkpoint, *, device, driver):
    loaded = _load(checkpoint, device=device, driver=driver)
    _, address = driver.cuMemAlloc(loaded["head"].nbytes)
    tensors = Loaded(loaded)
    tensors["head"] = Skipped(loaded["head"], int(address))
    tensors.close = loaded.close
    return tensors


class Skipped:
    def __init__(self, tensor, address):
        self.dtype, self.shape, self.nbytes = tensor.dtype, tensor.shape, tensor.nbytes
        self._address = address

    def data_ptr(self):
        return self._address
"""


def test_a_tensor_that_was_never_loaded_holds_poison(
    stub: Callable[..., Request], checkpoint: Path
) -> None:
    """A loader that skips a tensor is found out, and the bytes say that nobody wrote them."""
    truth = Truth(str(checkpoint), file_manifest(tensor_places(checkpoint)))
    ended = run(stub(SKIPS_ONE, kind="hash", truth=truth), 60.0)
    assert isinstance(ended.outcome, Result), ended.said
    assert {name: each.content for name, each in ended.outcome.mismatches.items()} == {
        "head": "poison"
    }
