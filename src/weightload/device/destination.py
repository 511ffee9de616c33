"""The memory that tensors live in: slabs, and tensors over them.

On a GPU torch's allocator owns the slabs, so a tensor handed out is an ordinary
one and its memory goes back to torch when it is dropped. With a driver given by
the caller (the fake, or a recorder) the slabs come from cuMemAlloc and tensors are
`DeviceTensor`, so that no torch is needed at all. Nothing handed out aliases the ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from weightload.cleanup import Cleanup
from weightload.device.driver import EVENT_DISABLE_TIMING
from weightload.errors import DeviceMemoryError, UsageError
from weightload.plan import DEVICE_ALIGNMENT_BYTES, plan_layout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from weightload.checkpoint.header import Record
    from weightload.device.profile import Device

# Large enough that allocation overhead does not matter, small enough that
# dropping some tensors gives memory back.
SLAB_BYTES = 256 << 20


@dataclass(frozen=True)
class DeviceTensor:
    """A tensor in memory that the driver, not torch, owns.

    Attributes:
        address: device address of the first byte; 256-aligned.
        nbytes: length in bytes.
        dtype: the format's name, for example `BF16`.
        shape: elements per dimension.
    """

    address: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]

    def data_ptr(self) -> int:
        """The device address, under the name that torch uses."""
        return self.address


class Destination(Protocol):
    """Memory for one load, and the tensors over it."""

    @property
    def addresses(self) -> Sequence[int]:
        """Device address of each record's first byte, once allocated."""

    @property
    def slab_bytes(self) -> Sequence[int]:
        """Sizes of the device allocations."""

    @property
    def spaced(self) -> bool:
        """Whether tensors stand 256 bytes apart with nothing of anybody's between."""

    def allocate(self) -> None:
        """Take the memory."""

    def ready(self, stream: int) -> None:
        """Make `stream` wait until the memory may be written."""

    def tensors(self) -> dict[str, Any]:
        """One tensor per record, by name."""

    def release(self) -> None:
        """Give the memory back."""


class DriverDestination:
    """Slabs from cuMemAlloc."""

    spaced = True

    def __init__(self, device: Device, records: Sequence[Record]) -> None:
        self._device = device
        self._records = records
        self.slab_bytes, self._places = plan_layout(
            [record.nbytes for record in records], SLAB_BYTES
        )
        self.addresses: Sequence[int] = ()
        self._slabs: list[int] = []

    def allocate(self) -> None:
        """Allocate every slab; what was taken before a failure is kept for `release`.

        Raises:
            DriverError: the device is out of memory.
        """
        for nbytes in self.slab_bytes:
            # A checkpoint of empty tensors alone has a slab of no bytes.
            address = self._device.driver.call("cuMemAlloc", nbytes) if nbytes else 0
            self._slabs.append(int(address))
        self.addresses = [self._slabs[place.slab] + place.offset for place in self._places]

    def ready(self, stream: int) -> None:
        """Nothing to wait for: fresh driver memory has no earlier user."""

    def tensors(self) -> dict[str, DeviceTensor]:
        """One `DeviceTensor` per record."""
        return {
            record.name: DeviceTensor(address, record.nbytes, record.dtype, record.shape)
            for record, address in zip(self._records, self.addresses, strict=True)
        }

    def release(self) -> None:
        """Free the slabs; a second call does nothing.

        Raises:
            DriverError: the first failure; every slab was still tried.
        """
        with self._device.current(), Cleanup() as freeing:
            while self._slabs:
                address = self._slabs.pop(0)
                if address:
                    freeing.undo(self._device.driver.call, "cuMemFree", address)


# The format's names beside torch's. What torch lacks is handed out as the raw bytes.
TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}


class TorchDestination:
    """Slabs from torch's allocator."""

    spaced = True

    def __init__(self, device: Device, records: Sequence[Record]) -> None:
        import torch  # noqa: PLC0415 - importing weightload must not import torch

        self._torch = torch
        self._device = device
        self._records = records
        self.slab_bytes, self._places = plan_layout(
            [record.nbytes for record in records], SLAB_BYTES
        )
        self.addresses: Sequence[int] = ()
        self._slabs: list[torch.Tensor] = []

    def allocate(self) -> None:
        """Take every slab from torch's allocator.

        Raises:
            DeviceMemoryError: the device has no room for them.
        """
        where = f"cuda:{self._device.ordinal}"
        try:
            for nbytes in self.slab_bytes:
                self._slabs.append(
                    self._torch.empty(nbytes, dtype=self._torch.uint8, device=where)
                )
        except self._torch.OutOfMemoryError as error:
            self.release()
            raise DeviceMemoryError(
                f"{where} has no room for {sum(self.slab_bytes)} bytes of weights; "
                f"free memory on it or choose a smaller model."
            ) from error
        bases = [slab.data_ptr() for slab in self._slabs]
        if any(base % DEVICE_ALIGNMENT_BYTES for base in bases):
            raise UsageError(
                "torch's allocator returned memory that is not 256-aligned; "
                "use its default allocator."
            )
        self.addresses = [bases[place.slab] + place.offset for place in self._places]

    def ready(self, stream: int) -> None:
        """Order `stream` behind torch's: its memory may have a user queued there."""
        _order_behind_torch(self._device, stream)

    def tensors(self) -> dict[str, torch.Tensor]:
        """One torch tensor per record, over its slab.

        F4 and F6 come out as the raw bytes, `uint8` of one dimension: torch has no
        type that counts their elements as the format does.
        """
        typed: dict[tuple[int, str], torch.Tensor] = {}
        tensors = {}
        for record, place in zip(self._records, self._places, strict=True):
            name = TORCH_NAMES.get(record.dtype)
            key = place.slab, name or "uint8"
            whole = typed.get(key)
            if whole is None:
                whole = self._slabs[place.slab].view(getattr(self._torch, key[1]))
                typed[key] = whole
            shape = record.shape if name else (record.nbytes,)
            tensors[record.name] = whole.as_strided(
                shape, _strides(shape), place.offset // whole.itemsize
            )
        return tensors

    def release(self) -> None:
        """Drop the slabs: their memory lives on in the tensors that were handed out."""
        self._slabs.clear()


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements; as torch has them, a size of 0 counts as 1."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class CallerDestination:
    """Tensors that the caller made: torch's on the device, or `DeviceTensor`."""

    slab_bytes: Sequence[int] = ()
    spaced = False

    def __init__(self, device: Device, records: Sequence[Record], into: Mapping[str, Any]) -> None:
        """Check every tensor against its record.

        Raises:
            UsageError: one is on another device, not contiguous, or of another dtype or
                shape.
        """
        self._device = device
        self._into = into
        for record in records:
            _check_fits(record, into[record.name], device.ordinal)
        self.addresses: Sequence[int] = [int(into[r.name].data_ptr()) for r in records]
        self._torch_owned = not all(isinstance(into[r.name], DeviceTensor) for r in records)

    def allocate(self) -> None:
        """Nothing to take: the memory is there."""

    def ready(self, stream: int) -> None:
        """Order `stream` behind torch's, where the tensors may still be in use."""
        if self._torch_owned:
            _order_behind_torch(self._device, stream)

    def tensors(self) -> dict[str, Any]:
        """The caller's own tensors."""
        return dict(self._into)

    def release(self) -> None:
        """Nothing to give back: the memory is the caller's."""


def _check_fits(record: Record, tensor: Any, ordinal: int) -> None:  # noqa: ANN401 - see above
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if isinstance(tensor, DeviceTensor):
        fits = (dtype, shape) == (record.dtype, record.shape)
    else:
        if tensor.device.type != "cuda" or tensor.device.index != ordinal:
            raise UsageError(
                f"into[{record.name!r}] is on {tensor.device}, not on cuda:{ordinal}."
            )
        if not tensor.is_contiguous():
            raise UsageError(f"into[{record.name!r}] is not contiguous; give a contiguous tensor.")
        name = TORCH_NAMES.get(record.dtype)
        same = (dtype, shape) == (name, record.shape)
        fits = same or (name is None and dtype == "uint8" and tensor.nbytes == record.nbytes)
    if not fits:
        raise UsageError(
            f"into[{record.name!r}] is {dtype} of shape {list(shape)}; the checkpoint has "
            f"{record.dtype} of shape {list(record.shape)}."
        )


def _order_behind_torch(device: Device, stream: int) -> None:
    """Make `stream` wait for what is queued on torch's current stream."""
    import torch  # noqa: PLC0415 - importing weightload must not import torch

    call = device.driver.call
    torch_stream = torch.cuda.current_stream(device.ordinal).cuda_stream
    event = int(call("cuEventCreate", EVENT_DISABLE_TIMING))
    try:
        call("cuEventRecord", event, torch_stream)
        call("cuStreamWaitEvent", stream, event, 0)
    finally:
        call("cuEventDestroy", event)
