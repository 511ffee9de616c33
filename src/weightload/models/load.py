"""`load_model`: from_pretrained's result, with the weights brought by the fast route.

The class, its config, renames, fusions, ties and initial values stay transformers'
work; it is given the tensors where it would have read files. What differs from
from_pretrained on purpose: a weight that the checkpoint lacks, or that would be random,
is an error unless it is allowed by name.
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from weightload.arguments import check_counts, check_kinds, check_names
from weightload.device.profile import device_profile, parse_ordinal
from weightload.errors import FallbackWarning, UsageError
from weightload.load import load
from weightload.models.check import check_complete, check_weights, count_copies
from weightload.models.fallback import (
    gives_account,
    why_not_class,
    why_not_config,
    why_not_device_map,
    why_not_folder,
    why_not_keywords,
)
from weightload.models.families import read_ahead_layers
from weightload.models.recipe import check_class, config_for, find_class, is_auto, read_config
from weightload.models.report import ModelReport
from weightload.models.source import HUB_DEFAULTS, Source, locate, weights_of
from weightload.models.weights import LazyWeights, read_back
from weightload.routes import check_route

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from weightload.host.system import System


# from_pretrained changes torch's and transformers' own settings while it builds a model (the
# default dtype, what initialises, what is tied), for the whole process and not for a thread.
_BUILDING = threading.RLock()


def load_model(  # noqa: PLR0913 - independent keywords, each with a default
    model_class: Any,  # noqa: ANN401 - transformers has no types
    path: str | os.PathLike[str],
    *,
    device: str | int | torch.device = "cuda",
    dtype: Any = "auto",  # noqa: ANN401 - as from_pretrained's
    route: str = "auto",
    allow: Sequence[str] = (),
    read_ahead: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    threads: int | None = None,
    driver: Any = None,  # noqa: ANN401 - the binding publishes no types
    system: System | None = None,
    **from_pretrained_keywords: Any,  # noqa: ANN401 - as from_pretrained's
) -> Any:  # noqa: ANN401 - see above
    """Load a model of transformers onto a device.

    Calls in several threads build their models one after the other. from_pretrained of the
    caller's own, beside it in another thread, disturbs both: it sets the process's dtype.

    Args:
        model_class: an Auto class such as `AutoModelForCausalLM`, or a model class. One of your
            own does not know the model's name yet while its `__init__` runs.
        path: a folder, or the id of a repository on the hub.
        device: `cuda`, `cuda:1`, or the ordinal.
        dtype: `auto` keeps the checkpoint's; otherwise as from_pretrained's.
        route: as for `weightload.load`.
        allow: names or shell patterns of weights that may be missing, unexpected,
            mismatched or changed. Everything else that is, is an error; except what the class
            itself lists as missing or unexpected without harm.
        read_ahead: layers to read ahead; None takes the family's own number, which is 0
            until that family has a receipt from a GB10.
        progress: as for `weightload.load`.
        threads: as for `weightload.load`.
        driver: as for `weightload.load`. The bytes are then read back from that device
            into a model on the CPU.
        system: as for `weightload.load`.
        from_pretrained_keywords: from_pretrained's own, with the same meaning.

    Returns:
        The model in evaluation mode, with a `ModelReport` at its `weightload_report`; with
        `output_loading_info=True` also transformers' account of the load, empty where the
        class has a from_pretrained of its own that does not speak of it. Such a load is not
        checked for missing weights.

    Warns:
        FallbackWarning: the fast route cannot do what is asked for, so from_pretrained did
            all of it; the report says why.

    Raises:
        WeightloadError: as for `weightload.load`.
        ModelError: weights are missing, unexpected, random or not the checkpoint's. What is
            written again after it was fused with others, or renamed and cast, is not seen.
        CheckpointError: the weights are not safetensors.
        UsageError: an argument is not one that this function takes.
    """
    check_class(model_class)
    check_route(route)
    if isinstance(allow, str):
        raise UsageError(f"allow= takes a list of names or patterns; write [{allow!r}].")
    check_counts(threads=(threads, 1))
    check_kinds(path=path, allow=allow, progress=progress, system=system)
    check_names(allow=allow)
    keywords = dict(from_pretrained_keywords)
    if keywords.pop("use_safetensors", True) is False:
        raise UsageError("load_model reads safetensors only; use from_pretrained for pickles.")
    if keywords.get("state_dict") is None:
        keywords.pop("state_dict", None)
    legacy_dtype = keywords.pop("torch_dtype", None)
    options = {
        "route": route,
        "progress": progress,
        "threads": threads,
        "driver": driver,
        "system": system,
    }
    call = _Call(
        model_class,
        device,
        # Of both, from_pretrained takes `dtype`; here it is `auto` when it is not given.
        legacy_dtype if _as_stored(dtype) and legacy_dtype is not None else dtype,
        tuple(allow),
        read_ahead,
        options,
    )
    return call.run(path, keywords)


class _Call:
    """One call of `load_model`, with its arguments checked."""

    def __init__(
        self,
        model_class: Any,  # noqa: ANN401 - transformers has no types
        device: str | int | torch.device,
        dtype: Any,  # noqa: ANN401 - as from_pretrained's
        allow: tuple[str, ...],
        read_ahead: int | None,
        options: dict[str, Any],
    ) -> None:
        self.model_class = model_class
        self.device = device
        self.dtype = dtype
        self.allow = allow
        self.read_ahead = read_ahead
        self.options = options
        self.report = ModelReport()

    def run(self, path: str | os.PathLike[str], keywords: dict[str, Any]) -> Any:  # noqa: ANN401 - see above
        """Load, check and report."""
        wants_info = keywords.pop("output_loading_info", False)
        report, found = self.report, None
        with report.phase("total"):
            hub, own = _split(keywords)
            report.reason = self._take_device_map(own) or why_not_keywords(own)
            if not report.reason:
                with report.phase("config"):
                    source = locate(path, hub)
                    # An adapter may stand by itself, without a config or weights of a model.
                    report.reason = why_not_folder(source.folder)
            if not report.reason:
                with report.phase("config"):
                    files = weights_of(source)
                    config, rest = read_config(self.model_class, source, self._of_config(own))
                    rest.pop("dtype", None)
                    found = find_class(self.model_class, config, source, own)
                    report.family = str(getattr(config, "model_type", ""))
                    report.reason = (
                        why_not_config(config)
                        or why_not_class(self.model_class)
                        or why_not_class(found)
                    )
            if report.reason:
                model, info = self._fall_back(path, keywords, found)
            else:
                if is_auto(self.model_class):
                    config = config_for(found, config)
                model, info = self._fast(found, source, files, config, rest, own)
        model.weightload_report = report
        return (model, info) if wants_info else model

    def _of_config(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """The keywords that the config sees: an Auto class writes `dtype=None` into it."""
        written = is_auto(self.model_class) and self.dtype is None
        given = isinstance(keywords.get("config"), PreTrainedConfig)
        return keywords | ({"dtype": None} if written and not given else {})

    def _take_device_map(self, keywords: dict[str, Any]) -> str:
        """Take one device out of `device_map`; returns why the fast route cannot follow it."""
        device_map: Any = keywords.get("device_map")
        if isinstance(device_map, dict):
            device_map = device_map[""] if set(device_map) == {""} else device_map
        if device_map is None or str(device_map).startswith("cuda") or _is_ordinal(device_map):
            keywords.pop("device_map", None)
            self.device = self.device if device_map is None else device_map
            return ""
        return why_not_device_map(device_map)

    def _placement(self) -> dict[str, Any]:
        """Where from_pretrained puts what it makes itself; the CPU with a driver given.

        Raises:
            DeviceError: there is no such device, or no driver.
        """
        if self.options["driver"] is not None:
            return {}
        # Without the device there is one sentence, before anything is made for it.
        device_profile(str(self.device))
        return {"device_map": f"cuda:{parse_ordinal(str(self.device))}"}

    def _fall_back(
        self,
        path: str | os.PathLike[str],
        keywords: dict[str, Any],
        found: Any,  # noqa: ANN401 - transformers has no types
    ) -> tuple[Any, dict[str, Any]]:
        report = self.report
        report.how = "from_pretrained"
        warnings.warn(
            f"from_pretrained loads this model, not the fast route ({report.reason}).",
            FallbackWarning,
            stacklevel=4,
        )
        found = found or self._class_of(path, keywords)
        asked = gives_account(self.model_class) and gives_account(found)
        account = {"output_loading_info": True} if asked else {}
        placed = keywords | account
        if placed.get("device_map") is None:
            placed |= self._placement()
        with report.phase("build"), _BUILDING:
            result = self.model_class.from_pretrained(path, dtype=self.dtype, **placed)
        model, info = result if isinstance(result, tuple) else (result, {})
        if info:
            check_complete(info, self.allow, report)
        report.family = str(getattr(model.config, "model_type", ""))
        count_copies(model, {}, report)
        return model, info

    def _class_of(self, path: str | os.PathLike[str], keywords: dict[str, Any]) -> Any:  # noqa: ANN401 - see above
        """The class that from_pretrained comes to, or the one asked for where that is unknown."""
        if not is_auto(self.model_class):
            return self.model_class
        hub, own = _split(keywords)
        source = Source(path, Path(path), hub)
        try:
            config, _ = read_config(self.model_class, source, own)
            return find_class(self.model_class, config, source, own)
        except (OSError, ValueError, UsageError):
            # An adapter has no config beside it; and what is amiss, from_pretrained says itself.
            return self.model_class

    def _fast(
        self,
        found: Any,  # noqa: ANN401 - transformers has no types
        source: Source,
        files: Path,
        config: Any,  # noqa: ANN401 - transformers has no types
        rest: dict[str, Any],
        keywords: dict[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        report = self.report
        placement = self._placement()
        generation_config = rest.pop("generation_config", None)
        trust = rest.pop("trust_remote_code", None)
        rest.pop("code_revision", None)
        with report.phase("build"), _BUILDING:
            weights = LazyWeights(files, lambda: self._upload(files))
            model, info = found.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=weights.stored_dtype(config) if _as_stored(self.dtype) else self.dtype,
                output_loading_info=True,
                **placement,
                # Weights of other shapes are then named, and refused below unless allowed.
                **{"ignore_mismatched_sizes": True, **rest},
            )
        with report.phase("check"):
            check_complete(info, self.allow, report)
            check_weights(model, weights, self.allow, renamed=bool(rest.get("key_mapping")))
            count_copies(model, weights, report)
        _name_source(model, source)
        if model.can_generate() and hasattr(model, "adjust_generation_fn"):
            auto = is_auto(self.model_class)
            # A class of its own sees all keywords here, an Auto class what the config left.
            seen = dict(rest if auto else keywords) | {"trust_remote_code": trust}
            seen.pop("generation_config", None)
            model.adjust_generation_fn(
                generation_config=generation_config,
                from_auto_class=auto,
                from_pipeline=None,
                pretrained_model_name_or_path=source.name,
                **HUB_DEFAULTS | source.hub,
                **seen,
            )
        return model, info

    def _upload(self, files: Path) -> dict[str, torch.Tensor]:
        """Bring every tensor; on a device of the caller's, bring it back to the CPU as well."""
        report, driver = self.report, self.options["driver"]
        device = str(self.device)
        if driver is None and device_profile(device).integrated:
            # What from_pretrained reserved is the memory that the ring and the weights need.
            torch.cuda.empty_cache()
        ahead = self.read_ahead
        if ahead is None:
            ahead = read_ahead_layers(report.family)
        with report.phase("upload"):
            loaded = load(files, device=device, read_ahead=ahead, **self.options)
            report.load = loaded.report
            if driver is None:
                return dict(loaded)
            with loaded:
                return read_back(driver, device, loaded)


def _split(keywords: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The hub's keywords, and the others."""
    hub = {name: keywords[name] for name in HUB_DEFAULTS if name in keywords}
    return hub, {name: keywords[name] for name in keywords if name not in HUB_DEFAULTS}


def _as_stored(dtype: Any) -> bool:  # noqa: ANN401 - as from_pretrained's
    return dtype is None or (isinstance(dtype, str) and dtype == "auto")


def _is_ordinal(device: object) -> bool:
    return isinstance(device, int) and not isinstance(device, bool)


def _name_source(model: Any, source: Source) -> None:  # noqa: ANN401 - transformers has no types
    """Say where the model came from, in the places where from_pretrained says it."""
    # from_pretrained(None) makes one text of None and hands it on; what is that very object was
    # to be the name, and a "None" that somebody wrote is another one.
    told = model.config.name_or_path
    for module in model.modules():
        held = [each for each in vars(module).values() if isinstance(each, PreTrainedConfig)]
        for holder in (module, *held):
            for attribute, value in list(vars(holder).items()):
                if value is told:
                    setattr(holder, attribute, str(source.name))
