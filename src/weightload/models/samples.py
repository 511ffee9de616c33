"""Whether weights were written again after they were uploaded, seen from samples.

Models have come back random with nothing said, because initialisation ran after the
weights were in place. It rewrites whole tensors, so a few bytes of every so many are enough
to see it, and comparing those costs next to nothing beside the upload.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from weightload.device.driver import real_driver
from weightload.device.profile import Device
from weightload.device.strided import StridedCopies

if TYPE_CHECKING:
    from collections.abc import Mapping

# Wide enough for a whole element of any dtype, wherever it begins.
_PIECE_BYTES = 16
# Tensors as long as so many pieces are taken whole; longer ones have about as many, or more.
_PIECES_MIN = 64
_WHOLE_BYTES = _PIECES_MIN * _PIECE_BYTES
# Large ones have a piece for every so many bytes: the copy engine takes 5 ns for each.
_STEP_BYTES = 16 << 10
# Of more weights than 8 GiB the pieces are taken further apart instead of growing in number.
_PIECES_MAX = 512 << 10
_LONG_STEP_BYTES = 4 << 10
_SMALL_PRIMES = math.prod((2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47))


class _Part(NamedTuple):
    """Pieces of one tensor, `step` bytes apart, of `width` bytes each; brought to `place`."""

    raw: torch.Tensor
    pieces: int
    step: int
    width: int
    place: int

    @property
    def end(self) -> int:
        """One after its last byte among the samples."""
        return self.place + self.pieces * self.width


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
        self._parts: dict[str, _Part] = {}
        place = 0
        for name, tensor in tensors.items():
            if tensor.nbytes:
                self._parts[name] = _part(tensor, step, place)
                place = _rounded(self._parts[name].end)
        self._before = _taken(list(self._parts.values()))

    def changed(self) -> list[str]:
        """Names of the tensors whose samples are others now.

        Raises:
            DriverError: the device failed.
        """
        now = _taken(list(self._parts.values()))
        if torch.equal(now, self._before):
            return []
        return [
            name
            for name, part in self._parts.items()
            if not torch.equal(now[part.place : part.end], self._before[part.place : part.end])
        ]


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _PIECE_BYTES) * _PIECE_BYTES


def _part(tensor: torch.Tensor, step_bytes: int, place: int) -> _Part:
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    first, nbytes = tensor.storage_offset() * tensor.element_size(), tensor.nbytes
    raw.set_(tensor.untyped_storage(), first, (nbytes,), (1,))
    if nbytes <= _WHOLE_BYTES:
        return _Part(raw, 1, _rounded(nbytes), nbytes, place)
    wanted = max(_PIECES_MIN, nbytes // step_bytes)
    # Rounded up, so that what is left after the last piece is no longer than between two.
    step = _rounded(-(-(nbytes - _PIECE_BYTES) // (wanted - 1)))
    # No rows of a usual length are met at the same columns all the way down.
    while step >= _LONG_STEP_BYTES and math.gcd(step // _PIECE_BYTES, _SMALL_PRIMES) > 1:
        step += _PIECE_BYTES
    pieces = 1 + (nbytes - _PIECE_BYTES) // step
    return _Part(raw, pieces, step, _PIECE_BYTES, place)


def _taken(parts: list[_Part]) -> torch.Tensor:
    """The bytes of all pieces, on the CPU; in the order of torch's current stream."""
    device = parts[0].raw.device if parts else torch.device("cpu")
    length = _rounded(parts[-1].end) if parts else 0
    gathered = torch.empty(length, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        _queue_copies(parts, gathered)
    taken = gathered.cpu()
    for part in parts:
        if device.type != "cuda":
            rows = part.raw.as_strided((part.pieces, part.width), (part.step, 1))
            taken[part.place : part.end].view(part.pieces, part.width).copy_(rows)
        if part.width % _PIECE_BYTES:
            # Up to the next part there is whatever was in that memory before.
            taken[part.end : _rounded(part.end)] = 0
    return taken


def _queue_copies(parts: list[_Part], gathered: torch.Tensor) -> None:
    stream = torch.cuda.current_stream(gathered.device).cuda_stream
    gpu = Device(real_driver(), gathered.device.index)
    try:
        # A thread that has not used the device has no context, whatever torch says is current.
        with gpu.current():
            copies, target = StridedCopies(gpu.driver, stream), gathered.data_ptr()
            for raw, pieces, step, width, place in parts:
                copies.queue(raw.data_ptr(), step, target + place, pieces, width)
    finally:
        gpu.close()
