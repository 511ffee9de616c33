"""Making arms: each distinct state of the code, installed into a folder of its own.

An arm is installed by pip, without dependencies and without a network, from an export of the
repository.  So an arm is what a user of that revision would import, and both arms share one
interpreter and one set of dependencies: only the code differs.  Two arms with the same git
tree share one installation.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import urllib.parse
from typing import TYPE_CHECKING, Any

import msgspec

from loadproof.errors import ArmError
from loadproof.loaders import LOADERS
from loadproof.plan.identity import package_digest, package_folder
from loadproof.plan.revisions import Repository, Revision

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# What a leg calls unless it is told otherwise.
ENTRY_POINT = "weightload:load"


class NamedLoader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A loader that is installed beside the harness.

    Attributes:
        name: What it is called in ``loadproof.loaders``.
        distribution: What it was installed by.
        version: Which version of that; None when it has no metadata.
    """

    name: str
    distribution: str
    version: str | None


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing under comparison: a revision of a project, or a named loader.

    Attributes:
        revision: Which code; None for a named loader.
        loader: Which loader; None for a revision.
        entry: Entry point of the loader, ``package.module:function``, or the loader's name.
        digest: Digest of the loader's package as installed.
        options: Keyword arguments of this arm alone.
    """

    revision: Revision | None = None
    loader: NamedLoader | None = None
    entry: str
    digest: str
    options: dict[str, Any] = {}


class InstalledArm(msgspec.Struct, frozen=True):
    """An arm, and the folder that a leg puts first on its path; None for a named loader."""

    arm: Arm
    site: str | None


def split_options(spoken: str) -> tuple[str, dict[str, Any]]:
    """Split ``name?key=value&key=value`` into the name and its options.

    A value is JSON where it reads as JSON (``4``, ``true``), and else a string.
    """
    name, _, query = spoken.partition("?")
    options: dict[str, Any] = {}
    for key, value in urllib.parse.parse_qsl(query, keep_blank_values=True):
        try:
            options[key] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            options[key] = value
    return name, options


def named_loader(spoken: str) -> InstalledArm:
    """Take a loader of ``loadproof.loaders`` that is installed here, with its options.

    Args:
        spoken: Such as ``fastsafetensors`` or ``weightload?route=direct``.

    Raises:
        ArmError: There is no such loader, it is not installed, or it knows no such option.
    """
    name, options = split_options(spoken)
    peer = LOADERS.get(name)
    if peer is None:
        raise ArmError(f"There is no loader {name!r}; the known ones are: {', '.join(LOADERS)}.")
    known = peer.options()
    unknown = [key for key in options if key not in known and "*" not in known]
    if unknown:
        listed = ", ".join(known) or "none"
        raise ArmError(f"The loader {name!r} has no option {unknown[0]!r}; it has: {listed}.")
    try:
        digest = package_digest(package_folder(peer.module))
    except ArmError:
        raise ArmError(
            f"The loader {name!r} is not installed here; run 'pip install {peer.requirement}'."
        ) from None
    distribution = re.split(r"[<>=!~ ]", peer.requirement, maxsplit=1)[0]
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = None
    loader = NamedLoader(name=name, distribution=distribution, version=version)
    return InstalledArm(Arm(loader=loader, entry=name, digest=digest, options=options), None)


def choose(
    repository: Repository,
    spoken: str,
    *,
    allow_dirty: bool,
    allow_detached: bool,
    leave_out: Sequence[Path] = (),
) -> Revision:
    """Resolve what a person named: ``worktree``, or anything that git resolves.

    ``leave_out`` names files of ours that may lie in the working tree and are not its code.

    Raises:
        ArmError: It does not exist, or is a dirty or detached checkout that was not allowed.
    """
    if spoken != "worktree":
        return repository.revision(spoken)
    chosen = repository.worktree(leave_out)
    if chosen.dirty and not allow_dirty:
        raise ArmError(
            "The working tree has changes that are not committed, so a receipt could not name "
            "them by commit; commit them, or pass --allow-dirty."
        )
    if chosen.branch is None and not allow_detached:
        raise ArmError(
            "HEAD is detached, so a receipt could not name the branch; "
            "check a branch out, or pass --allow-detached."
        )
    return chosen


def install(
    repository: Repository,
    revision: Revision,
    folder: Path,
    entry: str = ENTRY_POINT,
    options: dict[str, Any] | None = None,
) -> InstalledArm:
    """Export and install one revision below ``folder``, once per distinct git tree.

    Raises:
        ArmError: pip or the build backend is missing, the revision does not build, or it has
            no such entry point.
    """
    home = folder / revision.tree
    site = home / "site"
    package, _, _ = entry.partition(":")
    package = package.partition(".")[0]
    if not site.is_dir():
        source = home / "source"
        source.mkdir(parents=True)
        repository.export(revision, source)
        _pip_install(revision, source, site)
    if not (site / package).is_dir():
        raise ArmError(f"Revision {revision.spoken!r} installs no package {package!r}.")
    digest = package_digest(site / package)
    arm = Arm(revision=revision, entry=entry, digest=digest, options=options or {})
    return InstalledArm(arm, str(site))


def _pip_install(revision: Revision, source: Path, site: Path) -> None:
    """Run pip the way that keeps an arm to its own code: no network, no dependencies."""
    if importlib.util.find_spec("pip") is None:
        raise ArmError("Arms are installed by pip, and this environment has none; install pip.")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-deps", "--no-index", "--no-build-isolation"]
    command += ["--target", str(site), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    said = done.stderr + done.stdout
    if "BackendUnavailable" in said or "Cannot import" in said:
        raise ArmError(
            f"Revision {revision.spoken!r} cannot be built because its build backend is not "
            "installed here; install what its pyproject.toml lists under build-system (hatchling)."
        )
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it said nothing"]
    raise ArmError(f"Revision {revision.spoken!r} cannot be installed: {lines[-1]}.")
