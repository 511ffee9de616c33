"""What the device is, read from its attributes and never from its name.

Two bits decide how host memory behaves and must be kept apart: GH200-class
machines walk the host's page tables but are not integrated; a GB10 does both.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightload.cleanup import Cleanup
from weightload.device.driver import Driver, real_driver
from weightload.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Values of CUdevice_attribute (cuda.h, CUDA 13).
_INTEGRATED = 18
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
_HOST_REGISTER_SUPPORTED = 99
_READ_ONLY_REGISTER_SUPPORTED = 113
_PAGEABLE_USES_HOST_PAGE_TABLES = 100


@dataclass(frozen=True)
class DeviceProfile:
    """Facts about one device.

    Attributes:
        name: the driver's name for it, for reports only.
        capability: compute capability, major and minor.
        integrated: CPU and GPU share one memory pool.
        host_page_tables: the device reads pageable memory through the host's page tables.
        host_register: memory of the process's own can be pinned in place.
        read_only_register: so can memory that it may only read, such as a file's pages.
    """

    name: str
    capability: tuple[int, int]
    integrated: bool
    host_page_tables: bool
    host_register: bool
    read_only_register: bool

    @property
    def is_gb10(self) -> bool:
        """Whether this is a GB10: capability 12.1, integrated, host page tables."""
        return self.capability == (12, 1) and self.integrated and self.host_page_tables


class Device:
    """One opened device: its primary context is retained until `close`."""

    def __init__(self, driver: Driver, ordinal: int) -> None:
        """Initialise the driver and retain the primary context.

        Raises:
            DeviceError: there is no such device.
        """
        self.driver = driver
        self.ordinal = ordinal
        self._handle = _open_handle(driver, ordinal)
        self.profile = _read_profile(driver, self._handle)
        self._context = int(driver.call("cuDevicePrimaryCtxRetain", self._handle))
        self._closed = False

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current for this thread, and restore what was there before."""
        before = int(self.driver.call("cuCtxGetCurrent"))
        self.driver.call("cuCtxSetCurrent", self._context)
        with Cleanup() as restoring:
            restoring.undo(self.driver.call, "cuCtxSetCurrent", before)
            yield

    def close(self) -> None:
        """Release the primary context; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self.driver.call("cuDevicePrimaryCtxRelease", self._handle)


def device_profile(device: str | int = "cuda:0", *, driver: Any = None) -> DeviceProfile:  # noqa: ANN401 - the binding publishes no types
    """Read what a device is, without making a context on it.

    Args:
        device: `cuda`, `cuda:1`, or the ordinal.
        driver: an object of `cuda.bindings.driver`'s shape; None takes the real one.

    Raises:
        DeviceError: there is no such device, or no driver.
    """
    seam = real_driver() if driver is None else Driver(driver)
    return _read_profile(seam, _open_handle(seam, parse_ordinal(device)))


def parse_ordinal(device: str | int) -> int:
    """The ordinal in `cuda`, `cuda:1` or `1`.

    Raises:
        DeviceError: the text names no CUDA device.
    """
    text = str(device)
    number = text.removeprefix("cuda").removeprefix(":") or "0"
    if not number.isdecimal():
        raise DeviceError(f"{text!r} is not a CUDA device; write cuda:0 for the first one.")
    return int(number)


def _open_handle(driver: Driver, ordinal: int) -> int:
    driver.call("cuInit", 0)
    count = int(driver.call("cuDeviceGetCount"))
    if not 0 <= ordinal < count:
        raise DeviceError(
            f"there is no device cuda:{ordinal}; this machine has {count} CUDA devices."
        )
    return int(driver.call("cuDeviceGet", ordinal))


def _read_profile(driver: Driver, handle: int) -> DeviceProfile:
    def attribute(number: int) -> int:
        return int(
            driver.call("cuDeviceGetAttribute", driver.cu.CUdevice_attribute(number), handle)
        )

    name = driver.call("cuDeviceGetName", 128, handle)
    return DeviceProfile(
        name=name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name),
        capability=(attribute(_CAPABILITY_MAJOR), attribute(_CAPABILITY_MINOR)),
        integrated=bool(attribute(_INTEGRATED)),
        host_page_tables=bool(attribute(_PAGEABLE_USES_HOST_PAGE_TABLES)),
        host_register=bool(attribute(_HOST_REGISTER_SUPPORTED)),
        read_only_register=bool(attribute(_READ_ONLY_REGISTER_SUPPORTED)),
    )
