"""Paths as the command line takes them: an empty one is a slip, not the folder we are in.

A script whose variable is not set says ``--out ""``, and Python reads that as ``.``: a run would
be written over whatever is here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import typer


def _given(text: str | Path) -> Path:
    # A default is a path already.
    if not str(text):
        raise typer.BadParameter("it is empty; name a path, or leave the option out")
    return Path(text)


# For every option and argument that is a path.
GIVEN: Final[dict[str, Any]] = {"parser": _given, "metavar": "PATH"}
