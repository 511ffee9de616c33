"""Whether weights were written again after they were uploaded, seen from samples.

Models have come back random with nothing said, because initialisation ran after the
weights were in place. It rewrites whole tensors, so a few bytes of every so many are enough
to see it, and comparing those costs next to nothing beside the upload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from weightload.device.driver import real_driver
from weightload.device.profile import Device
from weightload.device.strided import PIECE_BYTES, StridedCopies

if TYPE_CHECKING:
    from collections.abc import Mapping

# Every tensor has as many pieces, or as many as it is long.
_PIECES_MIN = 64
# Large ones have a piece for every so many bytes: the copy engine takes 5 ns for each.
_STEP_BYTES = 16 << 10
# Of more weights than 8 GiB the pieces are taken further apart instead of growing in number.
_PIECES_MAX = 512 << 10


class _Part(NamedTuple):
    """Pieces of one tensor, `step` bytes apart, of `width` bytes each."""

    raw: torch.Tensor
    pieces: int
    step: int
    width: int


class Samples:
    """Bytes of some tensors, as they are now."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the samples.

        Args:
            tensors: by name, contiguous, all on one device; kept alive as long as this.

        Raises:
            DriverError: the device failed.
        """
        total = sum(tensor.nbytes for tensor in tensors.values())
        step = _STEP_BYTES * max(1, -(-total // (_PIECES_MAX * _STEP_BYTES)))
        self._parts = {
            name: _part(tensor, step) for name, tensor in tensors.items() if tensor.nbytes
        }
        self._before = _taken(list(self._parts.values()))

    def changed(self) -> list[str]:
        """Names of the tensors whose samples are others now.

        Raises:
            DriverError: the device failed.
        """
        parts = list(self._parts.values())
        differ = torch.split(_taken(parts) != self._before, [part.pieces for part in parts])
        return [name for name, own in zip(self._parts, differ, strict=True) if own.any()]


def _part(tensor: torch.Tensor, step_bytes: int) -> _Part:
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    first = tensor.storage_offset() * tensor.element_size()
    raw.set_(tensor.untyped_storage(), first, (tensor.nbytes,), (1,))
    whole = max(1, tensor.nbytes // PIECE_BYTES)
    pieces = min(whole, max(_PIECES_MIN, tensor.nbytes // step_bytes))
    step = whole // pieces * PIECE_BYTES
    return _Part(raw, pieces, step, min(PIECE_BYTES, tensor.nbytes))


def _taken(parts: list[_Part]) -> torch.Tensor:
    """The pieces one after the other, on the CPU; in the order of torch's current stream.

    Returns:
        One number for each piece; a piece of a tensor that is shorter than that ends in zeros.
    """
    device = parts[0].raw.device if parts else torch.device("cpu")
    counts = [part.pieces for part in parts]
    gathered = torch.empty(sum(counts), dtype=torch.int32, device=device)
    if device.type == "cuda":
        _queue_copies(parts, gathered)
    taken = gathered.cpu()
    places = torch.split(taken.view(torch.uint8).view(-1, PIECE_BYTES), counts)
    for (raw, pieces, step, width), place in zip(parts, places, strict=True):
        if device.type != "cuda":
            place[:, :width] = raw.as_strided((pieces, width), (step, 1))
        if width < PIECE_BYTES:
            place[:, width:] = 0
    return taken


def _queue_copies(parts: list[_Part], gathered: torch.Tensor) -> None:
    stream = torch.cuda.current_stream(gathered.device).cuda_stream
    gpu = Device(real_driver(), gathered.device.index)
    try:
        # A thread that has not used the device has no context, whatever torch says is current.
        with gpu.current():
            copies, target = StridedCopies(gpu.driver, stream), gathered.data_ptr()
            for raw, pieces, step, width in parts:
                copies.queue(raw.data_ptr(), step, target, pieces, width)
                target += pieces * PIECE_BYTES
    finally:
        gpu.close()
