"""Every so many bytes of device memory, brought together by the copy engine.

A kernel would do it as well, but the device fetches a kernel's code when it is first used:
for the few operations of torch's that this takes, that was 40 to 70 ms on an H200, beside
the 1 ms that the copy takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightload.device.driver import Driver


def queue_strided_copy(
    driver: Driver, source: int, step_bytes: int, target: int, count: int, stream: int
) -> None:
    """Queue a copy of one byte of every `step_bytes`, from device memory to device memory.

    Args:
        driver: the real driver.
        source: device address of the first byte to take.
        step_bytes: from one byte that is taken to the next.
        target: device address of `count` bytes, which are written side by side.
        count: bytes to take.
        stream: where to queue it.

    Raises:
        DriverError: it could not be queued.
    """
    cu = driver.cu
    shape: Any = cu.CUDA_MEMCPY2D()
    shape.srcMemoryType = shape.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    shape.srcDevice, shape.srcPitch = source, step_bytes
    shape.dstDevice, shape.dstPitch = target, 1
    shape.WidthInBytes, shape.Height = 1, count
    driver.call("cuMemcpy2DAsync", shape, stream)
