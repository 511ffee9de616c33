"""What NVML says about the GPU: clocks, power, temperature, throttling, processes, memory.

Every figure can be refused on its own (an integrated GPU has no memory figure for the device,
a virtual one no power), so each is None with a reason rather than 0.  NVML is read in a thread
of its own: a query that blocks behind the driver's lock delays no other sample.

Source: NVML API reference, nvmlDeviceGetCurrentClocksEventReasons and its reason bits.
"""

from __future__ import annotations

import importlib
import threading
import time
from typing import Any

import msgspec

INTERVAL_S = 0.1
# The reasons that say the GPU was held back by its surroundings, not by being idle.
_THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal, by software",
    0x40: "thermal, by hardware",
    0x80: "power brake",
}
_PATIENCE_S = 2.0


class GpuConditions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was seen of the GPU during a leg; a figure that could not be had is None.

    Attributes:
        clock_mhz_max: Highest clock of the multiprocessors.
        power_w_max: Highest draw.
        temperature_c_max: Highest temperature.
        throttled: Why it was held back, in words; empty when it was not.
        other_processes: Processes on the GPU just before the leg, when none of ours was.
        process_bytes_max: Most GPU memory of the leg's own process.
        samples: How many times it was asked.
        absent: Each None above, and why.
    """

    clock_mhz_max: int | None = None
    power_w_max: float | None = None
    temperature_c_max: int | None = None
    throttled: tuple[str, ...] = ()
    other_processes: int | None = None
    process_bytes_max: int | None = None
    samples: int = 0
    absent: dict[str, str] = {}


_FIGURES = (
    "clock_mhz_max",
    "power_w_max",
    "temperature_c_max",
    "other_processes",
    "process_bytes_max",
)


class GpuWatch:
    """Watches one GPU from just before a leg until it is stopped."""

    def __init__(self, ordinal: int | None, nvml: Any = None) -> None:  # noqa: ANN401 -- untyped
        """Look at the GPU before the leg.

        Args:
            ordinal: Which GPU; None for the fake device, of which NVML knows nothing.
            nvml: Stands in for ``pynvml`` in tests.
        """
        self._absent: dict[str, str] = {}
        self._most: dict[str, Any] = {}
        self._throttled: set[str] = set()
        self._samples = 0
        self._before: set[int] = set()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._nvml: Any = None
        self._handle: Any = None
        if ordinal is None:
            self._refuse_all("the fake device has no NVML")
            return
        try:
            # By name, since it is an extra and publishes no types.
            self._nvml = nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(ordinal)
        except ImportError:
            self._refuse_all("nvidia-ml-py is not installed")
        except Exception as error:  # noqa: BLE001 -- NVML's own errors, whatever they are
            self._refuse_all(f"NVML: {error}")
        else:
            before = self._ask("other_processes", self._processes)
            if before is not None:
                self._before = set(before)
                self._most["other_processes"] = len(before)

    def start(self) -> None:
        """Begin sampling."""
        if self._nvml is not None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def stop(self) -> GpuConditions:
        """End sampling and return what was seen; a query that hangs is not waited for."""
        self._done.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)
            if self._thread.is_alive():
                self._absent["samples"] = "a query of NVML did not return"
        for name in _FIGURES:
            if name not in self._most:
                self._absent.setdefault(name, "no process or no sample showed it")
        return GpuConditions(
            **self._most,
            throttled=tuple(sorted(self._throttled)),
            samples=self._samples,
            absent=dict(self._absent),
        )

    def _refuse_all(self, why: str) -> None:
        self._nvml = None
        self._absent = dict.fromkeys((*_FIGURES, "throttled"), why)

    def _watch(self) -> None:
        while not self._done.is_set():
            begun = time.monotonic()
            self._sample()
            self._done.wait(max(0.0, INTERVAL_S - (time.monotonic() - begun)))

    def _sample(self) -> None:
        nvml, handle = self._nvml, self._handle
        if nvml is None:
            return
        self._raise("clock_mhz_max", lambda: nvml.nvmlDeviceGetClockInfo(handle, 1))
        self._raise("power_w_max", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000)
        self._raise("temperature_c_max", lambda: nvml.nvmlDeviceGetTemperature(handle, 0))
        self._raise("process_bytes_max", self._own_bytes)
        reasons = self._ask(
            "throttled", lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        )
        self._throttled |= {word for bit, word in _THROTTLES.items() if (reasons or 0) & bit}
        self._samples += 1

    def _own_bytes(self) -> int | None:
        """Sum the memory of processes that were not there before: container ids differ."""
        own = [used for pid, used in self._processes().items() if pid not in self._before]
        known = [used for used in own if used is not None]
        return sum(known) if known else None

    def _processes(self) -> dict[int, int | None]:
        nvml = self._nvml
        if nvml is None:
            return {}
        listed = nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return {each.pid: each.usedGpuMemory for each in listed}

    def _raise(self, name: str, ask: Any) -> None:  # noqa: ANN401 -- any query
        value = self._ask(name, ask)
        if value is not None:
            self._most[name] = max(value, self._most.get(name, value))

    def _ask(self, name: str, ask: Any) -> Any:  # noqa: ANN401 -- any query
        try:
            return ask()
        except Exception as error:  # noqa: BLE001 -- NVML refuses single figures in its own ways
            self._absent[name] = f"NVML: {error}"
            return None
