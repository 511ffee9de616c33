"""A few bytes of every so many of device memory, brought together by the driver's own copy.

A kernel would do it as well, but the device fetches a kernel's code when it is first used:
for the few operations of torch's that this takes, that was 40 to 70 ms on an H200.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightload.device.driver import Driver

PIECE_BYTES = 4


def queue_strided_copy(
    driver: Driver, source: int, step_bytes: int, target: int, count: int, stream: int
) -> None:
    """Queue a copy of the first bytes of every step, from device memory to device memory.

    Args:
        driver: the real driver.
        source: device address of the first byte to take.
        step_bytes: from one piece that is taken to the next.
        target: device address of `count` pieces, which are written side by side.
        count: pieces to take, of `PIECE_BYTES` each.
        stream: where to queue it.

    Raises:
        DriverError: it could not be queued.
    """
    cu = driver.cu
    shape: Any = cu.CUDA_MEMCPY2D()
    shape.srcMemoryType = shape.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
    shape.srcDevice, shape.srcPitch = source, step_bytes
    shape.dstDevice, shape.dstPitch = target, PIECE_BYTES
    shape.WidthInBytes, shape.Height = PIECE_BYTES, count
    driver.call("cuMemcpy2DAsync", shape, stream)
