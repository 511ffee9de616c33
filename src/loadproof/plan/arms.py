"""Making arms: each distinct state of the code, installed into a folder of its own.

An arm is installed by pip, without dependencies and without a network, from an export of the
repository.  So an arm is what a user of that revision would import, and both arms share one
interpreter and one set of dependencies: only the code differs.  Two arms with the same git
tree share one installation.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec

from loadproof.errors import ArmError
from loadproof.plan.identity import package_digest
from loadproof.plan.revisions import Repository, Revision

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# What a leg calls unless it is told otherwise.
ENTRY_POINT = "weightload:load"


class Arm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing under comparison.

    Attributes:
        revision: Which code.
        entry: Entry point of the loader, ``package.module:function``.
        digest: Digest of the entry point's package as installed.
    """

    revision: Revision
    entry: str
    digest: str


class InstalledArm(msgspec.Struct, frozen=True):
    """An arm, and the folder on this machine that a leg puts first on its path."""

    arm: Arm
    site: str


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
    repository: Repository, revision: Revision, folder: Path, entry: str = ENTRY_POINT
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
    arm = Arm(revision=revision, entry=entry, digest=package_digest(site / package))
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
