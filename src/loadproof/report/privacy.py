r"""No place on anybody's machine goes into a receipt, nor who somebody is on it.

Sentences of loaders and drivers may name files, users and hosts.  What is known here is taken out
exactly: the folders that a run has to do with, the user's name and the host's.  Of any other
absolute path only the last part is left, which says which file it was and not where.  A folder's
name may hold almost anything, so a path is taken to go on, over spaces, commas and the rest, as
long as another slash follows in the line: too much is cut rather than too little.

A word by itself is a code or a name of ours, unless a loader reports it; so a user whose name is
one of our words does not change what a receipt says.
"""

from __future__ import annotations

import getpass
import json
import os
import pwd
import re
import socket
import sys
import tempfile
import urllib.parse
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

import loadproof
from loadproof.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from loadproof.measure.ground_truth import TensorPlace

_T = TypeVar("_T")

GONE = "<...>"
# Where a loader says what it likes.
_LOADERS_OWN = frozenset({"report", "identity", "environment"})
# Names of everybody and nobody, and those so short that they would be found in other words.
_NOBODY = frozenset({"root", "localhost"})
_NAME_LETTERS_MIN = 3

# A folder's name and its slash.  What is hardly the end of a name ends the path before it: then
# the slash begins another one, as in '/a/b':'/c/d', or an address of the web.
_NO_END = r"\s'\"(=\[<>{,;:"
_FOLDER = rf"[^/\s](?:[^/\n]*[^/{_NO_END}])?/+"
_FOLDER_OF_WINDOWS = rf"[^\\/\s](?:[^\\/\n]*[^\\/{_NO_END}])?[\\/]+"
_SPACE = re.compile(r"\s")
_LAST = r"[^\s/\\'\"<>:,;()\[\]]*"
_PATH = re.compile(
    # file:///home/somebody/x, sqlite:////x and ~somebody/x are a place even with one part;
    rf"(?:(?:[A-Za-z][\w+.-]*:/{{3,}}|\bfile:/+|(?<![\w/])~[\w.-]*/+)(?P<a>(?:{_FOLDER})*)"
    # /home/somebody/model takes two, so as not to be and/or, 1/2 or {site}/bin/loader;
    rf"|(?:(?<![\w/.}}:])/+|(?<=:)/(?!/))(?P<b>(?:{_FOLDER})+)"
    # and so does what is below a place that was taken out, or beside it.
    rf"|{re.escape(GONE)}(?:/+|(?=[-+\w]|\.\w))(?P<c>(?:{_FOLDER})+)"
    rf"|(?:(?<!\w)[A-Za-z]:\\+|(?<![\w\\])\\\\+[\w.$-]+\\+)(?P<d>(?:{_FOLDER_OF_WINDOWS})*)"
    rf")(?P<last>{_LAST})"
)
# The last part of a path to somebody's home is somebody.
_HOMES = frozenset({"home", "Users", "export/home", "var/home"})


class Private(msgspec.Struct, frozen=True, kw_only=True):
    """What is known to be private here.

    Attributes:
        places: Folders and files, as text.
        names: Names of the user and of the host.
        kept: Strings that stay as they are, such as tensors' names.
    """

    places: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    kept: frozenset[str] = frozenset()

    def cleared(self, value: _T) -> _T:
        """Return a schema class's value, or a tuple of strings, without what is private."""
        plain = msgspec.to_builtins(value)
        return msgspec.convert(self.cleared_json(plain), type(value))

    def cleared_json(self, value: Any) -> Any:  # noqa: ANN401 -- any JSON
        """Return JSON data without what is private, keys included."""
        places, names = _any_place(self.places), _any_name(self.names)

        def cut(text: str, *, is_free: bool) -> str:
            if text in self.kept:
                return text
            if places is not None:
                text = places.sub(GONE, text)
            if names is not None and (is_free or _SPACE.search(text)):
                text = names.sub(GONE, text)
            return _cut(text)

        return _mapped(value, cut, is_free=False)


def private_here(*places: Path | None, kept: Collection[str] = ()) -> Private:
    """Say what is private in this process.

    Args:
        places: Folders and files of this run, beside those of the process itself.
        kept: Strings that stay as they are.
    """
    ours = ("~", ".", tempfile.gettempdir(), Path(loadproof.__file__).parents[1])
    python = (sys.prefix, sys.base_prefix)
    return Private(
        places=tuple(_spellings((*ours, *python, *(each for each in places if each)))),
        names=tuple(_names()),
        kept=frozenset(kept),
    )


def without_paths(value: Any) -> Any:  # noqa: ANN401 -- any JSON
    """Return JSON data with every absolute path in its strings cut to ``<...>/last-part``."""
    return Private().cleared_json(value)


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


def require_public_names(checkpoint: Path, places: Iterable[TensorPlace]) -> None:
    """Refuse, before a run, tensors whose names could not stay as they are in its receipt.

    Raises:
        CheckpointError: There is one whose name reads like a path.
    """
    for each in places:
        if first_private_text([each.name, repr(each.name)]) is not None:
            raise CheckpointError(
                f"{checkpoint} has a tensor called {each.name!r}, which reads like a place on a "
                "machine, and a receipt names none; write the checkpoint again under other names."
            )


def _mapped(value: Any, cut: Callable[..., str], *, is_free: bool) -> Any:  # noqa: ANN401
    if isinstance(value, str):
        return cut(value, is_free=is_free)
    if isinstance(value, list | tuple):
        return [_mapped(each, cut, is_free=is_free) for each in value]
    if not isinstance(value, dict):
        return value
    mapped: dict[Any, Any] = {}
    for key, each in value.items():
        left = cut(key, is_free=is_free) if isinstance(key, str) else key
        while left in mapped:
            # Two files of one name in two folders.
            left = f"{left} again"
        mapped[left] = _mapped(each, cut, is_free=is_free or key in _LOADERS_OWN)
    return mapped


def _cut(text: str) -> str:
    """Cut every path, until what is left does not read like one."""
    while (cut := _PATH.sub(_last_part, text)) != text:
        text = cut
    return text


def _last_part(found: re.Match[str]) -> str:
    folders = next(each for each in found.group("a", "b", "c", "d") if each is not None)
    if folders.strip("/\\") in _HOMES:
        return GONE
    return f"{GONE}/{found['last']}"


def _spellings(places: Iterable[Path | str]) -> set[str]:
    """Return each place as text may spell it: as it is, resolved, quoted, and in a URL."""
    spellings: set[str] = set()
    for place in places:
        # As a path is given, with its links, it may be in a sentence; pathlib would follow them.
        full = os.path.abspath(os.path.expanduser(place))  # noqa: PTH100, PTH111
        for path in {full, os.path.realpath(full)} - {os.sep}:
            as_bytes = os.fsencode(path)
            spellings |= {path, urllib.parse.quote(as_bytes), repr(as_bytes)[2:-1]}
            spellings |= {repr(path)[1:-1], ascii(path)[1:-1]}
            spellings |= {json.dumps(path, ensure_ascii=each)[1:-1] for each in (True, False)}
    return spellings


def _names() -> set[str]:
    host = socket.gethostname()
    found = {Path("~").expanduser().name, host, host.partition(".")[0]}
    # A process's user need have no name.
    with suppress(KeyError, OSError):
        found.add(getpass.getuser())
    with suppress(KeyError):
        found.add(pwd.getpwuid(os.geteuid()).pw_name)
    return {each for each in found - _NOBODY if len(each) >= _NAME_LETTERS_MIN}


def _any_place(places: Collection[str]) -> re.Pattern[str] | None:
    """Match any of these places, the longest first, and not the beginning of a longer name."""
    listed = "|".join(map(re.escape, sorted(places, key=len, reverse=True)))
    return re.compile(rf"(?:{listed})(?![\w-])") if places else None


def _any_name(names: Collection[str]) -> re.Pattern[str] | None:
    listed = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.compile(rf"(?<!\w)(?:{listed})(?!\w)") if names else None
