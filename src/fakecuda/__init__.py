"""fakecuda: a recording fake CUDA driver that finds races on a machine without a GPU."""

from fakecuda.choices import AsSeen, Drawn, Late, Replay, Seeded, every_schedule
from fakecuda.engine import StuckError
from fakecuda.fake import FakeCuda
from fakecuda.hazards import HAZARDS, Hazard, HazardError
from fakecuda.journal import Journal, compare
from fakecuda.limits import Limits
from fakecuda.profile import Profile, load_profile
from fakecuda.recorder import Recorder

__all__ = [
    "HAZARDS",
    "AsSeen",
    "Drawn",
    "FakeCuda",
    "Hazard",
    "HazardError",
    "Journal",
    "Late",
    "Limits",
    "Profile",
    "Recorder",
    "Replay",
    "Seeded",
    "StuckError",
    "compare",
    "every_schedule",
    "load_profile",
]
