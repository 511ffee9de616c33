"""Doing the damage: a planted fault on the device after a load, or in a copy of the files.

The original files are never written to.  A fault in a file goes into a folder of links, where
only the shard that carries it is a copy.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadproof.errors import DeviceError
from loadproof.measure.messages import FlipBit, SwapChunks

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loadproof.measure.ground_truth import TensorPlace
    from loadproof.measure.handed_out import AnyDevice
    from loadproof.measure.messages import Plant


def plant_on_device(device: AnyDevice, tensors: Mapping[str, Any], plant: Plant) -> None:
    """Change what the device holds.

    Raises:
        DeviceError: The loader handed out no such bytes, or a copy failed.
    """
    if isinstance(plant, FlipBit):
        address = _address(tensors, plant.tensor, plant.byte, 1)
        (byte,) = device.read(address, 1)
        device.write(address, bytes([byte ^ 1 << plant.bit]))
    elif isinstance(plant, SwapChunks):
        first = _address(tensors, plant.tensor, plant.first, plant.nbytes)
        second = _address(tensors, plant.tensor, plant.second, plant.nbytes)
        kept = device.read(first, plant.nbytes)
        device.write(first, device.read(second, plant.nbytes))
        device.write(second, kept)
    else:
        source = _address(tensors, plant.source, plant.source_byte, plant.nbytes)
        target = _address(tensors, plant.tensor, plant.byte, plant.nbytes)
        device.write(target, device.read(source, plant.nbytes))


def plant_in_file(checkpoint: Path, place: TensorPlace, plant: FlipBit, folder: Path) -> Path:
    """Make a checkpoint in ``folder`` that differs by one bit, and return where it is.

    Raises:
        OSError: There is no room for a copy of the shard.
    """
    shard = Path(place.path)
    if checkpoint.is_dir():
        for each in checkpoint.iterdir():
            if each.name != shard.name:
                folder.joinpath(each.name).symlink_to(each.resolve())
    altered = folder / shard.name
    shutil.copyfile(shard, altered)
    with altered.open("r+b") as file:
        file.seek(place.offset + plant.byte)
        (byte,) = file.read(1)
        file.seek(place.offset + plant.byte)
        file.write(bytes([byte ^ 1 << plant.bit]))
    return folder if checkpoint.is_dir() else altered


def _address(tensors: Mapping[str, Any], name: str, byte: int, nbytes: int) -> int:
    tensor = tensors.get(name)
    if tensor is None or byte + nbytes > int(tensor.nbytes):
        raise DeviceError(f"The loader handed out no byte {byte} of {name!r}.")
    return int(tensor.data_ptr()) + byte
