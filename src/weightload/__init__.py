"""weightload: safetensors from disk into device tensors, with a small footprint.

Importing this package loads neither torch nor transformers nor a CUDA binding;
each comes in where it is first needed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weightload.device.destination import DeviceTensor
from weightload.device.profile import DeviceProfile, device_profile
from weightload.errors import (
    CheckpointError,
    CopyError,
    DeviceError,
    DeviceMemoryError,
    DriverError,
    FallbackWarning,
    HeaderError,
    ModelError,
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
from weightload.routes import ROUTES

if TYPE_CHECKING:
    from weightload.models.load import load_model
    from weightload.models.move import move_model
    from weightload.models.outputs import greedy_tokens, own_outputs
    from weightload.models.report import ModelReport

__all__ = [
    "ROUTES",
    "CheckpointError",
    "CopyError",
    "DeviceError",
    "DeviceMemoryError",
    "DeviceProfile",
    "DeviceTensor",
    "DriverError",
    "FallbackWarning",
    "HeaderError",
    "LoadReady",
    "LoadReport",
    "Loaded",
    "ModelError",
    "ModelReport",
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
    "greedy_tokens",
    "load",
    "load_model",
    "move_model",
    "own_outputs",
]

# These need torch, or transformers as well; each is imported when it is asked for.
_LAZY = {
    "ModelReport": "weightload.models.report",
    "greedy_tokens": "weightload.models.outputs",
    "load_model": "weightload.models.load",
    "move_model": "weightload.models.move",
    "own_outputs": "weightload.models.outputs",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - functions of several types
    """Import what needs torch now that it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
