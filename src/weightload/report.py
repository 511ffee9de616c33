"""What happened, in numbers: the load report."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from weightload.release import Released
    from weightload.routes import RouteDecision


@dataclass
class Phases:
    """Wall time by phase; the base of every report.

    Attributes:
        phases_s: wall time of each phase; phases may overlap, `total` is the whole call.
    """

    phases_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body under `name`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.phases_s[name] = self.phases_s.get(name, 0.0) + time.perf_counter() - begun

    def to_dict(self) -> dict[str, Any]:
        """The report as data that JSON can hold."""
        return asdict(self)


@dataclass
class LoadReport(Phases):
    """One load, counted.

    Attributes:
        device: the driver's name for the device.
        integrated: whether CPU and GPU share one memory pool.
        shards: files read.
        strays: safetensors files in the folder that the checkpoint does not use.
        tensors: tensors delivered.
        wanted_bytes: bytes of those tensors.
        route_bytes: wanted bytes that came by each route.
        decisions: each shard's route and the reason.
        fallbacks: what was asked for and could not be had, in words.
        reads: read calls made for the data.
        read_bytes: bytes asked of the operating system, alignment padding included.
        copies: host-to-device copies queued.
        threads: reader threads.
        slot_count: slots in the ring.
        slot_bytes: capacity of one slot.
        ring_memory: how the ring was pinned (`registered`, `allocated`), or `pageable`:
            such a load is slow and not comparable.
        pinned_bytes: pinned memory reserved.
        device_bytes: device memory taken for the slabs.
        slabs: device allocations.
        resident_before_bytes: of the shards in the page cache; None where the kernel will
            not say.
        resident_after_bytes: likewise, before anything is released.
        read_ahead_bytes: bytes that were read into the page cache ahead of the upload.
        released: what was given back to the page cache at the end, if anything.
        limits: rates measured right after the load, in GB/s, and the fraction reached.
        quarantined_slots: slots set aside because something about their copies failed.
    """

    device: str = ""
    integrated: bool = False
    shards: int = 0
    strays: tuple[str, ...] = ()
    tensors: int = 0
    wanted_bytes: int = 0
    route_bytes: dict[str, int] = field(default_factory=dict)
    decisions: list[RouteDecision] = field(default_factory=list)
    fallbacks: list[str] = field(default_factory=list)
    reads: int = 0
    read_bytes: int = 0
    copies: int = 0
    threads: int = 0
    slot_count: int = 0
    slot_bytes: int = 0
    ring_memory: str = ""
    pinned_bytes: int = 0
    device_bytes: int = 0
    slabs: int = 0
    resident_before_bytes: int | None = None
    resident_after_bytes: int | None = None
    read_ahead_bytes: int = 0
    released: Released | None = None
    limits: dict[str, float] = field(default_factory=dict)
    quarantined_slots: int = 0
