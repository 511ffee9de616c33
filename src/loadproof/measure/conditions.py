"""What else was going on during a leg: swapping, other load, the state of the GPU.

A time is worth what its surroundings were.  Before a leg the harness waits until the memory of
the leg before has come back, since drivers give it back late; afterwards it records what the
kernel and NVML counted meanwhile.

Sources: proc_vmstat (pswpin, pswpout, in pages), proc_pressure for stalls.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loadproof.measure.gpu import GpuConditions, GpuWatch
from loadproof.measure.memory import read_fields

if TYPE_CHECKING:
    from loadproof.plan.policy import Policy

_POLL_S = 0.05


class Conditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The surroundings of one leg.

    Attributes:
        memory_missing_bytes: How far MemAvailable was below its base line when the leg began;
            None when the kernel gives no figure.
        waited_s: How long the leg waited for memory to come back.
        swapped_bytes: Bytes swapped in and out, anywhere on the machine, during the leg; None
            when the kernel gives no figure.
        load_average: Runnable tasks, one-minute mean, when it began.
        gpu: What NVML saw.
        marks: In which ways this was outside the policy's band; empty when it was not.
    """

    memory_missing_bytes: int | None
    waited_s: float
    swapped_bytes: int | None
    load_average: float
    gpu: GpuConditions
    marks: tuple[str, ...] = ()


class ConditionsWatch:
    """Waits for quiet before a leg, and records what was not quiet during it."""

    def __init__(self, policy: Policy, ordinal: int | None, base_available: int | None) -> None:
        """Wait until memory is back at its base line, or for as long as the policy allows."""
        begun = time.monotonic()
        self._missing = _missing(base_available)
        while (
            self._missing is not None
            and self._missing > policy.memory_missing_bytes_max
            and time.monotonic() - begun < policy.memory_wait_s
        ):
            time.sleep(_POLL_S)
            self._missing = _missing(base_available)
        self._waited_s = time.monotonic() - begun
        self._policy = policy
        self._swapped = swapped_bytes()
        self._load_average = os.getloadavg()[0]
        self._gpu = GpuWatch(ordinal)
        self._gpu.start()

    def stop(self) -> Conditions:
        """Return what was seen, with its marks."""
        after = swapped_bytes()
        known = after is not None and self._swapped is not None
        seen = Conditions(
            memory_missing_bytes=self._missing,
            waited_s=self._waited_s,
            swapped_bytes=(after or 0) - (self._swapped or 0) if known else None,
            load_average=self._load_average,
            gpu=self._gpu.stop(),
        )
        return msgspec.structs.replace(seen, marks=tuple(marks(self._policy, seen)))


def marks(policy: Policy, seen: Conditions) -> list[str]:
    """Say in which ways a leg's surroundings were outside the policy's band."""
    found = []
    gpu = seen.gpu
    if (seen.memory_missing_bytes or 0) > policy.memory_missing_bytes_max:
        found.append(
            f"{seen.memory_missing_bytes:,} bytes of memory had not come back after "
            f"{seen.waited_s:.1f} s"
        )
    if (seen.swapped_bytes or 0) > policy.swapped_bytes_max:
        found.append(f"{seen.swapped_bytes:,} bytes were swapped")
    if gpu.throttled:
        found.append(f"the GPU was held back: {', '.join(gpu.throttled)}")
    if (gpu.temperature_c_max or 0) > policy.temperature_c_max:
        found.append(f"the GPU had {gpu.temperature_c_max} °C")
    if (gpu.other_processes or 0) > policy.other_gpu_processes_max:
        found.append(f"{gpu.other_processes} other processes were on the GPU")
    if gpu.clock_mhz_max is not None and gpu.clock_mhz_max < policy.clock_mhz_min:
        found.append(f"the GPU's clock stayed at {gpu.clock_mhz_max} MHz")
    return found


def available_bytes() -> int | None:
    """Return MemAvailable."""
    return read_fields("/proc/meminfo").get("MemAvailable")


def swapped_bytes() -> int | None:
    """Return how many bytes were swapped in and out since the machine started."""
    try:
        rows = Path("/proc/vmstat").read_text("ascii").splitlines()
    except OSError:
        return None
    counted = dict(row.split(" ", 1) for row in rows)
    pages = [counted.get(name) for name in ("pswpin", "pswpout")]
    if None in pages:
        return None
    return sum(int(each or 0) for each in pages) * os.sysconf("SC_PAGE_SIZE")


def _missing(base_available: int | None) -> int | None:
    now = available_bytes()
    return None if now is None or base_available is None else max(0, base_available - now)
