"""Several host threads share one fake: nothing tears, nothing hangs, order is kept."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fakecuda import FakeCuda, StuckError
from tests.fakecuda.programs import Setup, ok, pattern

_MIB = 1 << 20


@pytest.mark.parametrize("nbytes", [5000, 3 * _MIB])
def test_many_threads_load_at_once(nbytes: int) -> None:
    """Eight threads with their own slots and streams each load their own bytes."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        slots = [(setup.pinned(nbytes), setup.stream(), setup.event()) for _ in range(8)]
        target = setup.device(8 * nbytes)
        data = [pattern(nbytes + i)[i:] for i in range(8)]

        def load(number: int) -> None:
            ok(cu.cuCtxSetCurrent(setup.context))
            slot, stream, event = slots[number]
            for _ in range(5):
                ok(cu.cuEventSynchronize(event))
                ctypes.memmove(slot, data[number], nbytes)
                ok(cu.cuMemcpyHtoDAsync(target + number * nbytes, slot, nbytes, stream))
                ok(cu.cuEventRecord(event, stream))
            ok(cu.cuStreamSynchronize(stream))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(load, range(8)))
        assert setup.read(target, 8 * nbytes) == b"".join(data)
        setup.give_back()


def test_threads_may_share_one_stream() -> None:
    """Two threads that fill one stream see their own work done by their own events."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        stream, target = setup.stream(), setup.device(2 * _MIB)
        slots = [(setup.pinned(_MIB), setup.event()) for _ in range(2)]

        def load(number: int) -> None:
            ok(cu.cuCtxSetCurrent(setup.context))
            slot, event = slots[number]
            for value in range(1, 20):
                ctypes.memset(slot, value + number, _MIB)
                ok(cu.cuMemcpyHtoDAsync(target + number * _MIB, slot, _MIB, stream))
                ok(cu.cuEventRecord(event, stream))
                ok(cu.cuEventSynchronize(event))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(load, range(2)))
        expected = bytes([19]) * _MIB + bytes([20]) * _MIB
        assert setup.read(target, 2 * _MIB) == expected
        setup.give_back()


def test_a_new_thread_has_no_context() -> None:
    """A thread does not inherit the context of an earlier one, even under its number."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        seen: list[int] = []

        def look() -> None:
            seen.append(ok(cu.cuCtxGetCurrent()))
            ok(cu.cuCtxSetCurrent(setup.context))

        for _ in range(3):
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        assert seen == [0, 0, 0]
        setup.give_back()


def test_a_held_stream_waits_for_its_release() -> None:
    """A wait on a held stream returns when another thread lets the stream go."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        stream, target, source = setup.stream(), setup.device(64), setup.filled(64)
        cu.hold(stream)
        ok(cu.cuMemcpyHtoDAsync(target, source, 64, stream))
        done = threading.Event()

        def wait() -> None:
            ok(cu.cuCtxSetCurrent(setup.context))
            ok(cu.cuStreamSynchronize(stream))
            done.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not done.wait(0.1)
        cu.release(stream)
        assert done.wait(5)
        thread.join()
        setup.give_back()


def test_waiting_for_ever_is_an_error() -> None:
    """A wait that nothing can end raises instead of hanging, and says for what."""
    cu = FakeCuda(stuck_after_s=0.05)
    setup = Setup(cu)
    stream, event = setup.stream(), setup.event()
    cu.hold(stream)
    ok(cu.cuEventRecord(event, stream))
    with pytest.raises(StuckError, match=r"the record of call \d+: its stream is held"):
        cu.cuEventSynchronize(event)
    cu.close(check=False)


def test_only_what_is_held_can_be_released() -> None:
    """Releasing a stream that is not held is an error."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        with pytest.raises(ValueError, match="not held"):
            cu.release(setup.stream())
        setup.give_back()


def test_queries_say_no_before_they_say_yes() -> None:
    """By default an event with pending work is "not ready" before it is done."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        stream, event = setup.stream(), setup.event()
        target, source = setup.device(64), setup.filled(64)
        ok(cu.cuMemcpyHtoDAsync(target, source, 64, stream))
        ok(cu.cuEventRecord(event, stream))
        names = [cu.cuEventQuery(event)[0].name for _ in range(4)]
        ready = names.index("CUDA_SUCCESS")
        assert ready >= 1
        assert set(names[ready:]) == {"CUDA_SUCCESS"}
        setup.give_back()


def test_a_host_function_runs_in_order_and_tells_the_host() -> None:
    """When it runs, the work before it is done, and the host may use the slot again."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        stream, target, source = setup.stream(), setup.device(64), setup.filled(64)
        ctypes.memset(source, 1, 64)
        refill = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(
            lambda address: ctypes.memset(address, 2, 64) and None
        )
        function = ctypes.cast(refill, ctypes.c_void_p).value
        ok(cu.cuMemcpyHtoDAsync(target, source, 64, stream))
        ok(cu.cuLaunchHostFunc(stream, function, source))
        ok(cu.cuStreamSynchronize(stream))
        assert setup.read(target, 64) == bytes([1]) * 64
        assert ctypes.string_at(source, 64) == bytes([2]) * 64
        setup.give_back()
