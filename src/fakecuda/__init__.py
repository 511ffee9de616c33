"""fakecuda: a recording fake CUDA driver that finds races on a machine without a GPU."""

from fakecuda.choices import Drawn, Late, Replay, Seeded, every_schedule
from fakecuda.fake import FakeCuda
from fakecuda.hazards import HAZARDS, Hazard, HazardError
from fakecuda.profile import Profile
from fakecuda.work import StuckError

__all__ = [
    "HAZARDS",
    "Drawn",
    "FakeCuda",
    "Hazard",
    "HazardError",
    "Late",
    "Profile",
    "Replay",
    "Seeded",
    "StuckError",
    "every_schedule",
]
