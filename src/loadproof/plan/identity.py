"""What code a folder holds: one digest over a package's files.

The parent takes it when an arm is installed, and the leg's own process takes it again from the
folder that it really imported; the two must agree.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from loadproof.errors import ArmError

# Where Python keeps what it compiled.
COMPILED = "__pycache__"
_PIP_NOTES = ("direct_url.json", "RECORD")


def package_folder(name: str) -> Path:
    """Find the folder of a package that is installed here, without importing it.

    Raises:
        ArmError: It is not installed.
    """
    found = importlib.util.find_spec(name)
    for location in (found.submodule_search_locations or ()) if found else ():
        return Path(location)
    raise ArmError(f"The package {name!r} is not installed here.")


def package_digest(folder: Path) -> str:
    """Return ``sha256:<hex>`` over the relative names and contents of a package's files.

    Compiled caches are left out: they differ between interpreters, and in an arm they are made
    anew from these files (see ``arms``).  So are pip's notes about where it installed from: a
    folder whose name is drawn for each run.
    """
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        noted = path.parent.suffix == ".dist-info" and path.name in _PIP_NOTES
        if noted or COMPILED in inside.parts or not path.is_file():
            continue
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        whole.update(f"{inside.as_posix()}\0{content}\n".encode())
    return "sha256:" + whole.hexdigest()
