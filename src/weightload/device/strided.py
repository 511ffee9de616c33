"""A few bytes of every so many of device memory, brought together by the driver's own copy.

A kernel would do it as well, but the device fetches a kernel's code when it is first used:
for the few operations of torch's that this takes, that was 40 to 70 ms on an H200.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightload.device.driver import Driver


class StridedCopies:
    """Copies from device memory to device memory, queued on one stream."""

    def __init__(self, driver: Driver, stream: int) -> None:
        """Prepare.

        Args:
            driver: the real driver; the device's context has to be current.
            stream: where to queue the copies.
        """
        self._call = driver.call
        self._stream = stream
        kind = driver.cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        # Filled in again for every copy: the driver has read it when the call returns.
        self._shape: Any = driver.cu.CUDA_MEMCPY2D()
        self._shape.srcMemoryType = self._shape.dstMemoryType = kind

    def queue(self, source: int, step_bytes: int, target: int, count: int, width: int) -> None:
        """Queue a copy of the first bytes of every step.

        Args:
            source: device address of the first byte to take.
            step_bytes: from one piece that is taken to the next.
            target: device address of the first piece; they are written side by side.
            count: pieces to take, one or more.
            width: bytes of each, at most `step_bytes`.

        Raises:
            DriverError: it could not be queued.
        """
        shape = self._shape
        shape.srcDevice, shape.srcPitch = source, step_bytes
        shape.dstDevice, shape.dstPitch = target, width
        shape.WidthInBytes, shape.Height = width, count
        self._call("cuMemcpy2DAsync", shape, self._stream)
