"""Which class a model is of, and its config, by from_pretrained's own rules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import (
    get_class_from_dynamic_module,
    resolve_trust_remote_code,
)

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


def find_class(
    model_class: Any,  # noqa: ANN401 - see above
    config: Any,  # noqa: ANN401 - see above
    source: Source,
    keywords: dict[str, Any],
) -> Any:  # noqa: ANN401 - see above
    """The class that a config leads to, found without building a model of it.

    Args:
        model_class: the class asked for.
        config: the model's.
        source: the model's files.
        keywords: the caller's; those of remote code count.

    Raises:
        UsageError: the Auto class has no class for this config.
        ValueError: transformers' own, where the code is not trusted.
    """
    if not is_auto(model_class):
        return model_class
    mapping = getattr(model_class, _AUTO_MAPPING)
    known = _named(mapping[type(config)], config) if type(config) in mapping else None
    reference = (getattr(config, "auto_map", None) or {}).get(model_class.__name__)
    # A class that the caller registered comes before the repository's.
    if reference and (known is None or known.__module__.startswith("transformers.")):
        trust, name = keywords.get("trust_remote_code"), str(source.name)
        resolve: Any = resolve_trust_remote_code
        if resolve(trust, name, known is not None, has_remote_code=True):
            revision = keywords.get("code_revision")
            return get_class_from_dynamic_module(
                reference, name, code_revision=revision, **source.hub
            )
    if known is None:
        raise UsageError(
            f"{model_class.__name__} has no class for {type(config).__name__}; use the Auto class "
            f"or the model class that the checkpoint was written by."
        )
    return known


def _named(found: Any, config: Any) -> Any:  # noqa: ANN401 - see above
    """Of several classes the one that the config names, or else the first."""
    if isinstance(found, type):
        return found
    by_name = {each.__name__: each for each in found}
    named = [by_name[name] for name in config.architectures or () if name in by_name]
    return (*named, *found)[0]


def config_for(found: Any, config: Any) -> Any:  # noqa: ANN401 - see above
    """The text part of a composite config, where the class takes only that.

    Args:
        found: a class that an Auto class led to.
        config: the model's.
    """
    text_class = config.sub_configs.get("text_config")
    if text_class is None or getattr(found, "config_class", None) is not text_class:
        return config
    text = config.get_text_config()
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        text.quantization_config = quantised
    return text
