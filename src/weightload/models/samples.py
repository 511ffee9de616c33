"""Whether weights were written again after they were uploaded, seen from samples.

Models have come back random with nothing said, because initialisation ran after the
weights were in place. It rewrites whole tensors, so a few bytes of every so many are enough
to see it, and comparing those costs next to nothing beside the upload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weightload.device.driver import real_driver
from weightload.device.profile import Device
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
        return _sampled(self._wholes, self._step)

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


def _sampled(wholes: Mapping[int, torch.Tensor], step: int) -> dict[int, torch.Tensor]:
    """The samples of storages of one device, on the CPU; in the order of torch's current stream.

    Returns:
        For each storage one number for each step: a byte, or the bytes of a piece. From a
        device there is none for a last step that is shorter than a piece.
    """
    device = next((whole.device for whole in wholes.values()), None)
    if device is None or device.type != "cuda":
        return {place: whole[::step].clone() for place, whole in wholes.items()}
    counts = [(whole.numel() + step - PIECE_BYTES) // step for whole in wholes.values()]
    # Brought to the CPU together, since each transfer from the device costs as much as many.
    gathered = torch.empty(sum(counts), dtype=torch.int32, device=device)
    parts = torch.split(gathered, counts)
    stream = torch.cuda.current_stream(device).cuda_stream
    gpu = Device(real_driver(), device.index)
    try:
        # A thread that has not used the device has no context, whatever torch says is current.
        with gpu.current():
            for place, part in zip(wholes, parts, strict=True):
                if part.numel():
                    target = part.data_ptr(), part.numel()
                    queue_strided_copy(gpu.driver, place, step, *target, stream)
            on_cpu = gathered.cpu()
    finally:
        gpu.close()
    return dict(zip(wholes, torch.split(on_cpu, counts), strict=True))
