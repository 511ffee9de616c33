"""What a project says about its loader: how a revision is built, and how the loader is called.

A project of somebody else says it in ``loadproof.toml`` at its root.  One file, that of the
working tree or the one named, holds for both arms: so two revisions differ in their code and in
nothing that is said here.  A project without the file is built by pip and asked for
``weightload:load``.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from loadproof.errors import ArmError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FILE_NAME = "loadproof.toml"

_BUILD_PLACES = ("python", "source", "site")
_COMMAND_PLACES = ("python", "site")
_PLACE = re.compile(r"\{(\w*)\}")
_ENTRY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

# --no-deps and --no-index keep an arm to its own code: no network, no other packages.
_PIP_INSTALL = (
    *("{python}", "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"),
    *("--no-deps", "--no-index", "--no-build-isolation"),
    # What is built is compiled anew, whatever built it (see ``arms``).
    *("--no-compile", "--target", "{site}", "{source}"),
)
_Words = Annotated[
    tuple[Annotated[str, msgspec.Meta(min_length=1)], ...], msgspec.Meta(min_length=1)
]


class Project(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a project's revisions become arms.

    Attributes:
        build: The command that builds a revision's ``{source}`` into the folder ``{site}``;
            ``{python}`` is the harness's own interpreter.  It runs in ``{source}``.
        entry: The loader as a Python function, ``package.module:function``.
        command: The loader as a program that speaks the protocol (``loadproof.measure.protocol``),
            with ``{site}`` and ``{python}``; exactly one of ``entry`` and ``command`` is given.
        options: Given to the loader of both arms.
    """

    build: _Words = _PIP_INSTALL
    entry: str | None = None
    command: _Words | None = None
    options: dict[str, Any] = {}

    def uses_pip(self) -> bool:
        """Whether revisions are built in the way that needs no words."""
        return self.build == _PIP_INSTALL


OURS = Project(entry="weightload:load")


def read_project(root: Path, named: Path | None = None) -> Project:
    """Read what a project says of itself; one that says nothing is taken for ours.

    Args:
        root: The root of the repository.
        named: The file to read instead of the one at the root.

    Raises:
        ArmError: The file that was named is not there, or one cannot be read or is wrong.
    """
    path = named or root / FILE_NAME
    if named is None and not path.exists():
        return OURS
    try:
        project = msgspec.toml.decode(path.read_bytes(), type=Project)
    except OSError as error:
        raise ArmError(f"{path} cannot be read: {error.strerror}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArmError(f"{path} is not right: {error}.") from error
    wrong = _wrong(project)
    if wrong is not None:
        raise ArmError(f"{path} is not right: {wrong}.")
    return project


def fill(words: Sequence[str], **places: Path) -> tuple[str, ...]:
    """Put folders where the words of a command have their placeholders."""
    values = {"python": sys.executable, **{name: str(place) for name, place in places.items()}}
    return tuple(_PLACE.sub(lambda found: values[found[1]], word) for word in words)


def _wrong(project: Project) -> str | None:
    """Say what the types cannot refuse."""
    if (project.entry is None) == (project.command is None):
        return "give either 'entry' (a Python function) or 'command' (a program)"
    if project.entry is not None and not _ENTRY.fullmatch(project.entry):
        return f"'entry' has to be package.module:function, and is {project.entry!r}"
    for name, words, known in (
        ("build", project.build, _BUILD_PLACES),
        ("command", project.command or (), _COMMAND_PLACES),
    ):
        strange = set(_PLACE.findall("\n".join(words))) - set(known)
        if strange:
            listed = ", ".join(f"{{{place}}}" for place in known)
            return f"'{name}' has no place {{{min(strange)}}}; it has: {listed}"
    if "{site}" not in "\n".join(project.build):
        return "'build' does not name {site}, the folder that it has to build into"
    if project.command is not None and "{site}" not in "\n".join(project.command):
        return "'command' names nothing in {site}, so it would not run what was built"
    return None
