"""fakecuda: a recording fake CUDA driver that finds races on a machine without a GPU."""

from fakecuda.choices import Drawn, Late, Replay, Seeded, every_schedule
from fakecuda.engine import StuckError
from fakecuda.fake import FakeCuda
from fakecuda.hazards import HAZARDS, Hazard, HazardError
from fakecuda.limits import Limits
from fakecuda.profile import Profile

__all__ = [
    "HAZARDS",
    "Drawn",
    "FakeCuda",
    "Hazard",
    "HazardError",
    "Late",
    "Limits",
    "Profile",
    "Replay",
    "Seeded",
    "StuckError",
    "every_schedule",
]
