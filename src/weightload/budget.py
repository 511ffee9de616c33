"""Room for the weights, checked before the first byte is read.

On an integrated device a load that does not fit freezes the machine instead of
failing, so it is refused beforehand. The driver's own free figure counts the page
cache as used there; what can really be had is the kernel's MemAvailable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightload.errors import DeviceMemoryError

if TYPE_CHECKING:
    from weightload.device.profile import DeviceProfile
    from weightload.host.system import System

# Left to the system and to the program that asked for the load.
RESERVE_BYTES = 1 << 30


def check_room(profile: DeviceProfile, system: System, wanted_bytes: int, ring_bytes: int) -> None:
    """Check that weights and ring fit beside a reserve of 1 GiB.

    A discrete device refuses the allocation itself, cleanly, so nothing is asked there.

    Raises:
        DeviceMemoryError: they do not fit.
    """
    if not profile.integrated:
        return
    available = system.memory().available
    needed = wanted_bytes + ring_bytes + RESERVE_BYTES
    if needed > available:
        raise DeviceMemoryError(
            f"the load needs {_gib(needed)} (weights {_gib(wanted_bytes)}, the rest for the ring "
            f"and a reserve) and {_gib(available)} are available; close other programs or choose "
            f"a smaller model."
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"
