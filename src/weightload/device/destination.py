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
from weightload.plan import DEVICE_ALIGNMENT_BYTES, Layout, plan_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """Slabs for one load, and the tensors over them."""

    addresses: Sequence[int]
    layout: Layout

    def allocate(self) -> None:
        """Take the slabs; afterwards `addresses` has one device address per record."""

    def ready(self, stream: int) -> None:
        """Make `stream` wait until the slabs may be written."""

    def tensors(self) -> dict[str, Any]:
        """One tensor per record, by name."""

    def release(self) -> None:
        """Give the slabs back."""


class DriverDestination:
    """Slabs from cuMemAlloc."""

    def __init__(self, device: Device, records: Sequence[Record]) -> None:
        self._device = device
        self._records = records
        self.layout = plan_layout([record.nbytes for record in records], SLAB_BYTES)
        self.addresses: Sequence[int] = ()
        self._slabs: list[int] = []

    def allocate(self) -> None:
        """Allocate every slab; what was taken before a failure is kept for `release`.

        Raises:
            DriverError: the device is out of memory.
        """
        for nbytes in self.layout.slab_bytes:
            # A checkpoint of empty tensors alone has a slab of no bytes.
            address = self._device.driver.call("cuMemAlloc", nbytes) if nbytes else 0
            self._slabs.append(int(address))
        self.addresses = [self._slabs[place.slab] + place.offset for place in self.layout.places]

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
_TORCH_NAMES = {
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

    def __init__(self, device: Device, records: Sequence[Record]) -> None:
        import torch  # noqa: PLC0415 - importing weightload must not import torch

        self._torch = torch
        self._device = device
        self._records = records
        self.layout = plan_layout([record.nbytes for record in records], SLAB_BYTES)
        self.addresses: Sequence[int] = ()
        self._slabs: list[torch.Tensor] = []

    def allocate(self) -> None:
        """Take every slab from torch's allocator.

        Raises:
            DeviceMemoryError: the device has no room for them.
        """
        where = f"cuda:{self._device.ordinal}"
        try:
            for nbytes in self.layout.slab_bytes:
                self._slabs.append(
                    self._torch.empty(nbytes, dtype=self._torch.uint8, device=where)
                )
        except self._torch.OutOfMemoryError as error:
            self.release()
            raise DeviceMemoryError(
                f"{where} has no room for {sum(self.layout.slab_bytes)} bytes of weights; "
                f"free memory on it or choose a smaller model."
            ) from error
        bases = [slab.data_ptr() for slab in self._slabs]
        if any(base % DEVICE_ALIGNMENT_BYTES for base in bases):
            raise UsageError(
                "torch's allocator returned memory that is not 256-aligned; "
                "use its default allocator."
            )
        self.addresses = [bases[place.slab] + place.offset for place in self.layout.places]

    def ready(self, stream: int) -> None:
        """Order `stream` behind torch's current stream.

        torch may hand out memory whose last user is still queued on its current stream.
        """
        driver = self._device.driver
        torch_stream = self._torch.cuda.current_stream(self._device.ordinal).cuda_stream
        event = int(driver.call("cuEventCreate", EVENT_DISABLE_TIMING))
        try:
            driver.call("cuEventRecord", event, torch_stream)
            driver.call("cuStreamWaitEvent", stream, event, 0)
        finally:
            driver.call("cuEventDestroy", event)

    def tensors(self) -> dict[str, torch.Tensor]:
        """One torch tensor per record, over its slab.

        F4 and F6 come out as the raw bytes, `uint8` of one dimension: torch has no
        type that counts their elements as the format does.
        """
        return {
            record.name: self._tensor(record, self._slabs[place.slab], place.offset)
            for record, place in zip(self._records, self.layout.places, strict=True)
        }

    def _tensor(self, record: Record, slab: torch.Tensor, offset: int) -> torch.Tensor:
        raw = slab[offset : offset + record.nbytes]
        name = _TORCH_NAMES.get(record.dtype)
        return raw.view(getattr(self._torch, name)).view(record.shape) if name else raw

    def release(self) -> None:
        """Drop the slabs: their memory lives on in the tensors that were handed out."""
        self._slabs.clear()
