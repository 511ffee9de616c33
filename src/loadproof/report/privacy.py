"""No place on anybody's machine goes into a receipt.

Sentences of loaders and drivers may name files.  An absolute path is cut down to its last
part, which says which file it was and not where; whatever still looks like one is refused.
"""

from __future__ import annotations

import re
from typing import Any

# At least two parts, at the start of a word: /home/somebody/model, but not and/or, 1/2 or
# {site}/bin/loader.
_PATH = re.compile(r"(?<![\w/.:}])/(?:[^\s/'\"<>:,;()\[\]]+/)+([^\s/'\"<>:,;()\[\]]*)")


def without_paths(value: Any) -> Any:  # noqa: ANN401 -- any JSON
    """Return JSON data with every absolute path in its strings cut to ``<...>/last-part``."""
    if isinstance(value, str):
        return _PATH.sub(r"<...>/\1", value)
    if isinstance(value, dict):
        return {key: without_paths(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(each) for each in value]
    return value


def first_private_text(value: Any) -> str | None:  # noqa: ANN401 -- any JSON
    """Return the first absolute path in JSON data, keys included, or None."""
    if isinstance(value, str):
        found = _PATH.search(value)
        return found.group() if found else None
    parts: list[Any] = []
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple):
        parts = list(value)
    return next((each for each in map(first_private_text, parts) if each is not None), None)
