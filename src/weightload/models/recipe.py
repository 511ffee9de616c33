"""Which class a model is of, and its config, by from_pretrained's own rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from weightload.errors import UsageError

if TYPE_CHECKING:
    from weightload.models.source import Source

# Named by transformers where one of its Auto classes is asked for.
_AUTO_MAPPING = "_model_mapping"
_CODE_KEYWORDS = ("trust_remote_code", "code_revision")


def is_auto(model_class: Any) -> bool:  # noqa: ANN401 - transformers has no types
    """Whether a class picks another by the config."""
    return hasattr(model_class, _AUTO_MAPPING)


def check_class(model_class: Any) -> None:  # noqa: ANN401 - see above
    """Check that a class is one of transformers'.

    Raises:
        UsageError: it is neither a model class nor an Auto class.
    """
    is_model = isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)
    if not is_model and not is_auto(model_class):
        raise UsageError(
            f"{model_class!r} is no model class of transformers; give one such as "
            f"AutoModelForCausalLM."
        )


def read_config(
    model_class: Any,  # noqa: ANN401 - see above
    source: Source,
    keywords: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """The config, and the keywords that it did not take.

    Args:
        model_class: the class asked for.
        source: the model's files.
        keywords: the caller's, without those of the hub.
    """
    given = keywords.get("config")
    rest = {name: value for name, value in keywords.items() if name != "config"}
    if isinstance(given, PreTrainedConfig):
        return given, rest
    reader = AutoConfig if is_auto(model_class) else model_class.config_class
    where = source.name if given is None or reader is AutoConfig else given
    config, unused = reader.from_pretrained(where, return_unused_kwargs=True, **source.hub, **rest)
    # AutoConfig takes these for itself; the class needs them too.
    return config, unused | {name: rest[name] for name in _CODE_KEYWORDS if name in rest}


def concrete(
    model_class: Any,  # noqa: ANN401 - see above
    config: Any,  # noqa: ANN401 - see above
    keywords: dict[str, Any],
) -> tuple[Any, Any]:
    """The class that a config leads to, and the config that this class takes.

    Args:
        model_class: the class asked for.
        config: the model's.
        keywords: the caller's; those of remote code are taken out.

    Raises:
        ValueError: transformers' own, where the code is not trusted or the config unknown.
    """
    trust = keywords.pop("trust_remote_code", None)
    revision = keywords.pop("code_revision", None)
    if not is_auto(model_class):
        return model_class, config
    known = type(config) in getattr(model_class, _AUTO_MAPPING)
    found = getattr(model_class, _AUTO_MAPPING)[type(config)] if known else None
    if isinstance(found, type) and not (trust and hasattr(config, "auto_map")):
        return found, _for_class(found, config)
    # Code from the repository, or one of several classes: only transformers' own choice will do.
    code = {} if revision is None else {"code_revision": revision}
    with torch.device("meta"):
        model = model_class.from_config(config, trust_remote_code=trust, **code)
    return type(model), _for_class(type(model), config)


def _for_class(found: Any, config: Any) -> Any:  # noqa: ANN401 - see above
    """The text part of a composite config, where the class takes only that."""
    text_class = config.sub_configs.get("text_config")
    if text_class is None or getattr(found, "config_class", None) is not text_class:
        return config
    text = config.get_text_config()
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        text.quantization_config = quantised
    return text
