"""How much memory there is, and how much of it may be pinned.

The counting is the device's: with one pool for host and device, page cache and
pinned memory make free device memory smaller, and page cache gives way to
allocations although it is not counted as free.
"""

from dataclasses import dataclass

from fakecuda.enums import CUresult
from fakecuda.memory import Memory
from fakecuda.profile import Profile


@dataclass
class Limits:
    """What memory a fake has; None means the profile's own figure or no limit.

    Attributes:
        device_bytes: All device memory.
        pinned_bytes: Pinned memory in total.
        pinned_bytes_per_call: Pinned memory in one call.
        pinned_call_error: What a call over that answers with.
        pin_below_device_bytes: Pinning fails once so much device memory is in use.
        page_cache_bytes: What file pages take of a shared pool.
    """

    device_bytes: int | None = None
    pinned_bytes: int | None = None
    pinned_bytes_per_call: int | None = None
    pinned_call_error: CUresult = CUresult.CUDA_ERROR_INVALID_VALUE
    pin_below_device_bytes: int | None = None
    page_cache_bytes: int = 0


class Accounts:
    """Decides what still fits.

    Args:
        profile: Whether memory is shared, and how much there is.
        limits: What this fake has less.
        memory: What is in use.
    """

    def __init__(self, profile: Profile, limits: Limits, memory: Memory) -> None:
        self.limits = limits
        self._page_cache_bytes = limits.page_cache_bytes
        self._profile = profile
        self._memory = memory
        wanted = limits.device_bytes
        self.total_bytes = profile.total_bytes if wanted is None else wanted

    @property
    def free_bytes(self) -> int:
        """What `cuMemGetInfo` calls free: on a shared pool, page cache is not."""
        free = self.available_bytes
        if self._profile.shares_memory:
            free -= self._page_cache_bytes
        return max(free, 0)

    @property
    def available_bytes(self) -> int:
        """What allocations can still get; on a shared pool, page cache gives way."""
        used = self._memory.device_bytes
        if self._profile.shares_memory:
            used += self._memory.pinned_bytes
        return self.total_bytes - used

    def refuse_device(self, nbytes: int) -> CUresult | None:
        """Why so many device bytes cannot be had; takes page cache if needed."""
        if nbytes > self.available_bytes:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY
        self._push_cache_out(nbytes)
        return None

    def refuse_pinned(self, nbytes: int) -> CUresult | None:
        """Why so many pinned bytes cannot be had; takes page cache if needed."""
        limits, pinned = self.limits, self._memory.pinned_bytes
        if limits.pinned_bytes_per_call is not None and nbytes > limits.pinned_bytes_per_call:
            return limits.pinned_call_error
        room = self._profile.host_bytes if limits.pinned_bytes is None else limits.pinned_bytes
        if self._profile.shares_memory:
            room = min(room, pinned + self.available_bytes)
        pressed = (
            limits.pin_below_device_bytes is not None
            and self._memory.device_bytes >= limits.pin_below_device_bytes
        )
        if pressed or pinned + nbytes > room:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY
        if self._profile.shares_memory:
            self._push_cache_out(nbytes)
        return None

    def _push_cache_out(self, nbytes: int) -> None:
        if self._profile.shares_memory and nbytes > self.free_bytes:
            self._page_cache_bytes -= nbytes - self.free_bytes
