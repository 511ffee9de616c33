"""The journal tells what happened, in names that do not change from run to run."""

import ctypes
import json

from fakecuda import FakeCuda, Recorder, Seeded, compare
from tests.fakecuda.programs import Setup, ok, pattern, ring_load


def _calls(cu: FakeCuda, name: str) -> list[dict[str, object]]:
    return [record for record in cu.journal.records() if record.get("call") == name]


def test_a_call_is_written_with_names() -> None:
    """Handles and addresses are named by what made them, with the offset."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        source, target, stream = setup.filled(100), setup.device(100), setup.stream()
        ok(cu.cuMemcpyHtoDAsync(target + 16, source + 32, 10, stream))
        ok(cu.cuStreamSynchronize(stream))
        setup.give_back()
    (record,) = _calls(cu, "cuMemcpyHtoDAsync")
    assert record["args"] == {
        "dstDevice": "device0+0x10",
        "srcHost": "pinned0+0x20",
        "ByteCount": 10,
        "hStream": "stream0",
    }
    assert record["result"] == "CUDA_SUCCESS"
    assert record["thread"] == 0
    assert str(record["at"]).startswith("test_journal.py:")


def test_work_is_written_when_it_runs() -> None:
    """A copy's pieces stand behind the call that made them run, and name their own call."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        source, target, stream = setup.filled(1000), setup.device(1000), setup.stream()
        ok(cu.cuMemcpyHtoDAsync(target, source, 1000, stream))
        ok(cu.cuMemGetInfo())
        ok(cu.cuStreamSynchronize(stream))
        setup.give_back()
    records = cu.journal.records()
    (copy,) = _calls(cu, "cuMemcpyHtoDAsync")
    (other,) = _calls(cu, "cuMemGetInfo")
    ran = [record for record in records if record.get("ran") == "copy"]
    assert [record["bytes"] for record in ran] == [[0, 500], [500, 1000]]
    assert {record["of"] for record in ran} == {copy["number"]}
    assert all(record["n"] > other["n"] for record in ran)


def test_lines_are_json() -> None:
    """Each line is one JSON object, in order."""
    with FakeCuda() as cu:
        ring_load(cu, pattern(100), chunk=64, slots=2)
    records = [json.loads(line) for line in cu.journal.lines()]
    assert [record["n"] for record in records] == list(range(len(records)))


def test_names_follow_reused_addresses() -> None:
    """An address that is handed out again gets the name of its new owner."""
    for seed in range(20):
        with FakeCuda(choices=Seeded(seed)) as cu:
            setup = Setup(cu)
            ok(cu.cuMemFree(ok(cu.cuMemAlloc(512))))
            memory = setup.device(512)
            ok(cu.cuMemsetD8(memory, 0, 512))
            setup.give_back()
        (record,) = _calls(cu, "cuMemsetD8")
        assert record["args"]["dstDevice"] == "device1"  # type: ignore[index]


def test_pageable_memory_is_elsewhere() -> None:
    """Memory that the driver did not hand out has no name, so that runs compare."""
    with FakeCuda() as cu:
        setup = Setup(cu)
        target, buffer = setup.device(16), ctypes.create_string_buffer(16)
        ok(cu.cuMemcpyHtoD(target, ctypes.addressof(buffer), 16))
        setup.give_back()
    (record,) = _calls(cu, "cuMemcpyHtoD")
    assert record["args"]["srcHost"] == "elsewhere"  # type: ignore[index]


def test_a_recorder_writes_the_same_calls() -> None:
    """A recorder around a driver and the fake's own journal agree on every call."""
    with FakeCuda() as cu:
        recorder = Recorder(cu)
        assert ring_load(recorder, pattern(500), chunk=200, slots=2) == pattern(500)
    assert compare(recorder.journal, cu.journal) == []


def test_a_recorder_passes_the_rest_through() -> None:
    """Enumerations and constants are the driver's own."""
    with FakeCuda() as cu:
        assert Recorder(cu).CUresult is cu.CUresult


def test_schedules_do_not_change_the_calls() -> None:
    """Two schedules of one program compare equal: polls and device work do not count."""

    def run(seed: int) -> FakeCuda:
        with FakeCuda(choices=Seeded(seed)) as cu:
            setup = Setup(cu)
            stream, target, source = setup.stream(), setup.device(200), setup.filled(200)
            ok(cu.cuMemcpyHtoDAsync(target, source, 200, stream))
            while int(cu.cuStreamQuery(stream)[0]):
                pass
            setup.give_back()
        return cu

    journals = [run(seed).journal for seed in range(6)]
    assert all(compare(journals[0], other) == [] for other in journals)


def test_a_changed_program_compares_unequal() -> None:
    """A dropped call shows as one line."""
    journals = []
    for settle in (True, False):
        cu = FakeCuda()
        ring_load(cu, pattern(300), chunk=100, slots=2, settle=settle)
        cu.close(check=False)
        journals.append(cu.journal)
    gone = [line for line in compare(*journals) if line.startswith(("-0", "+0"))]
    assert gone == [
        "-0: cuEventSynchronize(event0) -> CUDA_SUCCESS",
        "-0: cuEventSynchronize(event1) -> CUDA_SUCCESS",
        "-0: cuEventSynchronize(event0) -> CUDA_SUCCESS",
    ]
