"""Whether weights were written again after they were uploaded, seen from samples.

Models have come back random with nothing said, because initialisation ran after the
weights were in place. It rewrites whole tensors, so one byte of every 256 is enough to
see it, and comparing those costs next to nothing beside the upload.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Tensors stand this far apart on the device, so that none is without a sample.
_STEP_BYTES = 256
# Above 16 GiB of weights the samples are taken further apart instead of growing.
_SAMPLES_MAX = 64 << 20


@contextmanager
def prepared(device: torch.device) -> Iterator[None]:
    """Fetch the device's code for samples beside whatever the body does first.

    A device fetches the code of an operation when it is first used: on an H200 that took
    40 to 70 ms for the few that are needed here, and the samples of 4 GB less than 3 ms.
    """
    thread = threading.Thread(target=_use_once, args=(device,), name="weightload-samples")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _use_once(device: torch.device) -> None:
    # Whatever fails here fails again where the samples are taken, and is told there.
    with suppress(Exception):
        Samples({"once": torch.zeros(2 * _STEP_BYTES, dtype=torch.uint8, device=device)}).changed()


class Samples:
    """Bytes of every storage behind some tensors, as they are now."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the samples.

        Args:
            tensors: by name; kept alive as long as this.
        """
        self._tensors = dict(tensors)
        wholes = {
            tensor.untyped_storage().data_ptr(): _bytes_of(tensor) for tensor in tensors.values()
        }
        total = sum(whole.numel() for whole in wholes.values())
        self._step = _STEP_BYTES * max(1, -(-total // (_SAMPLES_MAX * _STEP_BYTES)))
        self._wholes = {place: whole for place, whole in wholes.items() if whole.numel()}
        self._before = {
            place: whole[:: self._step].clone() for place, whole in self._wholes.items()
        }

    def changed(self) -> list[str]:
        """Names of the tensors whose samples are others now."""
        written = {
            place: whole[:: self._step] != self._before[place]
            for place, whole in self._wholes.items()
            if not torch.equal(whole[:: self._step], self._before[place])
        }
        return [name for name, tensor in self._tensors.items() if self._is_in(tensor, written)]

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
