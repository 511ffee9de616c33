"""weightload: safetensors from disk into device tensors, with a small footprint.

Importing this package loads neither torch nor transformers nor a CUDA binding;
each comes in where it is first needed.
"""

from weightload.device.destination import DeviceTensor
from weightload.device.profile import DeviceProfile, device_profile
from weightload.errors import (
    CheckpointError,
    DeviceError,
    DeviceMemoryError,
    DriverError,
    HeaderError,
    RankError,
    ReadError,
    RingError,
    ShardChangedError,
    ShardMissingError,
    UsageError,
    VerificationError,
    WeightloadError,
)
from weightload.host.system import System
from weightload.load import load
from weightload.loaded import Loaded
from weightload.ranks import LoadReady
from weightload.release import Released, ReleaseQueue
from weightload.report import LoadReport

__all__ = [
    "CheckpointError",
    "DeviceError",
    "DeviceMemoryError",
    "DeviceProfile",
    "DeviceTensor",
    "DriverError",
    "HeaderError",
    "LoadReady",
    "LoadReport",
    "Loaded",
    "RankError",
    "ReadError",
    "ReleaseQueue",
    "Released",
    "RingError",
    "ShardChangedError",
    "ShardMissingError",
    "System",
    "UsageError",
    "VerificationError",
    "WeightloadError",
    "device_profile",
    "load",
]
