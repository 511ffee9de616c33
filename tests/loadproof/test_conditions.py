"""The surroundings of a leg: what NVML and the kernel say, and when they mark it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest

from loadproof.measure import conditions
from loadproof.measure.conditions import Conditions, ConditionsWatch, marks, swapped_bytes
from loadproof.measure.gpu import GpuConditions, GpuWatch
from loadproof.plan.policy import load_policy

if TYPE_CHECKING:
    from collections.abc import Callable

POLICY = load_policy("gpu")
QUIET = Conditions(
    memory_missing_bytes=0,
    waited_s=0.0,
    swapped_bytes=0,
    load_average=0.1,
    gpu=GpuConditions(clock_mhz_max=1980, temperature_c_max=40, other_processes=0),
)


class Process(NamedTuple):
    """A process as NVML lists it."""

    pid: int
    usedGpuMemory: int | None  # noqa: N815 -- NVML's own name


class Nvml:
    """NVML of one GPU, with a process of somebody else and, later, one of ours."""

    def __init__(self, **refused: str) -> None:
        self.refused = refused
        self.processes = [Process(1, 100)]
        self.reasons = 0x01

    def nvmlInit(self) -> None:  # noqa: N802 -- NVML's own name
        """Do nothing."""

    def nvmlDeviceGetHandleByIndex(self, ordinal: int) -> int:  # noqa: N802 -- see above
        """Return the ordinal."""
        return ordinal

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Callable[[], Any]] = {
            "nvmlDeviceGetClockInfo": lambda: 1755,
            "nvmlDeviceGetPowerUsage": lambda: 123_000,
            "nvmlDeviceGetTemperature": lambda: 61,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda: self.reasons,
            "nvmlDeviceGetComputeRunningProcesses": lambda: list(self.processes),
        }

        def answer(*_: object) -> Any:
            if name in self.refused:
                raise RuntimeError(self.refused[name])
            return answers[name]()

        return answer


def watched(nvml: Nvml, arrives: Process | None = None) -> GpuConditions:
    """Watch until a few samples are in."""
    watch = GpuWatch(0, nvml)
    if arrives is not None:
        nvml.processes.append(arrives)
    watch.start()
    deadline = time.monotonic() + 10
    while watch._samples < 2 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return watch.stop()


def test_what_nvml_says_is_kept() -> None:
    """Clocks, power, temperature, others' processes and our own memory, told apart."""
    seen = watched(Nvml(), Process(2, 700))
    assert (seen.clock_mhz_max, seen.power_w_max, seen.temperature_c_max) == (1755, 123.0, 61)
    assert (seen.other_processes, seen.process_bytes_max) == (1, 700)
    assert (seen.throttled, seen.absent) == ((), {})


def test_a_figure_that_nvml_refuses_is_none_with_its_reason() -> None:
    """One refusal takes one figure away, and it never becomes 0."""
    seen = watched(Nvml(nvmlDeviceGetPowerUsage="Not Supported"), Process(2, None))
    assert (seen.power_w_max, seen.process_bytes_max) == (None, None)
    assert seen.absent["power_w_max"] == "NVML: Not Supported"
    assert "process_bytes_max" in seen.absent
    assert seen.clock_mhz_max == 1755


def test_being_idle_is_no_throttling() -> None:
    """Only reasons from the surroundings count."""
    nvml = Nvml()
    nvml.reasons = 0x01 | 0x40 | 0x08
    assert watched(nvml).throttled == ("hardware slowdown", "thermal, by hardware")


def test_the_fake_device_has_no_nvml() -> None:
    """Every figure is absent with that reason."""
    watch = GpuWatch(None)
    watch.start()
    seen = watch.stop()
    assert set(seen.absent.values()) == {"the fake device has no NVML"}
    assert (seen.clock_mhz_max, seen.other_processes) == (None, None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory_missing_bytes": 3 << 30}, "had not come back"),
        ({"swapped_bytes": 1 << 30}, "were swapped"),
        ({"gpu": GpuConditions(throttled=("power cap",))}, "held back: power cap"),
        ({"gpu": GpuConditions(temperature_c_max=95)}, "95 °C"),
        ({"gpu": GpuConditions(other_processes=1)}, "1 other processes"),
    ],
)
def test_each_condition_outside_the_band_is_a_mark(change: dict[str, Any], said: str) -> None:
    """One thing out of the band is one mark that says what."""
    assert marks(POLICY, QUIET) == []
    (mark,) = marks(POLICY, msgspec.structs.replace(QUIET, **change))
    assert said in mark


def test_a_slow_clock_is_a_mark_where_the_policy_has_a_least_one() -> None:
    """On a GB10 a clock below its idle one is a fault."""
    slow = msgspec.structs.replace(QUIET, gpu=GpuConditions(clock_mhz_max=100))
    assert marks(load_policy("gb10"), slow) == ["the GPU's clock stayed at 100 MHz"]


def test_a_leg_waits_for_memory_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins as soon as MemAvailable is back within the band, and says how long that took."""
    answers = iter([0, 0, 0, 10 << 30])
    monkeypatch.setattr(conditions, "available_bytes", lambda: next(answers))
    seen = ConditionsWatch(POLICY, None, 10 << 30).stop()
    assert seen.memory_missing_bytes == 0
    assert 0.1 < seen.waited_s < 5
    assert seen.marks == ()


def test_memory_that_never_comes_back_is_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the policy's patience the leg runs, marked."""
    hasty = msgspec.structs.replace(POLICY, memory_wait_s=0.1)
    monkeypatch.setattr(conditions, "available_bytes", lambda: 0)
    seen = ConditionsWatch(hasty, None, 10 << 30).stop()
    assert seen.memory_missing_bytes == 10 << 30
    assert len(seen.marks) == 1


def test_swapping_is_counted_in_bytes() -> None:
    """The kernel's figure is there and is no nonsense."""
    assert (swapped_bytes() or 0) >= 0
    assert (swapped_bytes() or 0) % 4096 == 0
