"""Many small tensors travel in few copies, and every byte still lands in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weightload
from fakecuda import FakeCuda
from fixtures.checkpoints import Tensor, write_checkpoint
from tests.weightload.support import device_tensors, driver_calls, file_tensors
from weightload.device.packing import SMALL_BYTES_MAX, lay_out, runs
from weightload.plan import Slice, round_up

if TYPE_CHECKING:
    from pathlib import Path

SIZES = st.lists(
    st.sampled_from([1, 16, 255, 256, 257, 4000, SMALL_BYTES_MAX, SMALL_BYTES_MAX + 1, 50_000]),
    min_size=1,
    max_size=40,
)


@given(sizes=SIZES, room=st.sampled_from([0, 1000, 10_000, 1 << 20]), spaced=st.booleans())
def test_runs_bring_each_slice_once_to_its_address(
    sizes: list[int], room: int, *, spaced: bool
) -> None:
    """Laying every run out and copying it puts each tensor's bytes at its own address."""
    base, addresses, slices, position = 1 << 12, [], [], 0
    for tensor, nbytes in enumerate(sizes):
        addresses.append(base)
        slices.append(Slice(tensor, position, 0, nbytes))
        position += nbytes
        base += round_up(nbytes, 256)
    slot = memoryview(bytearray(bytes((7 * i + 3) % 251 for i in range(position)) + bytes(room)))
    device = bytearray(base)
    brought: list[Slice] = []
    for run in runs(slices, addresses, room, spaced=spaced):
        brought += run.slices
        if len(run.slices) == 1:
            start = run.slices[0].slot_offset
        else:
            assert run.nbytes <= room
            lay_out(run, addresses, slot, position)
            start = position
        device[run.address : run.address + run.nbytes] = slot[start : start + run.nbytes]
    assert brought == slices
    for piece in slices:
        there = bytes(device[addresses[piece.tensor] :][: piece.nbytes])
        assert there == bytes(slot[piece.slot_offset :][: piece.nbytes])


@pytest.mark.parametrize("verify", [None, "sha256"])
def test_twenty_thousand_small_tensors_take_few_copies(tmp_path: Path, verify: str | None) -> None:
    """20,000 tensors of 64 bytes beside 20 of 256 KiB: copies count the slots, not the tensors."""
    tensors = [Tensor(f"s{n:05d}", "F32", (16,)) for n in range(20_000)]
    tensors += [Tensor(f"w{n:03d}", "F32", (512, 128)) for n in range(20)]
    write_checkpoint(tmp_path, [tensors], seed=5)
    with FakeCuda() as fake, weightload.load(tmp_path, driver=fake, verify=verify) as loaded:
        assert loaded.report.copies == driver_calls(fake).count("cuMemcpyHtoDAsync") < 60
        assert device_tensors(fake, loaded) == file_tensors(tmp_path)


def test_memory_between_the_callers_tensors_is_not_touched(tmp_path: Path) -> None:
    """With `into`, what lies between two tensors is somebody's: it keeps its bytes."""
    write_checkpoint(tmp_path, [[Tensor(n, "U8", (200,)) for n in ("a", "b", "c")]], seed=5)
    with FakeCuda() as fake:
        whole = weightload.load(tmp_path, driver=fake)
        first = whole["a"].address
        between = {"gap": weightload.DeviceTensor(first + 200, 56, "U8", (56,))}
        fake.cuCtxSetCurrent(fake.cuDevicePrimaryCtxRetain(0)[1])
        fake.cuMemsetD8(first, 0xEE, 768)
        fake.cuCtxSynchronize()
        fake.cuCtxSetCurrent(0)
        fake.cuDevicePrimaryCtxRelease(0)
        with weightload.load(tmp_path, driver=fake, into=whole) as loaded:
            assert device_tensors(fake, loaded) == file_tensors(tmp_path)
            assert device_tensors(fake, between) == {"gap": b"\xee" * 56}
        whole.close()
