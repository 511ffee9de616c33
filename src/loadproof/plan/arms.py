"""Making arms: each distinct state of the code, installed into a folder of its own.

An arm is built from an export of the repository, by pip without dependencies and without a
network unless the project says otherwise (see ``project``).  So an arm is what a user of that
revision would run, and both arms share one interpreter and one set of dependencies: only the
code differs.  Two arms with the same git tree share one installation.
"""

from __future__ import annotations

import compileall
import importlib.metadata
import importlib.util
import re
import shutil
import tempfile
import urllib.parse
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from packaging.requirements import Requirement

import weightload
from loadproof.errors import ArmError
from loadproof.loaders import LOADERS
from loadproof.plan.build import run_build
from loadproof.plan.identity import COMPILED, package_digest, package_folder
from loadproof.plan.project import OURS, Project, fill
from loadproof.plan.revisions import Repository, Revision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Lines of a build, pip's mostly, that carry a reason: the end of a traceback, or a complaint
# that is not just the name of the step that failed.
_TELLING = re.compile(r"[\w.]*(?:Error|Exception): |(?:ERROR|error): (?!Exception:|[a-z-]+$)")
# The folders of an absolute path, whose last part is enough to read a reason by.
_FOLDERS = re.compile(r"(?<![\w/.:])/(?:[^\s/'\"]+/)+")


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
        entry: Entry point of the loader, ``package.module:function``, or the loader's name; None
            when it is a command.
        command: The program that is the loader, with its placeholders; None for one in Python.
        digest: Digest of the loader's package as installed, or (a command) of all that was built.
        versions: Of the distributions that were installed with the loader, by name.
        options: Keyword arguments of this arm alone.
    """

    revision: Revision | None = None
    loader: NamedLoader | None = None
    entry: str | None
    command: tuple[str, ...] | None = None
    digest: str
    versions: dict[str, str] = {}
    options: dict[str, Any] = {}

    def is_same_code(self, other: Arm) -> bool:
        """Whether another arm would run the very same code in the very same way."""
        return (self.digest, self.entry, self.command, self.options) == (
            other.digest,
            other.entry,
            other.command,
            other.options,
        )


class InstalledArm(msgspec.Struct, frozen=True):
    """An arm, and the folder that a leg puts first on its path; None for a named loader."""

    arm: Arm
    site: str | None

    def command(self) -> tuple[str, ...] | None:
        """Return the words that start the loader, when it is a program."""
        if self.arm.command is None or self.site is None:
            return None
        return fill(self.arm.command, site=Path(self.site))


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


def require_route(route: object, *more: str) -> None:
    """Refuse a word that is no route of weightload's.

    Args:
        route: The word; None is no word and passes.
        more: Words that pass as well, such as ``auto``.

    Raises:
        ArmError: It is none.
    """
    if route not in (None, *more, *weightload.ROUTES):
        known = ", ".join((*more, *weightload.ROUTES))
        raise ArmError(f"weightload has no route {route!r}; it has: {known}.")


def named_loader(spoken: str, more: Mapping[str, Any] | None = None) -> InstalledArm:
    """Take a loader of ``loadproof.loaders`` that is installed here, with its options.

    Args:
        spoken: Such as ``fastsafetensors`` or ``weightload?route=direct``.
        more: Options that every arm of the trial is given.

    Raises:
        ArmError: There is no such loader, it is not installed, or it knows no such option.
    """
    name, options = split_options(spoken)
    peer = LOADERS.get(name)
    if peer is None:
        raise ArmError(f"There is no loader {name!r}; the known ones are: {', '.join(LOADERS)}.")
    known = peer.options()
    unknown = [key for key in {**options, **(more or {})} if key not in known and "*" not in known]
    if unknown:
        listed = ", ".join(known) or "none"
        raise ArmError(f"The loader {name!r} has no option {unknown[0]!r}; it has: {listed}.")
    if peer.module == "weightload":
        require_route(options.get("route"), "auto")
    try:
        digest = package_digest(package_folder(peer.module))
    except ArmError:
        raise ArmError(
            f"The loader {name!r} is not installed here; run 'pip install {peer.requirement}'."
        ) from None
    requirement = Requirement(peer.requirement)
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is not None and not requirement.specifier.contains(version, prereleases=True):
        raise ArmError(
            f"The loader {name!r} needs {requirement} and {version} is installed here; run "
            f"'pip install {requirement}'."
        )
    loader = NamedLoader(name=name, distribution=requirement.name, version=version)
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
    project: Project = OURS,
    options: dict[str, Any] | None = None,
) -> InstalledArm:
    """Export and build one revision below ``folder``, once per distinct git tree.

    Raises:
        ArmError: The revision does not build, or what was built has not the loader that the
            project names.
    """
    home = folder / revision.tree
    site = home / "site"
    if not site.is_dir():
        source = home / "source"
        source.mkdir(parents=True)
        repository.export(revision, source)
        site.mkdir()
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            _build(project, revision, source, site, Path(scratch))
        _compile_anew(site)
    code = _code(project, revision, site)
    arm = Arm(
        revision=revision,
        entry=project.entry,
        command=project.command,
        digest=package_digest(code),
        versions=_versions(site),
        options=options or {},
    )
    return InstalledArm(arm, str(site))


def _compile_anew(site: Path) -> None:
    """Leave nothing compiled in a site but what its own files compile to.

    Python may run a compiled file in the place of its source, and no digest covers those.  So
    what a build brings along goes, and each file is compiled here: before the first leg, so that
    what a load imports late is no more expensive in one leg than in another.
    """
    for folder in sorted(site.rglob(COMPILED)):
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink()
    with warnings.catch_warnings():
        # What a compiler has to say of an arm's code is not the trial's business.
        warnings.simplefilter("ignore")
        compileall.compile_dir(site, quiet=2)


def _code(project: Project, revision: Revision, site: Path) -> Path:
    """Return the folder that holds all code of the loader: what an arm's digest is taken over.

    Raises:
        ArmError: The loader is not in what was built, or some of that lies elsewhere.
    """
    if project.command is None:
        package = (project.entry or "").partition(":")[0].partition(".")[0]
        if not (site / package).is_dir():
            raise ArmError(f"Revision {revision.spoken!r} installs no package {package!r}.")
        return site / package
    program = fill(project.command, site=site)[0]
    if shutil.which(program) is None:
        raise ArmError(
            f"Revision {revision.spoken!r} builds no program {project.command[0]!r} that can be "
            "run; look at 'build' and 'command' of the project's file."
        )
    for path in site.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(site.resolve()):
            raise ArmError(
                f"Revision {revision.spoken!r} builds the link {path.relative_to(site)}, which "
                "leads out of {site}: its digest would not be of what runs; copy the file instead."
            )
    return site


def _versions(site: Path) -> dict[str, str]:
    """Return the versions of the distributions that were installed into a folder."""
    found = importlib.metadata.distributions(path=[str(site)])
    return {each.name: each.version for each in found}


def _build(project: Project, revision: Revision, source: Path, site: Path, scratch: Path) -> None:
    """Run the project's build; nothing that it asks for is answered."""
    if project.uses_pip() and importlib.util.find_spec("pip") is None:
        raise ArmError("Arms are installed by pip, and this environment has none; install pip.")
    try:
        words = fill(project.build, source=source, site=site)
        status, said = run_build(words, source, scratch)
    except OSError as error:
        raise ArmError(f"No process can be started to build with: {error.strerror}.") from error
    if status == 0:
        return
    if project.uses_pip() and ("BackendUnavailable" in said or "Cannot import" in said):
        raise ArmError(
            f"Revision {revision.spoken!r} cannot be built because its build backend is not "
            "installed here; install what its pyproject.toml lists under build-system (hatchling)."
        )
    raise ArmError(f"Revision {revision.spoken!r} cannot be installed: {_reason(said)}.")


def _reason(said: str) -> str:
    """Find the one line of a build's output that says why, and cut the places out of it."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["it said nothing"]
    telling = [line for line in lines if _TELLING.match(line)]
    line = (telling or lines)[-1].removeprefix("ERROR: ").replace("file://", "")
    return _FOLDERS.sub("", line).rstrip(".")
