"""How each peer brings a folder of safetensors to one CUDA device.

Every function takes the folder and a torch device such as `cuda:0`, and returns
all tensors by name, complete when the device is synchronised. Nothing is tuned
beyond what the peer's documentation recommends. The peers are extras: each is
imported where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Tensors = dict[str, Any]


class Peer(NamedTuple):
    """One loader of somebody else's.

    Attributes:
        requirement: the distribution that brings it.
        load: `load(folder, device)`.
    """

    requirement: str
    load: Callable[[Path, str], Tensors]


def _shards(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.glob("*.safetensors"))


def _safetensors(folder: Path, device: str) -> Tensors:
    from safetensors.torch import load_file  # noqa: PLC0415 - an extra

    tensors: Tensors = {}
    for shard in _shards(folder):
        tensors |= load_file(shard, device=device)
    return tensors


def _safetensors_cpu(folder: Path, device: str) -> Tensors:
    from safetensors.torch import load_file  # noqa: PLC0415 - an extra

    tensors: Tensors = {}
    for shard in _shards(folder):
        tensors |= {name: tensor.to(device) for name, tensor in load_file(shard).items()}
    return tensors


def _safetensors_prefetch(folder: Path, device: str) -> Tensors:
    from safetensors import safe_open  # noqa: PLC0415 - an extra

    tensors: Tensors = {}
    # Any: the types of the release before have no prefetch.
    files: list[Any] = [
        safe_open(shard, framework="pt", device=device) for shard in _shards(folder)
    ]
    loaders = [file.prefetch() for file in files]
    for loader in loaders:
        with loader:
            tensors |= dict(loader)
    return tensors


def _fastsafetensors(folder: Path, device: str) -> Tensors:
    from fastsafetensors import SafeTensorsFileLoader  # noqa: PLC0415 - an extra

    loader = SafeTensorsFileLoader(None, device, nogds=True)
    loader.add_filenames({0: _shards(folder)})
    try:
        buffers = loader.copy_files_to_device()
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}
    finally:
        loader.close()


def _instanttensor(folder: Path, device: str) -> Tensors:
    import torch  # noqa: F401, PLC0415 - it must be imported first
    from instanttensor import BackendPolicy, safe_open  # noqa: PLC0415 - an extra

    ordinal = int(device.rpartition(":")[2])
    buffered = BackendPolicy.BUFFERED
    with safe_open(_shards(folder), framework="pt", device=ordinal, backend=buffered) as file:
        return dict(file.tensors())


def _instanttensor_direct(folder: Path, device: str) -> Tensors:
    import torch  # noqa: F401, PLC0415 - it must be imported first
    from instanttensor import safe_open  # noqa: PLC0415 - an extra

    ordinal = int(device.rpartition(":")[2])
    with safe_open(_shards(folder), framework="pt", device=ordinal) as file:
        return dict(file.tensors())


def _runai(folder: Path, device: str) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer  # noqa: PLC0415 - an extra

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(_shards(folder))
        return {name: tensor.to(device) for name, tensor in streamer.get_tensors()}


def _touch(folder: Path, device: str) -> Tensors:
    from gb10_load_llm import touch_tensor_cpu_pages  # noqa: PLC0415 - an extra
    from safetensors.torch import load_file  # noqa: PLC0415 - an extra

    tensors: Tensors = {}
    for shard in _shards(folder):
        for name, tensor in load_file(shard).items():
            touch_tensor_cpu_pages(tensor)
            tensors[name] = tensor.to(device)
    return tensors


PEERS = {
    "safetensors": Peer("safetensors", _safetensors),
    "safetensors-cpu": Peer("safetensors", _safetensors_cpu),
    "safetensors-prefetch": Peer("safetensors>=0.9.0rc1", _safetensors_prefetch),
    "fastsafetensors": Peer("fastsafetensors", _fastsafetensors),
    "instanttensor": Peer("instanttensor", _instanttensor),
    "instanttensor-direct": Peer("instanttensor", _instanttensor_direct),
    "runai": Peer("runai-model-streamer", _runai),
    "touch": Peer("gb10-load-llm", _touch),
}
