"""Every error a user can meet, each one sentence with what to do about it.

One base class lets a caller catch all of them; the subclasses are the places
where a caller may want to act differently. The text is written for the person
at the keyboard, so `str(error)` is all that a command line has to print.
"""

from __future__ import annotations


class WeightloadError(Exception):
    """Base of every error that weightload raises on purpose."""


class CheckpointError(WeightloadError):
    """The files are not a complete, well-formed safetensors checkpoint."""


class HeaderError(CheckpointError):
    """One shard's header breaks the safetensors format."""


class ShardMissingError(CheckpointError):
    """The index, or a shard's own numbering, names files that are not there."""


class ShardChangedError(CheckpointError):
    """A shard was replaced, rewritten or cut while it was being loaded."""


class ReadError(WeightloadError):
    """The operating system could not deliver bytes that the header promises."""


class DeviceError(WeightloadError):
    """There is no usable CUDA driver, or no such device."""


class DriverError(WeightloadError):
    """A CUDA driver call returned something other than success.

    Attributes:
        call: the entry point, for example `cuMemHostAlloc`.
        code: the integer value of the `CUresult`.
        name: the driver's own name for it, for example `CUDA_ERROR_OUT_OF_MEMORY`.
    """

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call} returned {name} ({code}){_remedy(code)}")
        self.call = call
        self.code = code
        self.name = name


class DeviceMemoryError(WeightloadError):
    """The device has no room for the weights."""


class VerificationError(WeightloadError):
    """The tensors are not those that the manifest promises."""


class ModelError(WeightloadError):
    """The checkpoint's tensors and the model's weights are not the same set."""


class RingError(WeightloadError):
    """The ring has no slot left that may be written."""


class RankError(WeightloadError):
    """Another rank failed, or did not get ready in time."""


class UsageError(WeightloadError):
    """An argument is not one that the function takes."""


class CopyError(UsageError, TypeError):
    """What holds memory on a device was to be copied or pickled."""


class FallbackWarning(UserWarning):
    """A model was loaded by the slow route, because the fast one cannot do it."""


_OUT_OF_MEMORY = 2


def _remedy(code: int) -> str:
    if code == _OUT_OF_MEMORY:
        return "; free memory on the device or choose a smaller model."
    return "; the driver's log (dmesg) may say more."
