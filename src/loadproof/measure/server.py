"""A model made of what a loader handed out, and what it serves.

Hashes say that the bytes are right; this says that they do what they are for.  transformers
builds the model around these very tensors, by its public ``from_pretrained(None, config=...,
state_dict=..., device_map=...)``; on the fake device they are read back into a model on the
CPU.  The reference is the same class, loaded by transformers from the files.

Greedy decoding draws nothing at random, so two loads of the same bytes serve the same tokens.
A model that generates nothing is compared by the bytes of its own output.  Attention is computed
without cuDNN, which does not give one model's answer to a long prompt the same way twice (see
``weightload.models.outputs``).
"""

from __future__ import annotations

import random
from copy import deepcopy
from hashlib import sha256
from itertools import takewhile
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

# By name: transformers imports its machinery, which takes seconds, only where a name is asked
# for, and here that is once for all serve legs (see ``template``).
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from loadproof.errors import ServingError
from loadproof.measure.device import DTYPE_NAMES, dtype_name
from loadproof.measure.messages import Answer, OutputDigest, Served

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from loadproof.measure.handed_out import AnyDevice
    from loadproof.measure.messages import Serving

_SENTENCE_MAX = 200
_REPRODUCIBLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_TOP_EXPONENT_BIT = 0x40  # of the last byte of a little-endian float
_SPECIAL_ENDINGS = ("token_id", "token_ids", "token_index")
_TORCH_NAMES = {stored: name for name, stored in DTYPE_NAMES.items()}


class ReferenceLoad(dict[str, torch.Tensor]):
    """The weights of a model that transformers loaded itself, and that model."""

    model: Any = None


class Server:
    """Makes models of one checkpoint's class, and serves prompts by them."""

    def __init__(self, serving: Serving, device: AnyDevice) -> None:
        """Read the config and import the model's class, before any clock starts.

        Raises:
            ServingError: transformers cannot make a model of this checkpoint.
        """
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self._serving = serving
        self._device = device
        self._placed = {} if device.facts().fake else {"device_map": device.loader_device}
        self._config = _tried(
            "its config",
            lambda: AutoConfig.from_pretrained(serving.folder, trust_remote_code=False),
        )
        self._class = _model_class(self._config)
        dtype = getattr(self._config, "dtype", None)
        self._dtype = getattr(torch, serving.dtype) if dtype is None else dtype

    def load_reference(self, checkpoint: str, **_: object) -> ReferenceLoad:
        """Load as a user of transformers would; called like any arm's loader.

        Raises:
            ServingError: transformers cannot load it, or would make weights up.
        """
        model = self._built(checkpoint)
        loaded = ReferenceLoad(model.state_dict())
        loaded.model = model
        return loaded

    def serve(self, loaded: Mapping[str, Any]) -> Served:
        """Serve every prompt by a model made of what was loaded.

        Raises:
            ServingError: The tensors cannot be served, or the model answers differently to the
                same prompt.
        """
        planted = self._plant(loaded) if self._serving.plant else (None, None)
        model = loaded.model if isinstance(loaded, ReferenceLoad) else self._around(loaded)
        if not self._placed:
            _align(model)
        if getattr(model, "main_input_name", None) != "input_ids":
            raise ServingError(
                f"{self._class.__name__} takes {model.main_input_name}, and a prompt here is made "
                "of token ids."
            )
        prompts = self._serving.prompts
        answers = tuple(self._answer(model, each) for each in prompts)
        if self._serving.reference:
            again = self._answer(model, prompts[-1])
            if (again.tokens, again.outputs) != (answers[-1].tokens, answers[-1].outputs):
                raise ServingError(
                    "The model does not answer the same to one prompt, asked twice."
                )
        return Served(
            model=self._class.__name__,
            dtype=str(self._dtype).removeprefix("torch."),
            place=str(model.device.type),
            answers=answers,
            planted=planted[0],
            planted_in=planted[1],
        )

    def _around(self, loaded: Mapping[str, Any]) -> Any:  # noqa: ANN401 -- transformers has no types
        """Build the model around the tensors, or around their bytes where torch has none of them.

        That is so on the fake device, and where a loader is a program with memory of its own.
        """
        torchs = all(isinstance(tensor, torch.Tensor) for tensor in loaded.values())
        tensors = dict(loaded) if torchs else dict(_read_back(self._device, loaded))
        return self._built(None, state_dict=tensors)

    def _built(self, folder: str | None, **keywords: Any) -> Any:  # noqa: ANN401 -- see above
        model, info = _tried(
            "the model",
            lambda: self._class.from_pretrained(
                folder,
                config=deepcopy(self._config),
                dtype=self._dtype,
                output_loading_info=True,
                **self._placed,
                **keywords,
            ),
        )
        missing = sorted(info["missing_keys"])
        if missing:
            raise ServingError(
                f"{self._class.__name__} would make up {len(missing)} of its weights, which the "
                f"checkpoint lacks, first {missing[0]}."
            )
        if model.can_generate():
            # Read from the folder by one way of building and not by the other.
            model.generation_config = GenerationConfig.from_model_config(model.config)
            # Some have the last token be this, whatever the weights.
            model.generation_config.forced_eos_token_id = None
        return model

    def _answer(self, model: Any, asked_tokens: int) -> Answer:  # noqa: ANN401 -- see above
        ids = self._prompt(model, asked_tokens)
        prompt = torch.tensor([ids], device=model.device)
        begun = perf_counter()
        if model.can_generate():
            _generated(model, prompt, 1)
            first_s = perf_counter() - begun
            begun = perf_counter()
            tokens = _generated(model, prompt, self._serving.new_tokens)
            outputs: tuple[OutputDigest, ...] = ()
            seconds = perf_counter() - begun
        else:
            outputs, tokens = tuple(_own_output(model, prompt)), ()
            seconds = first_s = perf_counter() - begun
        return Answer(
            asked_tokens=asked_tokens,
            prompt_tokens=len(ids),
            first_s=first_s,
            seconds=seconds,
            tokens=tokens,
            outputs=outputs,
        )

    def _prompt(self, model: Any, asked_tokens: int) -> list[int]:  # noqa: ANN401 -- see above
        """Draw a prompt within the vocabulary and the positions, without special tokens."""
        positions = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        room = asked_tokens if positions is None else positions - self._serving.new_tokens
        special = set(_special_ids(self._config.to_dict()))
        vocabulary = range(model.get_input_embeddings().weight.shape[0])
        plain = [token for token in vocabulary if token not in special]
        # The same whatever the process: a reproducible prompt, not a secret.
        generator = random.Random(f"prompt/{self._serving.seed}/{asked_tokens}")  # noqa: S311
        return generator.choices(plain, k=max(1, min(asked_tokens, room)))

    def _plant(self, loaded: Mapping[str, Any]) -> tuple[str, str]:
        """Flip the top exponent bit of one weight of the last prompt's last token's embedding.

        A checkpoint may hold the embedding under each of its names; then each is spoilt.
        """
        with torch.device("meta"):
            model = _tried("the model", lambda: self._class(deepcopy(self._config)))
        embedding = model.get_input_embeddings().weight
        own = [
            name
            for name, weight in model.named_parameters(remove_duplicate=False)
            if weight is embedding
        ]
        alike = [
            name
            for name, tensor in loaded.items()
            if tuple(tensor.shape) == tuple(embedding.shape)
        ]
        if not own or not alike:
            raise ServingError("The checkpoint has no tensor of the input embedding's shape.")
        likest = max(alike, key=lambda each: max(_common_ending(each, other) for other in own))
        names = [name for name in alike if name in own] or [likest]
        token = self._prompt(model, self._serving.prompts[-1])[-1]
        for name in names:
            self._spoil(loaded[name], token)
        words = f"a weight of token {token}'s embedding made huge on the device after the load"
        return words, ", ".join(names)

    def _spoil(self, tensor: Any, row: int) -> None:  # noqa: ANN401 -- torch's or the fake's
        """Flip the top exponent bit of one element of a row that can grow by it."""
        row_bytes = int(tensor.nbytes) // int(tensor.shape[0])
        item_bytes = row_bytes // int(tensor.shape[1])
        start = int(tensor.data_ptr()) + row * row_bytes
        content = self._device.read(start, row_bytes)
        last_bytes = range(item_bytes - 1, row_bytes, item_bytes)
        # A weight below 2 becomes huge; a larger one would become small, and might not show.
        at = next((n for n in last_bytes if not content[n] & _TOP_EXPONENT_BIT), last_bytes[0])
        self._device.write(start + at, bytes([content[at] ^ _TOP_EXPONENT_BIT]))


def _model_class(config: Any) -> Any:  # noqa: ANN401 -- transformers has no types
    """Return the class that wrote the checkpoint, or the one that its config leads to."""
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel):
            return found
    library: Any = transformers
    for mapping in (library.MODEL_FOR_CAUSAL_LM_MAPPING, library.MODEL_MAPPING):
        found = mapping.get(type(config), None)
        if isinstance(found, type):
            return found
    raise ServingError(
        f"transformers {transformers.__version__} has no model class for {config.model_type!r}."
    )


def _tried(what: str, call: Callable[[], Any]) -> Any:  # noqa: ANN401 -- whatever the call gives
    """Call transformers; whatever it raises is the reason why this cannot be served.

    Raises:
        ServingError: It raised.
    """
    try:
        return call()
    except ServingError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or ["it said nothing"]
        raise ServingError(
            f"transformers {transformers.__version__} cannot serve {what}: "
            f"{type(error).__name__}: {lines[0][:_SENTENCE_MAX]}"
        ) from error


def _read_back(device: AnyDevice, loaded: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in loaded.items():
        content = bytearray()
        for chunk in device.chunks(name, tensor):
            content += chunk
        dtype = getattr(torch, _TORCH_NAMES.get(dtype_name(tensor), ""), None)
        if dtype is None:
            raise ServingError(f"Tensor {name!r} is {tensor.dtype}, which torch does not have.")
        shape = tuple(int(n) for n in tensor.shape)
        raw = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0).byte()
        yield name, raw.view(dtype).reshape(shape)


def _align(model: Any) -> None:  # noqa: ANN401 -- see above
    """Put every weight where torch's allocator would, whoever made it.

    Kernels of the CPU may add in another order where memory is aligned in another way, and
    tensors over a file or a buffer begin anywhere.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _generated(model: Any, prompt: torch.Tensor, count: int) -> tuple[int, ...]:  # noqa: ANN401 -- see above
    """Serve ``count`` tokens; one that ends a text does not end them."""
    with torch.inference_mode(), sdpa_kernel(_REPRODUCIBLE):
        served = _tried(
            "a prompt",
            lambda: model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                num_beams=1,
                min_new_tokens=count,
                max_new_tokens=count,
            ),
        )
    return tuple(served[0, -count:].tolist())


def _own_output(model: Any, prompt: torch.Tensor) -> Iterator[OutputDigest]:  # noqa: ANN401 -- see above
    inputs = {"input_ids": prompt}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = prompt[:, :1]
    with torch.inference_mode(), sdpa_kernel(_REPRODUCIBLE):
        outputs = _tried("a prompt", lambda: model(**inputs, return_dict=True))
    found = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    if not found:
        raise ServingError(f"{type(model).__name__} gives no tensor that could be compared.")
    for name, value in found.items():
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        yield OutputDigest(
            name=name,
            dtype=str(value.dtype).removeprefix("torch."),
            shape=tuple(value.shape),
            sha256=sha256(raw.numpy().data).hexdigest(),
        )


def _special_ids(config: Mapping[str, Any]) -> Iterator[int]:
    """Find every token with a meaning of its own: ends, padding, images."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _special_ids(value)
        elif str(key).endswith(_SPECIAL_ENDINGS):
            many = value if isinstance(value, list) else [value]
            yield from (each for each in many if isinstance(each, int))


def _common_ending(one: str, other: str) -> int:
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
