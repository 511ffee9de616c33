"""Device memory is real bytes that the host cannot reach; nobody's bytes show."""

import ctypes
import mmap
import os
import tempfile

import pytest

from fakecuda import FakeCuda, HazardError, Seeded
from fakecuda.memory import Memory
from tests.fakecuda.programs import Setup, ok, pattern


@pytest.mark.parametrize("nbytes", [1, 255, 4096, 70_000, 3 << 20])
def test_bytes_come_back(nbytes: int) -> None:
    """What is copied to the device is what comes back, whatever the size."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        source, target = setup.pinned(nbytes), setup.device(nbytes)
        ctypes.memmove(source, pattern(nbytes), nbytes)
        ok(cu.cuMemcpyHtoD(target, source, nbytes))
        assert setup.read(target, nbytes) == pattern(nbytes)
        setup.give_back()


def test_device_addresses_are_aligned_to_256_and_no_more() -> None:
    """Addresses are multiples of 256 and never of 512, so that no one relies on more."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        addresses = [setup.device(nbytes) for nbytes in (1, 256, 5000, 1 << 20)]
        assert {address % 512 for address in addresses} == {256}
        setup.give_back()


def test_pinned_addresses_are_not_page_aligned() -> None:
    """Whoever needs page alignment must make it inside the allocation."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        addresses = [setup.pinned(nbytes) for nbytes in (1, 4096, 1 << 20)]
        assert {address % mmap.PAGESIZE for address in addresses} == {512}
        setup.give_back()


def test_the_host_cannot_read_into_device_memory() -> None:
    """A file read into a device address gives EFAULT, as on a GPU without shared tables."""
    with FakeCuda() as cu, tempfile.TemporaryFile() as file:
        setup = Setup(cu)
        target = setup.device(4096)
        file.write(b"x" * 4096)
        file.flush()
        libc = ctypes.CDLL(None, use_errno=True)
        libc.pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)
        assert libc.pread(file.fileno(), target, 4096, 0) == -1
        assert os.strerror(ctypes.get_errno()) == "Bad address"
        setup.give_back()


def test_pinned_memory_takes_a_file_read() -> None:
    """A file can be read straight into pinned memory."""
    with FakeCuda() as cu, tempfile.TemporaryFile() as file:
        setup = Setup(cu)
        slot = setup.pinned(4096)
        file.write(pattern(4096))
        file.flush()
        view = (ctypes.c_char * 4096).from_address(slot)
        assert os.preadv(file.fileno(), [view], 0) == 4096
        assert ctypes.string_at(slot, 4096) == pattern(4096)
        setup.give_back()


def test_fresh_memory_is_poisoned_by_the_seed() -> None:
    """Fresh memory is neither zeros nor the same for two seeds, and repeats for one."""
    seen = []
    for seed in ("one", "one", "two"):
        with FakeCuda(seed=seed) as cu:
            setup = Setup(cu)
            seen.append(ctypes.string_at(setup.pinned(64), 64))
            setup.give_back()
    assert seen[0] == seen[1] != seen[2]
    assert seen[0].count(0) < 8


def test_writing_beside_pinned_memory_is_noticed() -> None:
    """A host write just before or behind an allocation is a hazard when it is freed."""
    for offset in (-1, 100):
        cu = FakeCuda()
        setup = Setup(cu)
        address = setup.pinned(100)
        byte = ctypes.c_uint8.from_address(address + offset)
        byte.value ^= 0xFF
        setup.give_back()
        with pytest.raises(HazardError, match="GUARD-OVERWRITTEN"):
            cu.close()


def test_device_addresses_are_used_again_when_the_schedule_says_so() -> None:
    """Some schedule hands a freed address out again, as a real allocator does."""
    recycled = set()
    for seed in range(20):
        with FakeCuda(choices=Seeded(seed)) as cu:
            setup = Setup(cu)
            first = ok(cu.cuMemAlloc(512))
            ok(cu.cuMemFree(first))
            recycled.add(setup.device(512) == first)
            setup.give_back()
    assert recycled == {True, False}


def test_handles_are_used_again_when_the_schedule_says_so() -> None:
    """Some schedule gives a new event the handle of a destroyed one."""
    recycled = set()
    for seed in range(20):
        with FakeCuda(choices=Seeded(seed)) as cu:
            setup = Setup(cu)
            first = ok(cu.cuEventCreate(2))
            ok(cu.cuEventDestroy(first))
            recycled.add(setup.event() == first)
            setup.give_back()
    assert recycled == {True, False}


def test_write_combined_memory_has_two_addresses() -> None:
    """The device's address of write-combined memory works in copies and is not the host's."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        host, target = setup.pinned(4096, 4), setup.device(4096)
        ctypes.memmove(host, pattern(4096), 4096)
        device = ok(cu.cuMemHostGetDevicePointer(host, 0))
        assert device != host
        ok(cu.cuMemcpyDtoD(target, device + 96, 4000))
        assert setup.read(target, 4000) == pattern(4096)[96:]
        setup.give_back()


def test_written_ranges_merge() -> None:
    """Adjacent and overlapping written ranges count as one, gaps stay gaps."""
    memory = Memory("0", 256, misalign=True)
    block = memory.new_device(1000, None, (), recycle=False)
    for start, end in ((0, 10), (20, 30), (10, 20), (500, 600), (550, 700)):
        block.mark_written(start, end)
    assert block.written == [(0, 30), (500, 700)]
    assert block.is_written(5, 25)
    assert not block.is_written(25, 31)
    assert not block.is_written(499, 501)
