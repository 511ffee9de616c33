"""Text that is not ours, inside pages that are: as it reads, and never as marks of the page.

A tensor, a loader or a device may be called anything: a newline would end a row, a bar a cell, an
escape sequence would speak to the terminal, and `<img>` to a browser.
"""

from __future__ import annotations

import html
import re
from typing import Final, NamedTuple, Protocol

# What Markdown would take for a mark, and no more, so that the text can be read as it is too: a
# tag, the middle of a link, an entity, an underscore that is not inside a word.
_MARKS = re.compile(
    r"[\\`*|]|<(?=[A-Za-z/!?])|\](?=[(\[:])|&(?=[#\w]+;)|~(?=~)|(?<![^\W_])_|_(?![^\W_])"
)
_TICKS = re.compile(r"`+")


class Marks(Protocol):
    """How one kind of page shows a piece of text."""

    def text(self, text: str) -> str:
        """Return it as a part of a sentence."""

    def code(self, text: str) -> str:
        """Return it as code."""


def one_line(text: str) -> str:
    """Return a text with what does not print, line ends too, escaped as Python does."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class _Markdown(NamedTuple):
    def text(self, text: str) -> str:
        return _MARKS.sub(r"\\\g<0>", one_line(text))

    def code(self, text: str) -> str:
        line = one_line(text).replace("|", "\\|") or "''"
        longest = max(map(len, _TICKS.findall(line)), default=0)
        # The ticks around are one more than any within; the spaces part them, and are not shown.
        pad = " " if longest or line != line.strip() else ""
        ticks = "`" * (longest + 1)
        return f"{ticks}{pad}{line}{pad}{ticks}"


class _Html(NamedTuple):
    def text(self, text: str) -> str:
        return html.escape(one_line(text))

    def code(self, text: str) -> str:
        return f"<code>{self.text(text)}</code>"


MARKDOWN: Final[Marks] = _Markdown()
HTML: Final[Marks] = _Html()
