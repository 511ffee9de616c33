"""The state dict that transformers is handed: uploaded when it is first looked into.

`from_pretrained` builds the model and reserves device memory of the weights' size
before it looks at the tensors. Uploading only then lets the weights take just that
memory; uploaded before, they would stand beside it, twice their size in all.
"""

from __future__ import annotations

import json
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import TYPE_CHECKING, Any

import torch

from weightload.checkpoint.folder import INDEX_NAME, open_checkpoint
from weightload.device.destination import TORCH_NAMES
from weightload.device.driver import Driver
from weightload.device.profile import Device, parse_ordinal
from weightload.models.samples import Samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from weightload.checkpoint.header import Record
    from weightload.device.destination import DeviceTensor


class LazyWeights(Mapping[str, torch.Tensor]):
    """Tensors by name; the first access to any of them uploads all.

    Attributes:
        samples: of the bytes as they were uploaded.
    """

    samples: Samples

    def __init__(self, files: Path, upload: Callable[[], dict[str, torch.Tensor]]) -> None:
        """Prepare.

        Args:
            files: the checkpoint.
            upload: brings every tensor.
        """
        self._files = files
        self._upload = upload
        self._uploaded: dict[str, torch.Tensor] | None = None

    def _tensors(self) -> dict[str, torch.Tensor]:
        if self._uploaded is None:
            self._uploaded = self._upload()
            self.samples = Samples(self._uploaded)
        return self._uploaded

    def stored_dtype(self, config: Any) -> Any:  # noqa: ANN401 - transformers has no types
        """What `dtype="auto"` means here beyond the config: the index may say it.

        Args:
            config: the model's.

        Returns:
            The dtype's name in the index where the config has none; otherwise `auto`.
        """
        index = self._files / INDEX_NAME
        if getattr(config, "dtype", None) is not None or not index.is_file():
            return "auto"
        metadata = json.loads(index.read_bytes()).get("metadata")
        return metadata.get("dtype") or "auto" if isinstance(metadata, dict) else "auto"

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors())

    def __len__(self) -> int:
        return len(self._tensors())

    def items(self) -> ItemsView[str, torch.Tensor]:
        """Every tensor by name; transformers sorts and takes these."""
        return self._tensors().items()

    def values(self) -> ValuesView[torch.Tensor]:
        """The tensors, or before the upload the first file's, by name, without their bytes.

        Where a config says nothing of the dtype, transformers takes that of the first
        floating-point tensor of the first file.
        """
        if self._uploaded is not None:
            return self._uploaded.values()
        with open_checkpoint(self._files) as files:
            records = sorted(files.shards[0].header.records)
        return {
            record.name: torch.empty(0, dtype=_dtype_of(record), device="meta")
            for record in records
        }.values()


def _dtype_of(record: Record) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, TORCH_NAMES.get(record.dtype, "uint8"))
    return dtype


def read_back(
    driver: Any,  # noqa: ANN401 - the binding publishes no types
    device: str | int,
    tensors: Mapping[str, DeviceTensor],
) -> dict[str, torch.Tensor]:
    """Copy tensors off a device whose memory torch does not know, into CPU tensors.

    Args:
        driver: the object that owns the memory.
        device: as for `weightload.load`.
        tensors: by name.

    Returns:
        One CPU tensor each, of the same dtype and shape; F4 and F6 as raw bytes.

    Raises:
        DriverError: a copy failed.
    """
    gpu = Device(Driver(driver), parse_ordinal(device))
    try:
        # A tensor made in inference mode could never be trained, whoever loaded it.
        with gpu.current(), torch.inference_mode(mode=False):
            return {name: _read_back(gpu, tensor) for name, tensor in tensors.items()}
    finally:
        gpu.close()


def _read_back(gpu: Device, tensor: DeviceTensor) -> torch.Tensor:
    raw = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
    if tensor.nbytes:
        gpu.driver.call("cuMemcpyDtoH", raw.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    name = TORCH_NAMES.get(tensor.dtype)
    return raw.view(getattr(torch, name)).reshape(tensor.shape) if name else raw
