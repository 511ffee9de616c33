"""Whether weights were written again after they were uploaded, seen from samples.

Models have come back random with nothing said, because initialisation ran after the
weights were in place. It rewrites whole tensors, so a few bytes of every so many are enough
to see it, and comparing those costs next to nothing beside the upload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weightload.device.driver import real_driver
from weightload.device.strided import PIECE_BYTES, queue_strided_copy

if TYPE_CHECKING:
    from collections.abc import Mapping

# Tensors stand this far apart on the device, so that none is without a sample.
_STEP_BYTES = 256
# Of more weights than 512 MiB the samples are taken further apart instead of growing; a
# tensor smaller than the step may then be without one.
_SAMPLES_MAX = 2 << 20


class Samples:
    """Bytes of every storage behind some tensors, as they are now."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the samples.

        Args:
            tensors: by name; kept alive as long as this.

        Raises:
            DriverError: the device failed.
        """
        self._tensors = dict(tensors)
        wholes = {
            tensor.untyped_storage().data_ptr(): _bytes_of(tensor) for tensor in tensors.values()
        }
        total = sum(whole.numel() for whole in wholes.values())
        self._step = _STEP_BYTES * max(1, -(-total // (_SAMPLES_MAX * _STEP_BYTES)))
        self._wholes = {place: whole for place, whole in wholes.items() if whole.numel()}
        self._before = self._taken()

    def changed(self) -> list[str]:
        """Names of the tensors whose samples are others now.

        Raises:
            DriverError: the device failed.
        """
        written = {
            place: now != self._before[place]
            for place, now in self._taken().items()
            if not torch.equal(now, self._before[place])
        }
        return [name for name, tensor in self._tensors.items() if self._is_in(tensor, written)]

    def _taken(self) -> dict[int, torch.Tensor]:
        """The samples of each storage, on the CPU."""
        return {place: _sampled(whole, self._step) for place, whole in self._wholes.items()}

    def _is_in(self, tensor: torch.Tensor, written: Mapping[int, torch.Tensor]) -> bool:
        marks = written.get(tensor.untyped_storage().data_ptr())
        if marks is None or not tensor.numel():
            return False
        first = tensor.storage_offset() * tensor.element_size()
        own = marks[-(-first // self._step) : -(-(first + tensor.nbytes) // self._step)]
        return bool(own.any())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _sampled(whole: torch.Tensor, step: int) -> torch.Tensor:
    """The samples of one storage, on the CPU; in the order of torch's current stream.

    Returns:
        One number for each step: a byte, or the bytes of a piece. From a device there is
        none for a last step that is shorter than a piece.
    """
    if whole.device.type != "cuda":
        return whole[::step].clone()
    count = (whole.numel() + step - PIECE_BYTES) // step
    gathered = torch.empty(count, dtype=torch.int32, device=whole.device)
    if count:
        stream = torch.cuda.current_stream(whole.device).cuda_stream
        places = whole.data_ptr(), step, gathered.data_ptr(), count
        with torch.cuda.device(whole.device):
            queue_strided_copy(real_driver(), *places, stream)
    return gathered.cpu()
