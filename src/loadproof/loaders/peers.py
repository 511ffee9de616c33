"""How each loader, ours and the peers', brings a folder of safetensors to one CUDA device.

Every function takes the folder and a torch device such as `cuda:0`, and returns
all tensors by name, complete when the device is synchronised. Nothing is tuned
beyond what the peer's documentation recommends; what can be chosen is a keyword
with that default. The peers are extras: each is imported where it is used.
"""

from __future__ import annotations

import importlib
import inspect
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loadproof.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Callable

Tensors = dict[str, Any]


class Peer(NamedTuple):
    """One loader of somebody else's.

    Attributes:
        requirement: the distribution that brings it.
        load: `load(folder, device, **options)`.
        module: the package whose files are the loader.
        imports: what is imported before that; a peer's library may need torch's to be there.
        of_models: whether it makes a model of transformers, whose code it imports as well.
    """

    requirement: str
    load: Callable[..., Any]
    module: str
    imports: tuple[str, ...] = ()
    of_models: bool = False

    def prepare(self, checkpoint: str) -> None:
        """Import everything that the load of this checkpoint needs.

        A program imports once and for all; inside the clock, an import of some seconds
        would be called slow loading.
        """
        for name in (*self.imports, self.module):
            importlib.import_module(name)
        if self.of_models:
            _import_model_code(checkpoint)

    def options(self) -> tuple[str, ...]:
        """The keywords that this loader knows; `*` when it knows its own."""
        parameters = inspect.signature(self.load).parameters.values()
        return tuple(
            "*" if each.kind is each.VAR_KEYWORD else each.name
            for each in parameters
            if each.kind in {each.KEYWORD_ONLY, each.VAR_KEYWORD} and each.name != "driver"
        )

    def as_loader(self, checkpoint: str, *, device: str, driver: Any, **options: Any) -> Any:  # noqa: ANN401 - tensors of several kinds
        """Load as a leg asks for it.

        Raises:
            DeviceError: the fake device was asked for, and this loader needs a real one.
        """
        if self.module == "weightload":
            return self.load(Path(checkpoint), device, driver=driver, **options)
        if driver is not None:
            raise DeviceError(f"{self.module} needs a CUDA GPU and cannot load onto the fake one.")
        return self.load(Path(checkpoint), device, **options)


def _import_model_code(checkpoint: str) -> None:
    """Import the code of the model's family, if it is one of transformers' own.

    A checkpoint that transformers does not know is no slip of the import: the load says what
    is the matter with it, and the serve legs have a code for it.
    """
    from transformers import AutoConfig  # noqa: PLC0415 - heavy

    with suppress(ImportError, OSError, ValueError):
        family = type(AutoConfig.from_pretrained(checkpoint)).__module__
        importlib.import_module(family.replace("configuration_", "modeling_"))


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


def _fastsafetensors(folder: Path, device: str, *, nogds: bool = True) -> Tensors:
    from fastsafetensors import SafeTensorsFileLoader  # noqa: PLC0415 - an extra

    loader = SafeTensorsFileLoader(None, device, nogds=nogds)
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


def _weightload(folder: Path, device: str, *, driver: Any = None, **options: Any) -> Any:  # noqa: ANN401 - ours or torch's tensors
    import weightload  # noqa: PLC0415 - not needed for the others

    return weightload.load(folder, device=device, driver=driver, **options)


def _parameters(model: Any) -> Tensors:  # noqa: ANN401 - transformers' models have no one type
    """Every parameter and buffer that a file holds, under the model's own names."""
    return dict(model.state_dict())


def _transformers(folder: Path, device: str) -> Tensors:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - heavy

    return _parameters(
        AutoModelForCausalLM.from_pretrained(folder, device_map=device, dtype="auto")
    )


def _gb10_load_llm(folder: Path, device: str) -> Tensors:
    from gb10_load_llm import load_model_to_cuda  # noqa: PLC0415 - an extra
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - heavy

    return _parameters(
        load_model_to_cuda(AutoModelForCausalLM, str(folder), device=device, dtype="auto")
    )


def _touch(folder: Path, device: str) -> Tensors:
    from gb10_load_llm import touch_tensor_cpu_pages  # noqa: PLC0415 - an extra
    from safetensors.torch import load_file  # noqa: PLC0415 - an extra

    tensors: Tensors = {}
    for shard in _shards(folder):
        for name, tensor in load_file(shard).items():
            touch_tensor_cpu_pages(tensor)
            tensors[name] = tensor.to(device)
    return tensors


_TORCH = ("torch",)
_TORCH_FILES = ("torch", "safetensors.torch")
_MODELS = ("torch", "transformers.models.auto.modeling_auto")

PEERS = {
    "safetensors": Peer("safetensors", _safetensors, "safetensors", _TORCH_FILES),
    "safetensors-cpu": Peer("safetensors", _safetensors_cpu, "safetensors", _TORCH_FILES),
    "safetensors-prefetch": Peer(
        "safetensors>=0.9.0rc1", _safetensors_prefetch, "safetensors", _TORCH_FILES
    ),
    "transformers": Peer("transformers", _transformers, "transformers", _MODELS, of_models=True),
    "gb10-load-llm": Peer(
        "gb10-load-llm", _gb10_load_llm, "gb10_load_llm", _MODELS, of_models=True
    ),
    "fastsafetensors": Peer("fastsafetensors", _fastsafetensors, "fastsafetensors", _TORCH),
    "instanttensor": Peer("instanttensor", _instanttensor, "instanttensor", _TORCH),
    "instanttensor-direct": Peer("instanttensor", _instanttensor_direct, "instanttensor", _TORCH),
    "runai": Peer("runai-model-streamer", _runai, "runai_model_streamer", _TORCH),
    "touch": Peer("gb10-load-llm", _touch, "gb10_load_llm", _TORCH_FILES),
}

# Ours beside them, as it is installed here.
LOADERS = {
    "weightload": Peer("loadproof", _weightload, "weightload", ("weightload.load",)),
    **PEERS,
}
