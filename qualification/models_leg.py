"""One leg of the models' table: a process that prepares, loads one model and looks at it.

The clock starts with everything imported, the family's modelling code included, and the
CUDA context made, in every arm; it stops when the device is synchronised with the model
in hand. Weights and tokens are looked at afterwards.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

import weightload
from fakecuda import FakeCuda
from fixtures.model_equality import differences, tensors_of
from fixtures.models import FAMILIES
from weightload import compat, greedy_tokens, load_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

ARMS = ("weightload", "transformers", "gb10-load-llm", "placing")
_PROMPT_TOKENS = 32_768
LONG_PROMPT = tuple((7 * place + place // 13) % 150_000 for place in range(_PROMPT_TOKENS))
_PROMPT_SHORT = (11, 401, 75, 3020, 9)
_AUTO: Any = AutoModelForCausalLM


def make_model(folder: Path, layers: int, seed: int) -> None:
    """Write a model shaped like Qwen2 with random weights, in two shards."""
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        max_position_embeddings=2 * _PROMPT_TOKENS,
        dtype=torch.bfloat16,
        architectures=["Qwen2ForCausalLM"],
    )
    with torch.device("meta"):
        shapes = Qwen2ForCausalLM(config).state_dict()
    place = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for number, (name, like) in enumerate(shapes.items()):
        scale = 1.0 if "norm" in name else 0.03
        weight = torch.randn(like.shape, dtype=torch.bfloat16, device=place) * scale
        shards[2 * number // len(shapes)][name] = weight.cpu()
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-00002.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.save_pretrained(folder)


def _loaders(folder: Path, device: str) -> dict[str, Callable[[], Any]]:
    """Each arm's call; on the fake device every model stays on the CPU."""
    if device == "fake":
        return {
            "weightload": lambda: load_model(_AUTO, folder, driver=FakeCuda()),
            "transformers": lambda: _AUTO.from_pretrained(folder, dtype="auto"),
            "gb10-load-llm": lambda: compat.load_model_to_cuda(
                _AUTO, folder, dtype="auto", device="cpu"
            ),
        }
    return {
        "weightload": lambda: load_model(_AUTO, folder, device=device),
        "transformers": lambda: _AUTO.from_pretrained(folder, dtype="auto", device_map=device),
        "gb10-load-llm": lambda: _peer()(_AUTO, folder, dtype="auto", device=device),
    }


def _peer() -> Any:  # noqa: ANN401 - an extra, without types
    from gb10_load_llm import load_model_to_cuda  # noqa: PLC0415 - an extra

    return load_model_to_cuda


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(name)


def _prepare(folder: Path, *, warm: bool) -> float | None:
    """Put the files into the page cache or take them out; returns the share that is in it."""
    system, cached, total = weightload.System(), 0, 0
    buffer = bytearray(64 << 20)
    for path in sorted(folder.glob("*.safetensors")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if warm:
                offset = 0
                while got := os.preadv(descriptor, [buffer], offset):
                    offset += got
            else:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            pages = system.cached_pages(descriptor)
            if pages is None:
                return None
            cached += pages * system.page_bytes
            total += path.stat().st_size
        finally:
            os.close(descriptor)
    return min(1.0, cached / total)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _measured(call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """Call, with the time, the host's peak growth and torch's peak on the device."""
    _synchronize()
    Path("/proc/self/clear_refs").write_text("5")
    resident_before_bytes = _status_bytes("VmRSS")
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    model = call()
    _synchronize()
    figures: dict[str, Any] = {
        "seconds": time.perf_counter() - begun,
        "host_growth_bytes": _status_bytes("VmHWM") - resident_before_bytes,
    }
    if torch.cuda.is_available():
        figures["device_reserved_bytes"] = torch.cuda.max_memory_reserved()
        figures["device_allocated_bytes"] = torch.cuda.max_memory_allocated()
    return model, figures


def _placing(folder: Path, device: str) -> tuple[Any, dict[str, Any]]:
    """What transformers itself takes when the tensors are on the device already."""
    with ExitStack() as stack:
        if device == "fake":
            driver = FakeCuda()
            loaded: Any = stack.enter_context(weightload.load(folder, driver=driver))
            from weightload.models.weights import read_back  # noqa: PLC0415 - only here

            tensors, placed = read_back(driver, 0, loaded), {}
        else:
            tensors = dict(weightload.load(folder, device=device))
            placed = {"device_map": device}
        config = Qwen2Config.from_pretrained(folder)
        model_class: Any = Qwen2ForCausalLM
        return _measured(
            lambda: model_class.from_pretrained(
                None, config=config, state_dict=tensors, dtype="auto", **placed
            )
        )


def _bits(model: Any) -> int:  # noqa: ANN401 - transformers has no types
    """A sum of the weights' bits; a weight in another's place gives another value."""
    sums = [
        int(weight.contiguous().reshape(-1).view(torch.int16).sum(dtype=torch.int64))
        for weight in model.state_dict().values()
    ]
    return sum(place * value for place, value in enumerate(sums, start=1))


def _looked_at(model: Any) -> dict[str, Any]:  # noqa: ANN401 - see above
    """Bytes, sums of the weights' bits and served tokens; equal loads give equal values."""
    figures: dict[str, Any] = {
        "nbytes": sum(weight.nbytes for weight in model.state_dict().values()),
        "bits": _bits(model),
        "tokens": greedy_tokens(model, _PROMPT_SHORT, 16),
    }
    report = getattr(model, "weightload_report", None)
    if report is not None:
        figures["report"] = report.to_dict()
    return figures


def _prompt(model: Any) -> dict[str, Any]:  # noqa: ANN401 - see above
    """Serve a long prompt, cold, and time it up to its last token."""
    prompt = LONG_PROMPT if torch.cuda.is_available() else LONG_PROMPT[:256]
    begun = time.perf_counter()
    tokens = greedy_tokens(model, prompt, 8)
    _synchronize()
    seconds = time.perf_counter() - begun
    return {"prompt_seconds": seconds, "prompt_tokens": tokens, "bits": _bits(model)}


def _families(device: str) -> dict[str, Any]:
    """Every family on this device, compared with from_pretrained's."""
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        for name, family in FAMILIES.items():
            try:
                rows[name] = _family(family, Path(root) / name.replace(" ", "-"), device)
            except Exception as error:  # noqa: BLE001 - a family that fails is its row
                rows[name] = {"failed": f"{type(error).__name__}: {error}"}
    return {"families": rows}


def _family(family: Any, folder: Path, device: str) -> dict[str, Any]:  # noqa: ANN401 - a recipe
    family.write(folder)
    loader = getattr(transformers, family.loader)
    if device == "fake":
        model = load_model(loader, folder, driver=FakeCuda())
        expected = loader.from_pretrained(folder)
    else:
        model = load_model(loader, folder, device=device)
        expected = loader.from_pretrained(folder, device_map=device)
    different = differences(model, expected)
    tokens, not_served = None, ""
    if model.can_generate():
        try:
            served = [greedy_tokens(each, (5, 9, 31, 7), 12) for each in (model, expected)]
            tokens = served[0] == served[1]
        except Exception as error:  # noqa: BLE001 - kernels that are not installed, for one
            not_served = f"{type(error).__name__}: {str(error)[:120]}"
    report = model.weightload_report
    return {
        "how": report.how,
        "different": different,
        "tokens_equal": tokens,
        "not_served": not_served,
        "zero_copy": report.zero_copy,
        "weights": report.weights,
        "devices": sorted({str(each.device) for each in tensors_of(model).values()}),
    }


def _result(spec: dict[str, Any]) -> dict[str, Any]:
    folder = Path(spec["folder"])
    if spec["section"] == "make":
        make_model(folder, spec["layers"], spec["seed"])
        return {}
    device = spec["device"]
    if device != "fake":
        torch.empty(1, device=device)
        # An import as well, which the loader would otherwise make inside the clock.
        importlib.import_module("cuda.bindings.driver")
    if spec["section"] == "probe":
        return {}
    if spec["section"] == "families":
        return _families(device)
    if spec["arm"] == "gb10-load-llm" and device != "fake":
        _peer()
    resident = _prepare(folder, warm=spec["section"] == "warm")
    if spec["arm"] == "placing":
        model, figures = _placing(folder, device)
    else:
        model, figures = _measured(_loaders(folder, device)[spec["arm"]])
    looked_at = _prompt(model) if spec["section"] == "prompt" else _looked_at(model)
    return figures | {"resident_share": resident} | looked_at


def run_leg(spec: dict[str, Any], answer: Connection) -> None:
    """Run one leg and send its result, or the error that ended it."""
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        result = _result(spec)
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result
        result = {"failed": f"{type(error).__name__}: {error}"}
    on_gpu = torch.cuda.is_available() and spec["section"] != "make"
    answer.send(
        result
        | {
            "device": torch.cuda.get_device_name(0) if on_gpu else "no GPU",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "kernel": os.uname().release,
            "cores": len(os.sched_getaffinity(0)),
        }
    )
    answer.close()
    os._exit(0)
