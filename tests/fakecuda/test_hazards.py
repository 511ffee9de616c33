"""Hazards: each broken rule is reported once, under its id, with where and what."""

import ctypes
import mmap
import threading

import pytest

from fakecuda import HAZARDS, FakeCuda, Hazard, HazardError, Seeded
from tests.fakecuda.programs import Setup, ok, ring_load

_KIB = 1024


def _only(cu: FakeCuda) -> Hazard:
    """The one hazard that was found."""
    cu.close(check=False)
    (hazard,) = cu.hazards
    return hazard


def test_ids_are_stable() -> None:
    """Ids are promises: these may be joined by others but not change."""
    assert {
        "PIN-REUSE-BEFORE-COPY",
        "FREE-WHILE-PENDING",
        "READ-BEFORE-DONE",
        "WRITE-BEFORE-DONE",
        "READ-UNWRITTEN",
        "OOB-SOURCE",
        "OOB-DESTINATION",
        "COPY-DIRECTION",
        "OVERLAPPING-COPY",
        "USE-AFTER-FREE",
        "USE-AFTER-DESTROY",
        "BAD-FREE",
        "GUARD-OVERWRITTEN",
        "NO-CONTEXT",
        "UNCHECKED-ERROR",
        "NEVER-AWAITED",
        "LEAK-AT-CLOSE",
    } == set(HAZARDS)


def test_a_clean_program_has_none() -> None:
    """A right loader breaks no rule."""
    with FakeCuda() as cu:
        ring_load(cu, b"abc" * 1000, chunk=512, slots=3)
    assert cu.hazards == ()


def test_reuse_is_found_by_range() -> None:
    """Changing one byte in the middle of a pending copy's source names that byte."""
    cu = FakeCuda()
    setup = Setup(cu)
    source, target, stream = setup.filled(_KIB), setup.device(_KIB), setup.stream()
    ok(cu.cuMemcpyHtoDAsync(target, source + 100, 500, stream))
    ctypes.c_uint8.from_address(source + 300).value ^= 1
    ok(cu.cuStreamSynchronize(stream))
    setup.give_back()
    hazard = _only(cu)
    assert hazard.id == "PIN-REUSE-BEFORE-COPY"
    assert "bytes [300, 301) of pinned0" in hazard.detail
    assert "test_reuse_is_found_by_range" in hazard.other_site
    assert "programs.py" in hazard.allocation_site


def test_writing_beside_a_pending_copy_is_no_reuse() -> None:
    """Only the copy's own range counts, not the slot that it lies in."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        source, target, stream = setup.filled(_KIB), setup.device(_KIB), setup.stream()
        ok(cu.cuMemcpyHtoDAsync(target, source + 100, 500, stream))
        ctypes.memset(source, 1, 100)
        ctypes.memset(source + 600, 1, _KIB - 600)
        ok(cu.cuStreamSynchronize(stream))
        setup.give_back()


def test_reuse_is_found_although_the_copy_won() -> None:
    """A write after the copy has run, but before the host knew, is the same mistake."""
    cu = FakeCuda()
    setup = Setup(cu)
    source, target, stream = setup.filled(_KIB), setup.device(_KIB), setup.stream()
    other, event = setup.stream(), setup.event()
    ctypes.memset(source, 1, _KIB)
    ok(cu.cuMemcpyHtoDAsync(target, source, _KIB, stream))
    ok(cu.cuEventRecord(event, stream))
    # The other stream's wait makes the copy run; nothing tells the host so.
    ok(cu.cuStreamWaitEvent(other, event, 0))
    with cu._mutex:
        cu._engine.finish(cu._streams[stream].last)
    ctypes.memset(source, 2, _KIB)
    ok(cu.cuStreamSynchronize(stream))
    assert setup.read(target, _KIB) == bytes([1]) * _KIB
    setup.give_back()
    assert _only(cu).id == "PIN-REUSE-BEFORE-COPY"


def test_a_device_write_into_a_source_is_no_host_write() -> None:
    """A pinned buffer may be filled by one copy and emptied by the next in stream order."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        first, second = setup.device(_KIB), setup.device(_KIB)
        bounce, stream = setup.pinned(_KIB), setup.stream()
        ok(cu.cuMemsetD8Async(first, 7, _KIB, stream))
        ok(cu.cuMemcpyDtoHAsync(bounce, first, _KIB, stream))
        ok(cu.cuMemcpyHtoDAsync(second, bounce, _KIB, stream))
        ok(cu.cuMemsetD8Async(first, 8, _KIB, stream))
        ok(cu.cuMemcpyDtoHAsync(bounce, first, _KIB, stream))
        ok(cu.cuStreamSynchronize(stream))
        assert setup.read(second, _KIB) == bytes([7]) * _KIB
        setup.give_back()


def test_unordered_read_is_found_although_the_bytes_are_right() -> None:
    """Two streams without an event between them race, whoever ran first."""
    cu = FakeCuda()
    setup = Setup(cu)
    memory, back = setup.device(_KIB), setup.pinned(_KIB)
    writer, reader = setup.stream(), setup.stream()
    ok(cu.cuMemsetD8Async(memory, 1, _KIB, writer))
    ok(cu.cuMemcpyDtoHAsync(back, memory, _KIB, reader))
    for stream in (writer, reader):
        ok(cu.cuStreamSynchronize(stream))
    setup.give_back()
    hazard = _only(cu)
    assert hazard.id == "READ-BEFORE-DONE"
    assert "of device0" in hazard.detail
    assert hazard.site != hazard.other_site


def test_an_event_orders_two_streams() -> None:
    """With a record and a wait the same program is right."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        memory, back, event = setup.device(_KIB), setup.pinned(_KIB), setup.event()
        writer, reader = setup.stream(), setup.stream()
        ok(cu.cuMemsetD8Async(memory, 1, _KIB, writer))
        ok(cu.cuEventRecord(event, writer))
        ok(cu.cuStreamWaitEvent(reader, event, 0))
        ok(cu.cuMemcpyDtoHAsync(back, memory, _KIB, reader))
        ok(cu.cuStreamSynchronize(reader))
        assert ctypes.string_at(back, _KIB) == bytes([1]) * _KIB
        setup.give_back()


def test_order_is_handed_on() -> None:
    """Order goes through a third stream that touches nothing itself."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        memory, back = setup.device(_KIB), setup.pinned(_KIB)
        streams = [setup.stream() for _ in range(3)]
        events = [setup.event(), setup.event()]
        ok(cu.cuMemsetD8Async(memory, 1, _KIB, streams[0]))
        for event, before, after in zip(events, streams, streams[1:], strict=False):
            ok(cu.cuEventRecord(event, before))
            ok(cu.cuStreamWaitEvent(after, event, 0))
        ok(cu.cuMemcpyDtoHAsync(back, memory, _KIB, streams[2]))
        ok(cu.cuStreamSynchronize(streams[2]))
        setup.give_back()


def test_the_legacy_stream_orders_blocking_streams_only() -> None:
    """A copy on the null stream is ordered with a blocking stream, not with others."""
    for flags, expected in ((0, set()), (1, {"READ-BEFORE-DONE"})):
        cu = FakeCuda()
        setup = Setup(cu)
        memory, back, stream = setup.device(_KIB), setup.pinned(_KIB), setup.stream(flags)
        ok(cu.cuMemsetD8Async(memory, 1, _KIB, 0))
        ok(cu.cuMemcpyDtoHAsync(back, memory, _KIB, stream))
        ok(cu.cuCtxSynchronize())
        setup.give_back()
        cu.close(check=False)
        assert {hazard.id for hazard in cu.hazards} == expected


def test_a_synchronous_pageable_copy_is_not_ordered_with_other_streams() -> None:
    """The device may not have the bytes yet when a synchronous pageable copy returns."""
    cu = FakeCuda()
    setup = Setup(cu)
    memory, back, stream = setup.device(_KIB), setup.pinned(_KIB), setup.stream()
    ok(cu.cuMemcpyHtoD(memory, ctypes.addressof(ctypes.create_string_buffer(_KIB)), _KIB))
    ok(cu.cuMemcpyDtoHAsync(back, memory, _KIB, stream))
    ok(cu.cuStreamSynchronize(stream))
    setup.give_back()
    assert _only(cu).id == "READ-BEFORE-DONE"


def test_a_synchronous_pageable_copy_needs_no_wait_of_its_own() -> None:
    """The null stream sees it in order, and freeing its target is no hazard."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        memory, source = setup.device(_KIB), ctypes.create_string_buffer(b"x" * _KIB, _KIB)
        ok(cu.cuMemcpyHtoD(memory, ctypes.addressof(source), _KIB))
        assert setup.read(memory, _KIB) == b"x" * _KIB
        ok(cu.cuMemcpyHtoD(memory, ctypes.addressof(source), _KIB))
        setup.give_back()


@pytest.mark.parametrize("profile", ["gb10", "gh200"])
def test_a_pageable_source_is_read_late_where_page_tables_are_shared(profile: str) -> None:
    """On such a device an asynchronous pageable copy may read its source afterwards."""
    cu = FakeCuda(profile)
    setup = Setup(cu)
    memory, stream = setup.device(_KIB), setup.stream()
    source = ctypes.create_string_buffer(b"e" * _KIB, _KIB)
    ok(cu.cuMemcpyHtoDAsync(memory, ctypes.addressof(source), _KIB, stream))
    ctypes.memset(source, ord("l"), _KIB)
    ok(cu.cuStreamSynchronize(stream))
    assert setup.read(memory, _KIB) == b"l" * _KIB
    setup.give_back()
    assert _only(cu).id == "PIN-REUSE-BEFORE-COPY"


def test_free_under_a_copy_delivers_poison() -> None:
    """A pinned buffer freed too early is read as the pattern, and both sites are named."""
    cu = FakeCuda()
    setup = Setup(cu)
    memory, stream = setup.device(_KIB), setup.stream()
    source = ok(cu.cuMemHostAlloc(_KIB, 0))
    ctypes.memset(source, 5, _KIB)
    ok(cu.cuMemcpyHtoDAsync(memory, source, _KIB, stream))
    ok(cu.cuMemFreeHost(source))
    ok(cu.cuStreamSynchronize(stream))
    assert setup.read(memory, _KIB).count(5) < _KIB // 8
    setup.give_back()
    hazard = _only(cu)
    assert hazard.id == "FREE-WHILE-PENDING"
    assert hazard.site != hazard.other_site


def test_an_unread_error_is_reported_where_it_was_dropped() -> None:
    """A result that nobody looks at is a hazard; comparing it in any way is enough."""
    cu = FakeCuda()
    setup = Setup(cu)
    cu.faults.fail("cuMemGetInfo", nth=1)
    cu.faults.fail("cuMemGetInfo", nth=2)
    assert cu.cuMemGetInfo()[0] != cu.CUresult.CUDA_SUCCESS
    cu.cuMemGetInfo()
    setup.give_back()
    hazard = _only(cu)
    assert hazard.id == "UNCHECKED-ERROR"
    assert hazard.detail == "CUDA_ERROR_UNKNOWN"
    assert "test_an_unread_error_is_reported" in hazard.site


def test_leaks_name_what_and_where() -> None:
    """Each thing that was never given back is named with the place that made it."""
    cu = FakeCuda()
    setup = Setup(cu)
    setup.device(100)
    setup.stream()
    cu.close(check=False)
    details = [hazard.detail for hazard in cu.hazards]
    assert {hazard.id for hazard in cu.hazards} == {"LEAK-AT-CLOSE"}
    expected = ["100 bytes of device0", "a stream", "a context, retained 1 more than released"]
    assert details == expected


def test_close_raises_all_and_keeps_them() -> None:
    """Closing raises one error with every hazard; they stay to be looked at."""
    cu = FakeCuda()
    Setup(cu).device(100)
    with pytest.raises(HazardError, match="2 hazards") as caught:
        cu.close()
    assert caught.value.hazards == cu.hazards


def test_an_error_on_its_way_out_is_not_hidden() -> None:
    """Leaving the `with` block by an exception does not replace it by hazards."""

    def body() -> None:
        with FakeCuda() as cu:
            Setup(cu).device(100)
            raise KeyError

    with pytest.raises(KeyError):
        body()


def test_a_thread_without_context_is_told() -> None:
    """A call on a thread that never set a context is refused and reported."""
    cu = FakeCuda()
    setup = Setup(cu)
    codes = []
    thread = threading.Thread(target=lambda: codes.append(cu.cuMemAlloc(16)[0]))
    thread.start()
    thread.join()
    assert codes == [cu.CUresult.CUDA_ERROR_INVALID_CONTEXT]
    setup.give_back()
    assert _only(cu).id == "NO-CONTEXT"


def test_two_devices_do_not_share_events() -> None:
    """An event of one device's context cannot be recorded in another's stream."""
    cu = FakeCuda(devices=2)
    setup = Setup(cu)
    event = setup.event()
    ok(cu.cuCtxSetCurrent(ok(cu.cuDevicePrimaryCtxRetain(1))))
    stream = setup.stream()
    assert cu.cuEventRecord(event, stream)[0] == cu.CUresult.CUDA_ERROR_INVALID_HANDLE
    cu.close(check=False)


def test_the_host_writes_to_freed_memory() -> None:
    """A write through a pointer that was freed is found when the fake is closed."""
    cu = FakeCuda()
    setup = Setup(cu)
    address = setup.pinned(200_000)
    setup.give_back()
    ctypes.c_uint8.from_address(address + 150_000).value ^= 1
    hazard = _only(cu)
    assert hazard.id == "USE-AFTER-FREE"
    assert hazard.detail == "the host wrote to pinned0 after it was freed"


@pytest.mark.parametrize("to_device", [True, False])
def test_unregistered_memory_may_be_unmapped(*, to_device: bool) -> None:
    """Taking registered memory away under a copy is a hazard, and does not kill the test."""
    cu = FakeCuda()
    setup = Setup(cu)
    memory, stream = setup.device(8192), setup.stream()
    ok(cu.cuMemsetD8(memory, 3, 8192))
    ok(cu.cuCtxSynchronize())
    mapping = mmap.mmap(-1, 8192)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    ok(cu.cuMemHostRegister(address, 8192, 0))
    if to_device:
        ok(cu.cuMemcpyHtoDAsync(memory, address, 8192, stream))
    else:
        ok(cu.cuMemcpyDtoHAsync(address, memory, 8192, stream))
    ok(cu.cuMemHostUnregister(address))
    mapping.close()
    ok(cu.cuStreamSynchronize(stream))
    assert setup.read(memory, 8192) == bytes([3]) * 8192
    setup.give_back()
    assert _only(cu).id == "FREE-WHILE-PENDING"


def test_the_host_writes_where_a_copy_is_going_to() -> None:
    """Writing a pending copy's pinned target is found by range, whoever wins."""
    for seed in range(20):
        cu = FakeCuda(choices=Seeded(seed))
        setup = Setup(cu)
        memory, back, stream = setup.device(_KIB), setup.pinned(_KIB), setup.stream()
        ok(cu.cuMemsetD8Async(memory, 1, _KIB, stream))
        ok(cu.cuMemcpyDtoHAsync(back, memory, _KIB, stream))
        ctypes.c_uint8.from_address(back + 700).value ^= 2
        ok(cu.cuStreamSynchronize(stream))
        setup.give_back()
        hazard = _only(cu)
        assert hazard.id == "WRITE-BEFORE-DONE"
        assert "bytes [700, 701) of pinned0" in hazard.detail


def test_a_buffer_may_be_emptied_and_filled_in_stream_order() -> None:
    """A pinned buffer that one copy reads and the next one fills is no host write."""
    for seed in range(60):
        with FakeCuda(choices=Seeded(seed)) as cu:
            setup = Setup(cu)
            first, second = setup.device(_KIB), setup.device(_KIB)
            bounce, stream = setup.filled(_KIB, 7), setup.stream()
            ok(cu.cuMemsetD8Async(first, 8, _KIB, stream))
            ok(cu.cuMemcpyHtoDAsync(second, bounce, _KIB, stream))
            ok(cu.cuMemcpyDtoHAsync(bounce, first, _KIB, stream))
            ok(cu.cuMemcpyDtoHAsync(bounce, second, _KIB, stream))
            ok(cu.cuMemGetInfo())
            ok(cu.cuStreamSynchronize(stream))
            assert ctypes.string_at(bounce, _KIB) == bytes([7]) * _KIB
            setup.give_back()


@pytest.mark.parametrize("to_device", [True, False])
def test_freed_pinned_memory_is_not_pageable_memory(*, to_device: bool) -> None:
    """A copy from or to a pinned buffer that was freed is refused and reported."""
    cu = FakeCuda()
    setup = Setup(cu)
    memory, freed = setup.device(_KIB), ok(cu.cuMemHostAlloc(_KIB, 0))
    ok(cu.cuMemsetD8(memory, 0, _KIB))
    ok(cu.cuMemFreeHost(freed))
    if to_device:
        code = cu.cuMemcpyHtoD(memory, freed, _KIB)[0]
    else:
        code = cu.cuMemcpyDtoH(freed, memory, _KIB)[0]
    assert code == cu.CUresult.CUDA_ERROR_INVALID_VALUE
    setup.give_back()
    assert _only(cu).id == "USE-AFTER-FREE"


@pytest.mark.parametrize("written", [range(_KIB - 12), range(12, _KIB)])
def test_a_source_that_was_filled_in_part(written: range) -> None:
    """A pinned source whose end or beginning nobody ever wrote is reported."""
    cu = FakeCuda()
    setup = Setup(cu)
    memory, source = setup.device(_KIB), setup.pinned(_KIB)
    ctypes.memset(source + written.start, 1, len(written))
    ok(cu.cuMemcpyHtoD(memory, source, _KIB))
    setup.give_back()
    hazard = _only(cu)
    assert hazard.id == "READ-UNWRITTEN"
    assert "of pinned0" in hazard.detail


def test_a_copy_onto_itself() -> None:
    """Source and target of one copy must not share a byte."""
    for distance, expected in ((_KIB - 1, {"OVERLAPPING-COPY"}), (_KIB, set())):
        cu = FakeCuda()
        setup = Setup(cu)
        memory, stream = setup.device(2 * _KIB), setup.stream()
        ok(cu.cuMemsetD8Async(memory, 1, 2 * _KIB, stream))
        ok(cu.cuMemcpyDtoDAsync(memory + distance, memory, _KIB, stream))
        ok(cu.cuStreamSynchronize(stream))
        setup.give_back()
        cu.close(check=False)
        assert {hazard.id for hazard in cu.hazards} == expected


def test_the_driver_goes_by_addresses_and_the_fake_complains() -> None:
    """A host-to-device copy between two device addresses works, and is reported."""
    cu = FakeCuda()
    setup = Setup(cu)
    first, second = setup.device(_KIB), setup.device(_KIB)
    ok(cu.cuMemsetD8(first, 3, _KIB))
    ok(cu.cuMemcpyHtoD(second, first, _KIB))
    assert setup.read(second, _KIB) == bytes([3]) * _KIB
    setup.give_back()
    assert _only(cu).id == "COPY-DIRECTION"


def test_what_needs_no_context_is_no_hazard() -> None:
    """Frees and queries find the context by what they are given, as on an H200."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        memory, host = ok(cu.cuMemAlloc(16)), ok(cu.cuMemHostAlloc(16, 0))
        event = setup.event()
        ok(cu.cuCtxSetCurrent(0))
        ok(cu.cuEventQuery(event))
        ok(cu.cuMemFree(memory))
        ok(cu.cuMemFreeHost(host))
        ok(cu.cuCtxSetCurrent(setup.context))
        setup.give_back()


def test_a_lost_context_is_lost_for_those_too() -> None:
    """Without a current context, the owner's fate still decides."""
    cu = FakeCuda()
    setup = Setup(cu)
    memory = ok(cu.cuMemAlloc(16))
    cu.faults.fail("cuCtxSynchronize", cu.CUresult.CUDA_ERROR_ASSERT)
    assert cu.cuCtxSynchronize()[0] == cu.CUresult.CUDA_ERROR_ASSERT
    ok(cu.cuCtxSetCurrent(0))
    assert cu.cuMemFree(memory)[0] == cu.CUresult.CUDA_ERROR_ASSERT
    ok(cu.cuCtxSetCurrent(setup.context))
    ok(cu.cuDevicePrimaryCtxRelease(0))
    cu.close()


def test_a_closed_fake_is_deinitialised() -> None:
    """Calls after the end answer as a driver does at the interpreter's exit."""
    with FakeCuda() as cu:
        ok(cu.cuInit(0))
    assert cu.cuDeviceGetCount()[0] == cu.CUresult.CUDA_ERROR_DEINITIALIZED


def test_a_report_names_the_call() -> None:
    """Where there is nothing else to say, the call is named."""
    cu = FakeCuda()
    ok(cu.cuInit(0))
    assert int(cu.cuMemGetInfo()[0]) != 0
    assert "in cuMemGetInfo" in str(_only(cu))
