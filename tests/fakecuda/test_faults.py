"""Any call fails on demand; what it leaves behind is what a real failure leaves."""

import ctypes
import time

import pytest

from fakecuda import FakeCuda, Limits, Replay, Seeded
from fakecuda.enums import CUresult
from tests.fakecuda.programs import Setup, ok

_OOM = CUresult.CUDA_ERROR_OUT_OF_MEMORY
_ASSERT = CUresult.CUDA_ERROR_ASSERT
_GIB = 1 << 30


def _names(*results: tuple[object, ...]) -> list[str]:
    return [result[0].name.removeprefix("CUDA_").removeprefix("ERROR_") for result in results]  # type: ignore[attr-defined]


def test_the_nth_call_fails_once() -> None:
    """A transient fault hits its call and no other."""
    with FakeCuda() as cu:
        cu.faults.fail("cuMemGetInfo", _OOM, nth=2)
        setup = Setup(cu)
        results = [cu.cuMemGetInfo() for _ in range(3)]
        assert _names(*results) == ["SUCCESS", "OUT_OF_MEMORY", "SUCCESS"]
        assert results[1][1:] == (None, None)
        setup.give_back()


def test_a_persistent_fault_goes_on() -> None:
    """A persistent fault hits its call and all later ones."""
    with FakeCuda() as cu:
        cu.faults.fail("cuMemGetInfo", _OOM, nth=2, persistent=True)
        setup = Setup(cu)
        results = [cu.cuMemGetInfo() for _ in range(3)]
        assert _names(*results) == ["SUCCESS", "OUT_OF_MEMORY", "OUT_OF_MEMORY"]
        setup.give_back()


def test_any_call_may_be_meant() -> None:
    """A star counts all calls that can fail; those that cannot are left out."""
    cu = FakeCuda()
    cu.faults.fail("*", _OOM, nth=2)
    assert _names(cu.cuInit(0), cu.cuDriverGetVersion()) == ["SUCCESS", "SUCCESS"]
    assert _names(cu.cuDeviceGet(0), cu.cuDeviceGet(0)) == ["SUCCESS", "OUT_OF_MEMORY"]
    cu.close()


@pytest.mark.parametrize(("call", "nth"), [("cuNoSuchCall", 1), ("cuMemAlloc", 0)])
def test_a_fault_that_cannot_be_is_refused(call: str, nth: int) -> None:
    """A misspelt call, or one before the first, is an error when it is planned."""
    with FakeCuda() as cu, pytest.raises(ValueError, match=r"no driver call|counted from 1"):
        cu.faults.fail(call, nth=nth)


def test_only_queued_work_fails_later() -> None:
    """A call that queues nothing has nothing that could fail later."""
    with FakeCuda() as cu, pytest.raises(ValueError, match="queues no work"):
        cu.faults.fail("cuMemAlloc", deferred=True)


def test_a_sticky_error_kills_the_context() -> None:
    """After a sticky code all calls of the context answer with it, and nothing is a leak."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        memory, stream = setup.device(16), setup.stream()
        cu.faults.fail("cuStreamSynchronize", _ASSERT)
        results = [
            cu.cuStreamSynchronize(stream),
            cu.cuMemFree(memory),
            cu.cuMemAlloc(1),
            cu.cuDevicePrimaryCtxRelease(0),
        ]
        assert _names(*results) == ["ASSERT", "ASSERT", "ASSERT", "SUCCESS"]


def test_a_plain_error_does_not_kill_the_context() -> None:
    """After any other code the next call works."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        cu.faults.fail("cuCtxSynchronize", CUresult.CUDA_ERROR_UNKNOWN)
        assert _names(cu.cuCtxSynchronize(), cu.cuCtxSynchronize()) == ["UNKNOWN", "SUCCESS"]
        setup.give_back()


@pytest.mark.parametrize(("schedule", "arrives"), [("", True), ("1", False)])
def test_a_failed_copy_may_run_all_the_same(schedule: str, *, arrives: bool) -> None:
    """An error may be an earlier operation's, so it proves nothing about this one's work."""
    cu = FakeCuda(choices=Replay(schedule))
    setup = Setup(cu)
    source, target, stream = setup.pinned(64), setup.device(64), setup.stream()
    ctypes.memset(source, 7, 64)
    cu.faults.fail("cuMemcpyHtoDAsync")
    assert _names(cu.cuMemcpyHtoDAsync(target, source, 64, stream)) == ["UNKNOWN"]
    ok(cu.cuCtxSynchronize())
    assert (setup.read(target, 64) == bytes([7]) * 64) is arrives
    setup.give_back()
    cu.close(check=False)


def test_a_deferred_error_comes_out_of_a_later_call() -> None:
    """The call succeeds, its bytes never arrive, and the wait for it has the error."""
    cu = FakeCuda()
    setup = Setup(cu)
    source, target, stream = setup.pinned(64), setup.device(64), setup.stream()
    ctypes.memset(source, 7, 64)
    cu.faults.fail("cuMemcpyHtoDAsync", _OOM, deferred=True)
    results = [
        cu.cuMemcpyHtoDAsync(target, source, 64, stream),
        cu.cuStreamSynchronize(stream),
        cu.cuStreamSynchronize(stream),
    ]
    assert _names(*results) == ["SUCCESS", "OUT_OF_MEMORY", "SUCCESS"]
    assert setup.read(target, 64) != bytes([7]) * 64
    setup.give_back()
    cu.close(check=False)


def test_a_deferred_sticky_error_kills_the_context() -> None:
    """Work that dies of a sticky error takes the context along when it is awaited."""
    cu = FakeCuda()
    setup = Setup(cu)
    stream, target = setup.stream(), setup.device(64)
    cu.faults.fail("cuMemsetD8Async", _ASSERT, deferred=True)
    results = [
        cu.cuMemsetD8Async(target, 1, 64, stream),
        cu.cuMemGetInfo(),
        cu.cuStreamSynchronize(stream),
        cu.cuMemGetInfo(),
    ]
    assert _names(*results) == ["SUCCESS", "SUCCESS", "ASSERT", "ASSERT"]
    ok(cu.cuDevicePrimaryCtxRelease(0))
    cu.close()


def test_a_deferred_error_may_come_out_of_any_later_call() -> None:
    """Where the work has run by itself, whatever is called next has the error."""
    found = set()
    for seed in range(30):
        cu = FakeCuda(choices=Seeded(seed))
        setup = Setup(cu)
        stream, target = setup.stream(), setup.device(64)
        cu.faults.fail("cuMemsetD8Async", _OOM, deferred=True)
        ok(cu.cuMemsetD8Async(target, 1, 64, stream))
        found.add(tuple(_names(cu.cuMemGetInfo(), cu.cuStreamSynchronize(stream))))
        setup.give_back()
        cu.close(check=False)
    assert found == {("OUT_OF_MEMORY", "SUCCESS"), ("SUCCESS", "OUT_OF_MEMORY")}


def test_a_failed_free_is_no_leak() -> None:
    """What the driver would not take back is not the program's fault."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        memory = ok(cu.cuMemAlloc(16))
        cu.faults.fail("cuMemFree")
        assert _names(cu.cuMemFree(memory)) == ["UNKNOWN"]
        setup.give_back()


def test_a_call_may_take_long() -> None:
    """A delayed call takes its time and then succeeds; other threads are not held up."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        cu.faults.delay("cuMemGetInfo", 0.05)
        start_s = time.monotonic()
        ok(cu.cuMemGetInfo())
        assert time.monotonic() - start_s >= 0.05
        setup.give_back()


def test_pinned_memory_ends_cumulatively() -> None:
    """Pinned allocations succeed up to the limit and are refused beyond it."""
    with FakeCuda(limits=Limits(pinned_bytes=1000)) as cu:
        setup = Setup(cu)
        setup.pinned(700)
        assert _names(cu.cuMemHostAlloc(400, 0)) == ["OUT_OF_MEMORY"]
        setup.pinned(300)
        setup.give_back()


def test_a_limit_of_nothing_is_a_limit() -> None:
    """Where no byte may be pinned, the smallest pin is refused."""
    with FakeCuda(limits=Limits(pinned_bytes=0)) as cu:
        setup = Setup(cu)
        assert _names(cu.cuMemHostAlloc(1, 0)) == ["OUT_OF_MEMORY"]
        setup.give_back()


def test_one_pin_has_a_limit() -> None:
    """A single pin beyond the limit is refused with the code that was asked for."""
    with FakeCuda(limits=Limits(pinned_bytes_per_call=(1 << 31) - 1)) as cu:
        setup = Setup(cu)
        assert _names(cu.cuMemHostAlloc(1 << 31, 0)) == ["INVALID_VALUE"]
        setup.give_back()


def test_pinning_fails_under_device_pressure() -> None:
    """A ring that is allocated after the weights fails where one before them does not."""
    with FakeCuda(limits=Limits(pin_below_device_bytes=1000)) as cu:
        setup = Setup(cu)
        setup.pinned(100)
        setup.device(1000)
        assert _names(cu.cuMemHostAlloc(100, 0)) == ["OUT_OF_MEMORY"]
        setup.give_back()


def test_device_memory_ends() -> None:
    """Device memory is refused beyond its limit and can be had again after a free."""
    with FakeCuda(limits=Limits(device_bytes=1000)) as cu:
        setup = Setup(cu)
        first = ok(cu.cuMemAlloc(800))
        assert _names(cu.cuMemAlloc(300)) == ["OUT_OF_MEMORY"]
        assert ok(cu.cuMemGetInfo()) == (200, 1000)
        ok(cu.cuMemFree(first))
        setup.device(1000)
        setup.give_back()


def test_page_cache_counts_as_used_on_a_shared_pool() -> None:
    """On a GB10, free leaves out the page cache, which gives way to allocations."""
    limits = Limits(device_bytes=1000, page_cache_bytes=900)
    with FakeCuda("gb10", limits=limits) as cu:
        setup = Setup(cu)
        assert ok(cu.cuMemGetInfo()) == (100, 1000)
        assert cu.available_bytes == 1000
        setup.pinned(50)
        assert (ok(cu.cuMemGetInfo())[0], cu.available_bytes) == (50, 950)
        setup.device(400)
        assert (ok(cu.cuMemGetInfo())[0], cu.available_bytes) == (0, 550)
        assert _names(cu.cuMemAlloc(600)) == ["OUT_OF_MEMORY"]
        setup.give_back()


def test_page_cache_does_not_count_on_a_discrete_gpu() -> None:
    """Where memory is not shared, page cache and pinned memory leave free alone."""
    limits = Limits(device_bytes=1000, page_cache_bytes=900)
    with FakeCuda("h200", limits=limits) as cu:
        setup = Setup(cu)
        setup.pinned(500)
        assert ok(cu.cuMemGetInfo()) == (1000, 1000)
        setup.give_back()
