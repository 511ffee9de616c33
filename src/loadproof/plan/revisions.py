"""Exporting code from git without touching the checkout: a revision, or the working tree.

The working tree means tracked files as they are now plus untracked files that git does not
ignore.  It is written as a git tree through an index of its own, so the user's index, branch
and files stay as they are.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loadproof.errors import ArmError
from loadproof.plan.scratch import scratch_folder

if TYPE_CHECKING:
    from collections.abc import Sequence


class Revision(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One state of the code.

    Attributes:
        spoken: How it was asked for, such as ``main`` or ``worktree``.
        commit: The commit it is, or (working tree) the one it started from.
        tree: git's id of the whole content.
        branch: The branch checked out; None for a detached HEAD or for another revision.
        dirty: Whether the content differs from ``commit``.
        note: One sentence when something was chosen on the user's behalf, else None.
    """

    spoken: str
    commit: str
    tree: str
    branch: str | None
    dirty: bool
    note: str | None = None


class Repository:
    """A git repository whose revisions can become arms."""

    def __init__(self, folder: Path) -> None:
        """Find the repository that ``folder`` lies in.

        Raises:
            ArmError: There is no git, or the folder is not inside a repository.
        """
        self._root = folder
        try:
            self._root = Path(self._git("rev-parse", "--show-toplevel"))
        except ArmError as error:
            raise ArmError(
                f"{folder} is not inside a git repository that can be read, and arms are "
                "exported from one; name it with --project."
            ) from error

    @property
    def root(self) -> Path:
        """The folder that holds the whole working tree."""
        return self._root

    def revision(self, spoken: str) -> Revision:
        """Resolve a revision; a missing local branch falls back to ``origin``'s.

        Raises:
            ArmError: Nothing answers to that name.
        """
        for name, note in (
            (spoken, None),
            (f"origin/{spoken}", f"There is no local {spoken!r}; origin/{spoken} was used."),
        ):
            try:
                commit = self._git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
            except ArmError:
                continue
            tree = self._git("rev-parse", f"{commit}^{{tree}}")
            return Revision(
                spoken=spoken, commit=commit, tree=tree, branch=None, dirty=False, note=note
            )
        raise ArmError(
            f"There is no revision {spoken!r} in this repository; "
            "name a branch, a tag or a commit that git rev-parse knows."
        )

    def worktree(self, leave_out: Sequence[Path] = ()) -> Revision:
        """Describe the working tree as it is now.

        Args:
            leave_out: Files that are no part of the code, such as an earlier receipt; they
                count as they are in the commit.

        Raises:
            ArmError: There is no commit yet, or git cannot write the tree.
        """
        head = self.revision("HEAD")
        try:
            with scratch_folder("index") as folder:
                own_index = {"GIT_INDEX_FILE": str(folder / "index")}
                self._git("read-tree", "HEAD", more=own_index)
                self._git("add", "--all", "--", ".", *self._excluded(leave_out), more=own_index)
                tree = self._git("write-tree", more=own_index)
        except OSError as error:
            raise ArmError(
                f"The working tree cannot be described: {error.strerror}; free some room."
            ) from error
        branch = self._git("branch", "--show-current") or None
        return Revision(
            spoken="worktree",
            commit=head.commit,
            tree=tree,
            branch=branch,
            dirty=tree != head.tree,
        )

    def export(self, revision: Revision, folder: Path) -> None:
        """Write the revision's files into an existing empty folder.

        Raises:
            ArmError: git cannot archive it, or the disk is full.
        """
        archive = folder.with_suffix(".tar")
        try:
            self._git("archive", "--format=tar", f"--output={archive}", revision.tree)
            with tarfile.open(archive) as content:
                content.extractall(folder, filter="data")
        except (OSError, tarfile.TarError) as error:
            raise ArmError(f"Revision {revision.spoken!r} cannot be exported: {error}.") from error
        finally:
            archive.unlink(missing_ok=True)

    def _excluded(self, files: Sequence[Path]) -> list[str]:
        """Return pathspecs that leave these files out, as far as git would take them in.

        A pathspec for a file that git ignores anyway is an error to ``git add``.
        """
        root = self._root.resolve()
        inside = [file.resolve() for file in files if file.resolve().is_relative_to(root)]
        if not inside:
            return []
        asked = [f":(literal,top){file.relative_to(root).as_posix()}" for file in inside]
        known = ("--cached", "--others", "--exclude-standard")
        names = self._git("ls-files", "-z", *known, "--", *asked).split("\0")
        return [f":(exclude,literal,top){name}" for name in names if name]

    def _git(self, *arguments: str, more: dict[str, str] | None = None) -> str:
        """Run git in the repository and return its output without the last newline."""
        try:
            done = subprocess.run(
                ["git", *arguments],  # noqa: S607 -- the user's own git, as on their PATH
                cwd=self._root,
                env={**os.environ, **(more or {})},
                capture_output=True,
                text=True,
                check=False,
            )
        except OSError as error:
            raise ArmError(f"git cannot be run: {error}.") from error
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["it said nothing"]
            raise ArmError(f"git {arguments[0]} failed: {said[-1]}.")
        return done.stdout.rstrip("\n")
