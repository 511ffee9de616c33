"""Faults that people met in the field, one test per kind; each names a public report.

The other instances of each kind are tested beside the part that they concern.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

import fakecuda
import weightload
from fakecuda import FakeCuda
from fixtures.checkpoints import Tensor, decoder, header_bytes, write_checkpoint
from tests.weightload.support import ScriptedSystem, device_tensors, driver_calls, file_tensors

SLOT = 1 << 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One shard of some 2 MB."""
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, [decoder(3, 128, 512, 2000)], seed=7)
    return folder


def delivered(folder: Path, fake: FakeCuda, **keywords: Any) -> weightload.LoadReport:
    """Load, compare every byte with the files, and check that nothing is left."""
    with fake, weightload.load(folder, driver=fake, **keywords) as loaded:
        assert device_tensors(fake, loaded) == file_tensors(folder)
        return loaded.report


@pytest.mark.parametrize(("profile", "ring"), [("h200", "registered0"), ("gb10", "pinned0")])
@pytest.mark.parametrize("route", ["direct", "buffered"])
def test_no_copy_reads_file_pages(model: Path, profile: str, ring: str, route: str) -> None:
    """Copies from cold mapped pages crawl (vllm-exl3#28): every source is in the ring."""
    fake = FakeCuda(profile)
    delivered(model, fake, route=route, slot_bytes=SLOT)
    copies = [call for call in fake.journal.calls() if "cuMemcpyHtoDAsync" in call]
    assert copies
    assert all(f", {ring}" in call for call in copies)


def test_reading_overlaps_copying(model: Path) -> None:
    """Read, then copy, then read again is slow (safetensors#729): a copy stays in flight."""
    fake = FakeCuda()
    pending_at_read: list[int] = []

    def on_read(_number: int, _target: memoryview, _offset: int) -> int:
        calls = driver_calls(fake)
        pending_at_read.append(calls.count("cuEventRecord") - calls.count("cuEventSynchronize"))
        return 1 << 30

    system = ScriptedSystem(on_read=on_read)
    with fake, weightload.load(
        model, driver=fake, system=system, slot_bytes=SLOT, slot_count=4, threads=1
    ):  # fmt: skip
        assert max(pending_at_read) == 3


def test_pages_of_64_kib(model: Path) -> None:
    """Some ARM kernels have 64 KiB pages (GLM-5.3-Flash#230): windows begin on whole ones."""
    system = ScriptedSystem()
    system.page_bytes = 1 << 16
    fake = FakeCuda("gb10")
    report = delivered(model, fake, route="readonly-map", system=system)
    assert report.read_bytes % (1 << 16) == 0


@pytest.mark.parametrize("route", ["touch", "readonly-map", "buffered"])
def test_no_page_of_the_checkpoint_turns_anonymous(model: Path, route: str) -> None:
    """A private mapping doubles memory page by page (transformers#47257): none has any."""
    seen: list[int] = []

    def look(_done: int, _of: int) -> None:
        ours = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split(" ")[0]:
                ours = line.endswith(".safetensors")
            elif ours and line.startswith("Anonymous:"):
                seen.append(int(line.split()[1]))

    with FakeCuda("gb10") as fake, weightload.load(
        model, driver=fake, route=route, progress=look
    ) as loaded:  # fmt: skip
        assert device_tensors(fake, loaded) == file_tensors(model)
    assert seen or route == "buffered"
    assert not any(seen)


@pytest.mark.parametrize("limit_mib", [768, 20, 9])
def test_little_may_be_pinned_in_all(model: Path, limit_mib: int) -> None:
    """WSL2 pins less than a gigabyte in all (llama.cpp#1230): a smaller ring, said aloud."""
    limits = fakecuda.Limits(pinned_bytes=limit_mib << 20)
    fake = FakeCuda("gb10", limits=limits)
    report = delivered(model, fake, slot_bytes=8 << 20, slot_count=4)
    assert report.ring_memory == "allocated"
    assert report.pinned_bytes <= limit_mib << 20


def test_one_large_pin_is_refused(model: Path) -> None:
    """Kernels 6.11 to 6.13 refuse one large pin as an invalid value (rtx6kpro#52)."""
    limits = fakecuda.Limits(pinned_bytes_per_call=1 << 20)
    for profile in ("gb10", "h200"):
        report = delivered(model, FakeCuda(profile, limits=limits), slot_bytes=1 << 20)
        assert report.ring_memory == "pageable"
        assert any("INVALID_VALUE" in words for words in report.fallbacks)


def test_pins_fail_once_the_weights_are_there(model: Path) -> None:
    """Pins fail under memory pressure on one GB10 kernel (NV-Kernels#590): the ring goes first."""
    limits = fakecuda.Limits(pin_below_device_bytes=1)
    report = delivered(model, FakeCuda("gb10", limits=limits), slot_bytes=SLOT)
    assert report.ring_memory == "allocated"


@pytest.mark.parametrize("route", ["direct", "buffered"])
def test_data_that_no_alignment_fits(tmp_path: Path, route: str) -> None:
    """Shifting bytes on the device corrupted weights (fastsafetensors#38): nothing shifts."""
    tensors = [Tensor("w", "U8", (3 * SLOT + 5,))]
    pad = (8 - len(header_bytes(tensors))) % 4096
    content = bytes((7 * i + 3) % 251 for i in range(3 * SLOT + 5))
    (tmp_path / "model.safetensors").write_bytes(header_bytes(tensors, pad) + content)
    assert len(header_bytes(tensors, pad)) % 4096 == 8
    with FakeCuda() as fake, weightload.load(
        tmp_path, driver=fake, route=route, slot_bytes=SLOT, verify="sha256"
    ) as loaded:  # fmt: skip
        assert loaded.manifest["w"] == hashlib.sha256(content).hexdigest()
        assert device_tensors(fake, loaded) == {"w": content}


def test_a_shard_that_is_cut_is_refused_before_any_copy(model: Path, tmp_path: Path) -> None:
    """Shards shorter than declared loaded as zeros (vmlx-swift#217): nothing is copied here."""
    source = model / "model.safetensors"
    (tmp_path / "model.safetensors").write_bytes(source.read_bytes()[:-4096])
    with FakeCuda() as fake:
        with pytest.raises(weightload.HeaderError, match="truncated"):
            weightload.load(tmp_path, driver=fake)
        assert not {"cuMemAlloc", "cuMemcpyHtoDAsync"} & set(driver_calls(fake))


@pytest.mark.parametrize("most", [1, 511, 4096, SLOT - 1])
def test_every_read_comes_back_short(model: Path, most: int) -> None:
    """Short direct reads left stale bytes in weights (llama.cpp#18504): each one is resumed."""
    fewest = max(most, 4096)
    system = ScriptedSystem(on_read=lambda n, _t, _o: most if n % 2 else fewest)
    delivered(model, FakeCuda(), route="direct", system=system, slot_bytes=SLOT)


def test_pages_that_somebody_maps_stay(model: Path) -> None:
    """Advice drops no page that a process maps (sglang#40594): the report says what stayed."""
    path = model / "model.safetensors"
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            assert len(mapping[:: mmap.PAGESIZE]) > 0
            fake = FakeCuda("gb10")
            report = delivered(model, fake, route="buffered", slot_bytes=SLOT)
    assert report.released is not None
    assert report.released.resident_after_bytes == report.released.resident_before_bytes
