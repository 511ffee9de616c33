"""A whole load on the fake driver: every byte in place, whatever happens on the way."""

from __future__ import annotations

import copy
import errno
import gc
import hashlib
import os
import pickle
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fakecuda
import weightload
from fakecuda import FakeCuda
from fixtures.checkpoints import Tensor, decoder, header_bytes, in_shards, write_checkpoint
from tests.weightload.support import ScriptedSystem, device_tensors, driver_calls, file_tensors
from weightload.host.collector import collector_held_off

if TYPE_CHECKING:
    from collections.abc import Callable

FIXTURES = Path(__file__).parents[2] / "fixtures"
SLOT = 1 << 16
SMALL: dict[str, Any] = {"slot_bytes": SLOT, "slot_count": 3, "threads": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of a small decoder, some 2 MB, with tensors larger than a slot."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, in_shards(decoder(3, 128, 512, 2000), 2), seed=7)
    return folder


def check_delivered(fake: FakeCuda, loaded: weightload.Loaded, folder: Path) -> None:
    """The device has the files' bytes, and closing leaves nothing behind."""
    wanted = file_tensors(folder)
    assert {name: wanted[name] for name in loaded} == device_tensors(fake, loaded)
    loaded.close()
    fake.close()


@pytest.mark.parametrize("route", ["direct", "buffered", "auto"])
@pytest.mark.parametrize("profile", ["h200", "gh200", "gb10"])
def test_every_byte_arrives(model: Path, route: str, profile: str) -> None:
    """By each route, on each kind of device, the device's bytes are the files'."""
    fake = FakeCuda(profile)
    loaded = weightload.load(model, driver=fake, route=route, **SMALL)
    assert len(loaded) == 39
    assert sum(loaded.report.route_bytes.values()) == loaded.report.wanted_bytes
    assert all(tensor.data_ptr() % 256 == 0 for tensor in loaded.values())
    check_delivered(fake, loaded, model)


@pytest.mark.parametrize(
    ("route", "profile"),
    [
        ("pageable", "h200"),
        ("pageable", "gb10"),
        ("touch", "h200"),
        ("touch", "gb10"),
        ("readonly-map", "gb10"),
        ("readonly-map", "gh200"),
        ("registered-map", "h200"),
    ],
)
@pytest.mark.parametrize("verify", [None, "sha256"])
def test_every_byte_arrives_by_the_other_routes(
    model: Path, route: str, profile: str, verify: str | None
) -> None:
    """The routes that are only taken when asked for deliver the same bytes."""
    fake = FakeCuda(profile)
    loaded = weightload.load(model, driver=fake, route=route, verify=verify, **SMALL)
    assert set(loaded.report.route_bytes) == {route}
    assert loaded.report.pinned_bytes == 0
    check_delivered(fake, loaded, model)


@pytest.mark.parametrize(
    ("call", "stays"),
    [("cuMemcpyHtoDAsync", False), ("cuEventRecord", False), ("cuStreamSynchronize", True)],
)
def test_a_failed_copy_from_a_mapping(model: Path, call: str, *, stays: bool) -> None:
    """Windows are unpinned after a failure, unless a copy out of them may still run."""
    fake = FakeCuda("h200")
    fake.faults.fail("cuMemcpyHtoDAsync", nth=2)
    fake.faults.fail(call, persistent=True)
    with pytest.raises(weightload.DriverError):
        weightload.load(model, driver=fake, route="registered-map", **SMALL)
    calls = driver_calls(fake)
    assert (calls.count("cuMemHostRegister") > calls.count("cuMemHostUnregister")) == stays
    fake.close(check=stays is False)


@pytest.mark.parametrize(
    ("route", "profile"), [("readonly-map", "h200"), ("registered-map", "gb10")]
)
def test_a_route_that_the_device_cannot_take(model: Path, route: str, profile: str) -> None:
    """A mapping route on the wrong device is refused before any byte is read."""
    with FakeCuda(profile) as fake, pytest.raises(weightload.UsageError, match="auto"):
        weightload.load(model, driver=fake, route=route)


@pytest.mark.parametrize("seed", range(8))
def test_every_byte_arrives_under_any_schedule(model: Path, seed: int) -> None:
    """Whatever the driver may do late, early or in pieces, settling keeps the bytes right."""
    fake = FakeCuda(choices=fakecuda.Seeded(str(seed)))
    check_delivered(fake, weightload.load(model, driver=fake, **SMALL), model)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 3, 255, 256, 4095, 4096, 4097, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT]),
        min_size=1,
        max_size=8,
    ),
    pad=st.integers(0, 15),
    route=st.sampled_from(["direct", "buffered"]),
    verify=st.sampled_from([None, "sha256"]),
)
def test_any_layout_arrives(
    tmp_path: Path, sizes: list[int], pad: int, route: str, verify: str | None
) -> None:
    """Tensors of every awkward size, at every misalignment, come out right."""
    tensors = [Tensor(f"t{number}", "U8", (size,)) for number, size in enumerate(sizes)]
    content = bytes((7 * i + 3) % 251 for i in range(sum(sizes)))
    (tmp_path / "model.safetensors").write_bytes(header_bytes(tensors, pad) + content)
    fake = FakeCuda()
    loaded = weightload.load(tmp_path, driver=fake, route=route, verify=verify, **SMALL)
    check_delivered(fake, loaded, tmp_path)


def test_a_checkpoint_of_empty_tensors(tmp_path: Path) -> None:
    """No bytes at all: the tensors are there, and no copy or allocation is made."""
    write_checkpoint(tmp_path, [[Tensor("a", "F32", (0,)), Tensor("b", "BF16", (0, 5))]], seed=1)
    fake = FakeCuda()
    loaded = weightload.load(tmp_path, driver=fake)
    assert {name: tensor.shape for name, tensor in loaded.items()} == {"a": (0,), "b": (0, 5)}
    assert loaded.report.copies == 0
    check_delivered(fake, loaded, tmp_path)


@pytest.mark.parametrize(
    ("profile", "pins", "unpins"),
    [
        ("h200", "cuMemHostRegister", "cuMemHostUnregister"),
        ("gb10", "cuMemHostAlloc", "cuMemFreeHost"),
    ],
)
def test_one_pinned_reservation(model: Path, profile: str, pins: str, unpins: str) -> None:
    """Spans grow from bytes to a full slot, and memory is pinned and given back exactly once."""
    fake = FakeCuda(profile)
    loaded = weightload.load(model, driver=fake, **SMALL)
    calls = driver_calls(fake)
    assert [name for name in calls if "Host" in name] == [pins, unpins]
    # On one shared pool the pin comes first: weights may leave too little room for it.
    assert profile != "gb10" or calls.index(pins) < calls.index("cuMemAlloc")
    assert loaded.report.pinned_bytes <= 3 * SLOT + (64 << 10)
    check_delivered(fake, loaded, model)


def test_the_calls_of_a_discrete_load_are_golden(tmp_path: Path) -> None:
    """What a discrete GPU is asked to do, call by call, changes only on purpose.

    After such a change, write the new list: the failure prints it.
    """
    write_checkpoint(tmp_path, [[Tensor("a", "U8", (SLOT,)), Tensor("b", "F32", (5, 3))]], seed=1)
    fake = FakeCuda("h200")
    with weightload.load(
        tmp_path, driver=fake, route="buffered", slot_bytes=SLOT, slot_count=2, threads=1
    ):
        pass
    golden = (FIXTURES / "journals" / "discrete_load.txt").read_text().splitlines()
    assert fake.journal.calls() == golden, "\n".join(fake.journal.calls())
    fake.close()


def test_reads_are_aligned_and_land_in_slots(model: Path) -> None:
    """A direct read's offset, length and address obey O_DIRECT, and there is no other buffer."""
    system = ScriptedSystem()
    fake = FakeCuda("gb10")
    loaded = weightload.load(model, driver=fake, route="direct", system=system, **SMALL)
    addresses = {address for _, _, address in system.reads}
    assert all(value % 4096 == 0 for read in system.reads for value in read)
    assert max(addresses) - min(addresses) < 3 * SLOT
    check_delivered(fake, loaded, model)


@pytest.mark.parametrize("route", ["direct", "buffered"])
@pytest.mark.parametrize("limit", [1, 511, 4096, 4097, SLOT - 1])
def test_short_reads_are_resumed(model: Path, route: str, limit: int) -> None:
    """A read that returns less than asked is continued, from an aligned byte where it must be."""
    system = ScriptedSystem(on_read=lambda number, _t, _o: limit if number % 3 == 0 else 1 << 30)
    fake = FakeCuda()
    loaded = weightload.load(model, driver=fake, route=route, system=system, **SMALL)
    check_delivered(fake, loaded, model)


def raising(number: int, error: OSError) -> Callable[[int, memoryview, int], int]:
    """A script that raises at the given read."""

    def on_read(now: int, _target: memoryview, _offset: int) -> int:
        if now == number:
            raise error
        return 1 << 30

    return on_read


@pytest.mark.parametrize("number", [0, 9])
def test_direct_reads_refused_midway_fall_back(model: Path, number: int) -> None:
    """A file system that opens with O_DIRECT and then refuses to read is read buffered."""
    system = ScriptedSystem(on_read=raising(number, OSError(errno.EINVAL, "Invalid argument")))
    fake = FakeCuda()
    loaded = weightload.load(model, driver=fake, route="direct", system=system, **SMALL)
    assert any("refused at a read" in words for words in loaded.report.fallbacks)
    assert loaded.report.route_bytes["buffered"] > 0
    check_delivered(fake, loaded, model)


def test_direct_refused_at_open_falls_back(model: Path) -> None:
    """A file system without O_DIRECT is read buffered, and the report says so for each file."""
    system = ScriptedSystem(direct_error=OSError(errno.EINVAL, "Invalid argument"))
    fake = FakeCuda()
    loaded = weightload.load(model, driver=fake, route="direct", system=system, **SMALL)
    assert len(loaded.report.fallbacks) == 2
    assert set(loaded.report.route_bytes) == {"buffered"}
    check_delivered(fake, loaded, model)


@pytest.mark.parametrize(
    ("share", "route"), [(1.0, "buffered"), (0.0, "direct"), (None, "buffered")]
)
def test_auto_follows_residency(model: Path, share: float | None, route: str) -> None:
    """What is in the page cache is read through it; the reason is in the report."""
    fake = FakeCuda()
    loaded = weightload.load(
        model, driver=fake, system=ScriptedSystem(cached_share=share), **SMALL
    )
    assert set(loaded.report.route_bytes) == {route}
    assert all(decision.reason for decision in loaded.report.decisions)
    check_delivered(fake, loaded, model)


@pytest.mark.parametrize("route", ["direct", "buffered"])
@pytest.mark.parametrize("number", [0, 7])
def test_an_io_error_names_shard_and_tensor(model: Path, route: str, number: int) -> None:
    """EIO stops the load with one sentence, and nothing is left behind."""
    system = ScriptedSystem(on_read=raising(number, OSError(errno.EIO, "Input/output error")))
    with FakeCuda() as fake, pytest.raises(weightload.ReadError, match=r"tensor '.+': Input"):
        weightload.load(model, driver=fake, route=route, system=system, **SMALL)


@pytest.mark.parametrize("route", ["direct", "buffered"])
def test_a_file_cut_while_it_is_read(tmp_path: Path, route: str) -> None:
    """Bytes that are gone when they are read are an error that names them, never zeros."""
    write_checkpoint(tmp_path, [[Tensor("a", "U8", (SLOT,)), Tensor("b", "U8", (SLOT,))]], seed=1)
    path = tmp_path / "model.safetensors"

    def cut(number: int, _target: memoryview, _offset: int) -> int:
        if number == 0:
            os.truncate(path, path.stat().st_size - 1)
        return 1 << 30

    system = ScriptedSystem(on_read=cut)
    with FakeCuda() as fake, pytest.raises(weightload.ReadError, match="tensor 'b'"):
        weightload.load(
            tmp_path, driver=fake, route=route, system=system, slot_bytes=SLOT, threads=1
        )


def test_a_file_rewritten_while_it_is_read(tmp_path: Path) -> None:
    """A shard that was written to during the load is refused, though every read succeeded."""
    write_checkpoint(tmp_path, [[Tensor("a", "U8", (3 * SLOT,))]], seed=1)
    path = tmp_path / "model.safetensors"

    def rewrite(number: int, _target: memoryview, _offset: int) -> int:
        if number == 1:
            os.utime(path, ns=(1, 1))
        return 1 << 30

    with FakeCuda() as fake, pytest.raises(weightload.ShardChangedError, match="model"):
        weightload.load(tmp_path, driver=fake, system=ScriptedSystem(on_read=rewrite), **SMALL)


def test_a_file_replaced_while_it_is_read(tmp_path: Path) -> None:
    """A new file renamed over the path does not mix in: the opened one is loaded whole."""
    write_checkpoint(tmp_path, [[Tensor("a", "U8", (3 * SLOT,))]], seed=1)
    path = tmp_path / "model.safetensors"
    old = path.read_bytes()[-3 * SLOT :]

    def replace(number: int, _target: memoryview, _offset: int) -> int:
        if number == 0:
            (tmp_path / "new").write_bytes(bytes(len(old)))
            (tmp_path / "new").replace(path)
        return 1 << 30

    with FakeCuda() as fake:
        system = ScriptedSystem(on_read=replace)
        with weightload.load(tmp_path, driver=fake, system=system, **SMALL) as loaded:
            assert device_tensors(fake, loaded) == {"a": old}


STEPS = {
    "cuMemHostRegister": 1,
    "cuEventCreate": 3,
    "cuMemAlloc": 1,
    "cuStreamCreate": 1,
}


@pytest.mark.parametrize(
    ("call", "nth"), [(call, nth) for call, count in STEPS.items() for nth in range(1, count + 1)]
)
def test_partial_allocation_is_cleaned_up(model: Path, call: str, nth: int) -> None:
    """Whichever allocation fails, everything taken before it is given back, once."""
    with FakeCuda() as fake:
        unknown = fake.CUresult.CUDA_ERROR_UNKNOWN
        fake.faults.fail(call, unknown, nth=nth)
        with pytest.raises(weightload.DriverError, match=call) as caught:
            weightload.load(model, driver=fake, **SMALL)
        assert caught.value.name == "CUDA_ERROR_UNKNOWN"


@pytest.mark.parametrize("call", ["cuMemcpyHtoDAsync", "cuEventRecord", "cuEventSynchronize"])
@pytest.mark.parametrize("nth", [1, 5])
@pytest.mark.parametrize("stream_lost", [False, True])
def test_a_failed_copy_quarantines_its_slot(
    model: Path, call: str, nth: int, *, stream_lost: bool
) -> None:
    """A slot whose copy, event or wait failed is neither rewritten nor freed.

    When the stream cannot be awaited either, the weights' memory stays as well: a copy
    into it may still be on its way.
    """
    fake = FakeCuda()
    fake.faults.fail(call, fake.CUresult.CUDA_ERROR_UNKNOWN, nth=nth)
    if stream_lost:
        fake.faults.fail("cuStreamSynchronize", persistent=True)
    with pytest.raises(weightload.DriverError, match=call):
        weightload.load(model, driver=fake, **SMALL)
    calls = driver_calls(fake)
    assert "cuMemHostUnregister" not in calls
    assert ("cuMemFree" in calls) != stream_lost
    assert threading.active_count() == 1
    # The fake sees what was left on purpose, and no race.
    fake.close(check=False)
    assert {hazard.id for hazard in fake.hazards} == {"LEAK-AT-CLOSE"}


def test_a_lost_context_keeps_the_first_error(model: Path) -> None:
    """After a sticky error every clean-up call fails too; the first error is the one raised."""
    fake = FakeCuda()
    fake.faults.fail("cuEventRecord", fake.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS, nth=3)
    with pytest.raises(weightload.DriverError, match="cuEventRecord") as caught:
        weightload.load(model, driver=fake, slot_bytes=SLOT, slot_count=3, threads=1)
    assert caught.value.name == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert any("while cleaning up" in note for note in caught.value.__notes__)
    fake.close(check=False)


def test_a_refused_pin_is_halved_then_pageable(model: Path) -> None:
    """Where little may be pinned the load goes on, slower, and says so."""
    fake = FakeCuda("gb10", limits=fakecuda.Limits(pinned_bytes=9 << 20))
    loaded = weightload.load(model, driver=fake, slot_bytes=4 << 20, slot_count=1, threads=2)
    assert loaded.report.ring_memory == "allocated"
    check_delivered(fake, loaded, model)
    fake = FakeCuda(limits=fakecuda.Limits(pinned_bytes=1))
    loaded = weightload.load(model, driver=fake, **SMALL)
    assert loaded.report.ring_memory == "pageable"
    assert loaded.report.pinned_bytes == 0
    assert len(loaded.report.fallbacks) == 2
    check_delivered(fake, loaded, model)


def test_close_order(model: Path) -> None:
    """Copies end, then events go, then the ring's memory, then the stream."""
    fake = FakeCuda()
    loaded = weightload.load(model, driver=fake, **SMALL)
    calls = driver_calls(fake)
    last = {name: len(calls) - 1 - calls[::-1].index(name) for name in set(calls)}
    order = ["cuMemcpyHtoDAsync", "cuStreamSynchronize", "cuEventDestroy", "cuMemHostUnregister"]
    places = [last[name] for name in [*order, "cuStreamDestroy"]]
    assert places == sorted(places)
    check_delivered(fake, loaded, model)


def test_only_wanted_bytes_are_read(model: Path) -> None:
    """A pattern loads its tensors, and reads no page that holds none of their bytes."""
    fake = FakeCuda()
    loaded = weightload.load(model, driver=fake, only=["*.q_proj.*", "model.norm.weight"], **SMALL)
    assert len(loaded) == 7
    assert loaded.report.read_bytes <= loaded.report.wanted_bytes + 2 * 4096 * len(loaded)
    check_delivered(fake, loaded, model)


def test_a_wish_that_cannot_be_met(model: Path) -> None:
    """Selecting what is not there, or two ways at once, is a sentence."""
    with FakeCuda() as fake:
        with pytest.raises(weightload.UsageError, match=r"no tensor 'x\*'"):
            weightload.load(model, driver=fake, only=["model.*", "x*"])
        with pytest.raises(weightload.UsageError, match="not both"):
            weightload.load(model, driver=fake, only=["*"], into={})
        with pytest.raises(weightload.UsageError, match=r"write \['x'\]"):
            weightload.load(model, driver=fake, only="x")


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": 0},
        {"threads": -1},
        {"threads": 2.0},
        {"threads": True},
        {"slot_count": 0},
        {"slot_count": "4"},
        {"slot_bytes": 0},
        {"slot_bytes": 65537},
        {"slot_bytes": None},
        {"read_ahead": -1},
        {"read_ahead": "2"},
        {"read_ahead_bytes": -5},
        {"read_ahead_bytes": 1.5},
        {"checkpoint": None},
        {"only": 3},
        {"into": ["t"]},
        {"manifest": "sha256"},
        {"manifest": {"t": "0" * 63}},
        {"manifest": {"t": "0" * 64 + "\n"}},
        {"manifest": {"t": "g" * 64}},
        {"manifest": {"t": b"0" * 64}},
        {"manifest": {7: "0" * 64}},
        {"progress": 1},
        {"route": ["direct"]},
        {"verify": ["sha256"]},
        {"only": [1]},
        {"only": [None]},
        {"only": b"abc"},
        {"into": {"model.norm.weight": None}},
        {"into": {"model.norm.weight": "x"}},
        {"slot_bytes": 1 << 36},
        {"checkpoint": "a\0b"},
        {"release": "x"},
        {"driver": 3},
        {"system": 3},
    ],
    ids=ascii,
)
def test_an_argument_of_the_wrong_kind(model: Path, wrong: dict[str, Any]) -> None:
    """Each is one sentence that names the argument or its value, and nothing is opened."""
    fake = FakeCuda()
    arguments: dict[str, Any] = {"checkpoint": model, "driver": fake} | wrong
    with pytest.raises(weightload.UsageError) as caught:
        weightload.load(**arguments)
    ((name, value),) = wrong.items()
    assert name in str(caught.value) or str(value) in str(caught.value)
    assert driver_calls(fake) == []


def test_bytes_that_nobody_brought_are_noticed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load whose readers brought too little does not hand out what it has."""
    monkeypatch.setattr("weightload.upload.Upload._drain", lambda _: None)
    with FakeCuda() as fake, pytest.raises(AssertionError, match=r"^0 of \d+ bytes"):
        weightload.load(model, driver=fake, **SMALL)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda each: each.__name__
)
def test_a_load_is_not_copied(model: Path, duplicate: Callable[[Any], Any]) -> None:
    """Two owners of one device memory would free it twice; the sentence says what to do."""
    with FakeCuda() as fake, weightload.load(model, driver=fake, **SMALL) as loaded:
        with pytest.raises(weightload.CopyError, match="cannot be copied or pickled") as caught:
            duplicate(loaded)
        assert isinstance(caught.value, TypeError)
        assert isinstance(caught.value, weightload.UsageError)


def test_tensors_of_the_callers_own_are_filled(model: Path) -> None:
    """`into` lands every byte in memory that was there before, and allocates none."""
    fake = FakeCuda()
    first = weightload.load(model, driver=fake, only=["*layernorm*"], **SMALL)
    before = driver_calls(fake).count("cuMemAlloc")
    second = weightload.load(model, driver=fake, into=first, **SMALL)
    assert driver_calls(fake).count("cuMemAlloc") == before
    assert {n: t.data_ptr() for n, t in first.items()} == {
        n: t.data_ptr() for n, t in second.items()
    }
    second.close()
    check_delivered(fake, first, model)


def test_tensors_that_do_not_fit_are_refused(model: Path) -> None:
    """A tensor of another shape is refused before any byte is copied."""
    name = "model.norm.weight"
    wrong = weightload.DeviceTensor(0, 64, "BF16", (32,))
    with FakeCuda() as fake, pytest.raises(weightload.UsageError, match=r"\[32\]"):
        weightload.load(model, driver=fake, into={name: wrong})


def test_digests_are_those_of_the_files(model: Path) -> None:
    """The manifest has every tensor, and a load checked against it passes."""
    fake = FakeCuda()
    loaded = weightload.load(model, driver=fake, verify="sha256", **SMALL)
    expected = {n: hashlib.sha256(b).hexdigest() for n, b in file_tensors(model).items()}
    assert loaded.manifest == expected
    loaded.close()
    check_delivered(fake, weightload.load(model, driver=fake, manifest=expected, **SMALL), model)


@pytest.mark.parametrize("slot_count", [1, 2, 3, 4, 8])
def test_hashing_beside_reading_waits_for_no_slot_for_ever(model: Path, slot_count: int) -> None:
    """However few slots there are, hashing ends, and digests do not depend on it."""
    fake = FakeCuda()
    loaded = weightload.load(
        model, driver=fake, verify="sha256", slot_bytes=SLOT, slot_count=slot_count, threads=2
    )
    expected = {n: hashlib.sha256(b).hexdigest() for n, b in file_tensors(model).items()}
    assert loaded.manifest == expected
    check_delivered(fake, loaded, model)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("slot_count", [1, 3, 4, 7])
def test_readers_that_all_hash_beside_reading_end(tmp_path: Path, slot_count: int) -> None:
    """Large tensors alone: a reader hands in the slot it keeps before it waits for another."""
    tensors = [Tensor(name, "U8", (3 * SLOT,)) for name in "abcd"]
    write_checkpoint(tmp_path, [tensors], seed=1)
    fake = FakeCuda("gb10")
    loaded = weightload.load(
        tmp_path, driver=fake, verify="sha256", slot_bytes=SLOT, slot_count=slot_count, threads=4
    )
    expected = {n: hashlib.sha256(b).hexdigest() for n, b in file_tensors(tmp_path).items()}
    assert loaded.manifest == expected
    check_delivered(fake, loaded, tmp_path)


def test_a_changed_byte_is_refused(model: Path) -> None:
    """One wrong digest names its tensor, and the device memory is given back."""
    with FakeCuda() as fake:
        with weightload.load(model, driver=fake, verify="sha256", **SMALL) as loaded:
            manifest = loaded.manifest | {"lm_head.weight": "0" * 64}
        with pytest.raises(weightload.VerificationError, match=r"1 of 39.*lm_head"):
            weightload.load(model, driver=fake, manifest=manifest, **SMALL)


def test_a_tensor_that_the_checkpoint_lacks_is_a_difference(model: Path) -> None:
    """The manifest of a larger checkpoint is refused by name, beside what else differs."""
    expected = {n: hashlib.sha256(b).hexdigest() for n, b in file_tensors(model).items()}
    more = expected | {f"not.there.{n}": "0" * 64 for n in range(7)}
    with FakeCuda() as fake:
        with pytest.raises(weightload.VerificationError) as caught:
            weightload.load(model, driver=fake, manifest=more, **SMALL)
        said = str(caught.value)
        assert "lacks 7 of 46 tensors of the manifest: not.there.0, not.there.1" in said
        assert "are not those of" not in said
        both = more | {"lm_head.weight": "0" * 64}
        with pytest.raises(weightload.VerificationError, match=r"1 of 39.*lm_head.*lacks 7 of 46"):
            weightload.load(model, driver=fake, manifest=both, **SMALL)
        small = dict(list(expected.items())[1:])
        with pytest.raises(weightload.VerificationError, match="1 of 39"):
            weightload.load(model, driver=fake, manifest=small, **SMALL)


def test_with_a_selection_the_manifest_may_name_more(model: Path) -> None:
    """One manifest does for every part of a checkpoint: only what is loaded is compared."""
    expected = {n: hashlib.sha256(b).hexdigest() for n, b in file_tensors(model).items()}
    fake = FakeCuda()
    names = ["model.norm.weight", "lm_head.weight"]
    loaded = weightload.load(model, driver=fake, only=names, manifest=expected, **SMALL)
    assert loaded.manifest == {name: expected[name] for name in loaded}
    again = weightload.load(model, driver=fake, into=loaded, manifest=expected, **SMALL)
    assert again.manifest == loaded.manifest
    again.close()
    check_delivered(fake, loaded, model)


def test_the_case_of_a_digest_does_not_matter(model: Path) -> None:
    """Upper-case hexadecimal digits are the same digest."""
    expected = {n: hashlib.sha256(b).hexdigest() for n, b in file_tensors(model).items()}
    fake = FakeCuda()
    upper = {name: digest.upper() for name, digest in expected.items()}
    loaded = weightload.load(model, driver=fake, manifest=upper, **SMALL)
    assert loaded.manifest == expected
    check_delivered(fake, loaded, model)


def test_what_cannot_fit_is_refused_before_the_first_byte(model: Path) -> None:
    """On one shared pool the budget is MemAvailable, whatever the driver calls free."""
    wanted = sum(len(content) for content in file_tensors(model).values())
    short = ScriptedSystem(available_bytes=wanted)
    with FakeCuda("gb10") as fake, pytest.raises(weightload.DeviceMemoryError, match="available"):
        weightload.load(model, driver=fake, system=short, **SMALL)
    assert short.reads == []
    fake = FakeCuda("gb10", limits=fakecuda.Limits(page_cache_bytes=119 << 30))
    roomy = ScriptedSystem(available_bytes=100 << 30)
    check_delivered(fake, weightload.load(model, driver=fake, system=roomy, **SMALL), model)


def test_progress_ends_at_the_whole(model: Path) -> None:
    """The callback sees growing counts up to every wanted byte."""
    seen: list[tuple[int, int]] = []
    fake = FakeCuda()
    loaded = weightload.load(
        model, driver=fake, progress=lambda done, of: seen.append((done, of)), **SMALL
    )
    assert seen == sorted(seen)
    assert seen[-1] == (loaded.report.wanted_bytes, loaded.report.wanted_bytes)
    check_delivered(fake, loaded, model)


def test_an_error_in_the_progress_callback_stops_the_load(model: Path) -> None:
    """The caller's own exception comes back, with nothing left behind."""

    def fail(_done: int, _of: int) -> None:
        raise KeyError("mine")

    with FakeCuda() as fake, pytest.raises(KeyError, match="mine"):
        weightload.load(model, driver=fake, progress=fail, **SMALL)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"route": "fast"}, "is not a route"),
        ({"verify": "md5"}, "use verify="),
        ({"threads": -1}, "at least 1"),
        ({"slot_bytes": 4097}, "not a multiple"),
        ({"device": "tpu:0"}, "is not a CUDA device"),
        ({"device": 3}, "no device cuda:3"),
    ],
)
def test_arguments_are_checked(model: Path, arguments: dict[str, Any], says: str) -> None:
    """A wrong argument is one sentence."""
    with FakeCuda() as fake, pytest.raises(weightload.WeightloadError, match=says):
        weightload.load(model, driver=fake, **arguments)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(model: Path, *, enabled: bool) -> None:
    """Whether a load succeeds or fails, the collector is on after it if it was before."""
    (gc.enable if enabled else gc.disable)()
    try:
        with FakeCuda() as fake:
            weightload.load(model, driver=fake, **SMALL).close()
            assert gc.isenabled() == enabled
            with pytest.raises(weightload.CheckpointError):
                weightload.load(model / "nowhere", driver=fake)
            assert gc.isenabled() == enabled
    finally:
        gc.enable()


@pytest.mark.parametrize("number", [0, 3, 9])
def test_ctrl_c_stops_the_readers_and_gives_everything_back(model: Path, number: int) -> None:
    """An interrupt during a load is raised when no thread and no copy uses the ring any more."""

    def interrupt(at: int, _target: memoryview, _offset: int) -> int:
        if at == number:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return 1 << 30

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with FakeCuda() as fake, pytest.raises(KeyboardInterrupt):
            weightload.load(model, driver=fake, system=ScriptedSystem(on_read=interrupt), **SMALL)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [each for each in threading.enumerate() if each.name.startswith("weightload")]


def test_the_last_of_several_holders_turns_the_collector_on_again() -> None:
    """However holders overlap in time, none is left behind with the collector off."""
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with collector_held_off():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(30)
    with collector_held_off():
        leave.set()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled()
