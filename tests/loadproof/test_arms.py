"""Arms: exactly the code that was named, installed by itself."""

from __future__ import annotations

import importlib.util
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.repositories import commit_all, git
from loadproof.errors import ArmError
from loadproof.plan.arms import choose, install
from loadproof.plan.identity import package_digest
from loadproof.plan.project import OURS, Project
from loadproof.plan.revisions import Repository

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "weightload"
version = "1"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a package of one file on main."""
    folder = tmp_path / "project"
    (folder / "weightload").mkdir(parents=True)
    (folder / "weightload" / "__init__.py").write_text("def load(): return 1\n")
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / ".gitignore").write_text("*.ignored\n")
    commit_all(folder, "one")
    return folder


def test_the_working_tree_is_tracked_and_untracked_and_not_ignored(
    project: Path, tmp_path: Path
) -> None:
    """Changes, new files and deletions are exported; ignored files and the index are not."""
    (project / "weightload" / "__init__.py").write_text("def load(): return 2\n")
    (project / "weightload" / "new.py").write_text("x = 1\n")
    (project / "weightload" / "left.ignored").write_text("x")
    before = git(project, "status", "--porcelain")
    repository = Repository(project)
    revision = repository.worktree()
    (tmp_path / "out").mkdir()
    repository.export(revision, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out" / "weightload").iterdir()}
    assert names == {"__init__.py", "new.py"}
    assert "return 2" in (tmp_path / "out" / "weightload" / "__init__.py").read_text()
    assert git(project, "status", "--porcelain") == before
    assert revision.dirty
    assert revision.branch == "main"


def test_a_clean_working_tree_is_its_commit(project: Path) -> None:
    """Without changes the tree is HEAD's, so both arms share one installation."""
    repository = Repository(project)
    assert repository.worktree().tree == repository.revision("main").tree
    assert not repository.worktree().dirty


def test_a_dirty_checkout_needs_permission(project: Path) -> None:
    """Uncommitted changes are refused in one sentence, or allowed on request."""
    (project / "more.py").write_text("x = 1\n")
    with pytest.raises(ArmError, match="not committed"):
        choose(Repository(project), "worktree", allow_dirty=False, allow_detached=False)
    chosen = choose(Repository(project), "worktree", allow_dirty=True, allow_detached=False)
    assert chosen.dirty


def test_an_earlier_receipt_does_not_make_the_tree_dirty(project: Path) -> None:
    """Our own output is left out, a file beside it is not."""
    (project / "out").mkdir()
    receipt = project / "out" / "receipt.json"
    receipt.write_text("{}")
    repository = Repository(project)
    assert repository.worktree().dirty
    assert not repository.worktree([receipt, project.parent / "elsewhere"]).dirty
    (project / "out" / "other.py").write_text("x = 1\n")
    assert repository.worktree([receipt]).dirty
    ignored = project / "out" / "receipt.ignored"
    ignored.write_text("{}")
    assert not repository.worktree([receipt, ignored, project / "out" / "other.py"]).dirty


def test_a_detached_head_needs_permission(project: Path) -> None:
    """A detached HEAD is refused in one sentence, or allowed on request."""
    git(project, "checkout", "--quiet", "--detach")
    with pytest.raises(ArmError, match="HEAD is detached"):
        choose(Repository(project), "worktree", allow_dirty=False, allow_detached=False)
    chosen = choose(Repository(project), "worktree", allow_dirty=False, allow_detached=True)
    assert chosen.branch is None


def test_main_falls_back_to_origins_and_says_so(project: Path, tmp_path: Path) -> None:
    """A clone without a local main takes origin's, with a note."""
    git(tmp_path, "clone", "--quiet", str(project), "clone")
    clone = tmp_path / "clone"
    git(clone, "checkout", "--quiet", "--detach")
    git(clone, "branch", "--quiet", "-D", "main")
    revision = Repository(clone).revision("main")
    assert revision.note == "There is no local 'main'; origin/main was used."


@pytest.mark.parametrize("name", ["nonsense", "--upload-pack=x", "main..main", ""])
def test_an_unknown_revision_is_one_sentence(project: Path, name: str) -> None:
    """Whatever git does not resolve to one commit is refused."""
    with pytest.raises(ArmError, match="There is no revision"):
        Repository(project).revision(name)


def test_no_repository_is_one_sentence(tmp_path: Path) -> None:
    """A folder outside of any repository is refused."""
    with pytest.raises(ArmError, match="not inside a git repository"):
        Repository(tmp_path)


def test_an_arm_is_installed_once_per_tree_and_identified(project: Path, tmp_path: Path) -> None:
    """Equal trees share a folder; another tree has another folder and digest."""
    repository = Repository(project)
    first = install(repository, repository.revision("main"), tmp_path / "arms")
    again = install(repository, repository.worktree(), tmp_path / "arms")
    assert first.site == again.site
    assert first.arm.digest == again.arm.digest
    (project / "weightload" / "__init__.py").write_text("def load(): return 2\n")
    other = install(repository, repository.worktree(), tmp_path / "arms")
    assert other.site != first.site
    assert other.arm.digest != first.arm.digest


def test_what_lies_beside_the_code_cannot_be_what_runs(project: Path, tmp_path: Path) -> None:
    """Neither ignored folders, nor what somebody compiled and committed, gets into an arm."""
    package = project / "weightload"
    other = tmp_path / "other.py"
    other.write_text("def load(): return 'stale'\n")
    never = py_compile.PycInvalidationMode.UNCHECKED_HASH
    for file in (package / "__init__.py", project / "ignored" / "__init__.py"):
        compiled = Path(importlib.util.cache_from_source(str(file)))
        compiled.parent.mkdir(parents=True)
        # Python runs such a file without a look at the source.
        py_compile.compile(str(other), cfile=str(compiled), invalidation_mode=never)
    stale = project / "build" / "lib" / "weightload"
    stale.mkdir(parents=True)
    (stale / "__init__.py").write_text(other.read_text())
    (project / ".gitignore").write_text("/build/\n/ignored/\n")
    commit_all(project, "compiled files and all")
    repository = Repository(project)
    copies = Project(build=("cp", "-R", "{source}/.", "{site}"), entry="weightload:load")
    for number, how in enumerate((copies, OURS)):
        arm = install(repository, repository.worktree(), tmp_path / f"arms{number}", how)
        site = Path(arm.site or "")
        assert not (site / "build").exists()
        assert not (site / "ignored").exists()
        (compiled,) = (site / "weightload" / "__pycache__").iterdir()
        (compiled.parent / "more.pyc").write_bytes(b"x")
        code = "import weightload; print(weightload.load(), weightload.__cached__)"
        said = subprocess.run(
            [sys.executable, "-P", "-c", code],
            env={"PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert said.stdout.split() == ["1", str(compiled)]
        assert package_digest(site / "weightload") == arm.arm.digest


def test_a_build_folder_that_is_part_of_the_code_counts(project: Path, tmp_path: Path) -> None:
    """A package of that name, and what a backend takes from such a folder, is in the digest."""
    (project / "weightload" / "build").mkdir()
    (project / "weightload" / "build" / "__init__.py").write_text("x = 1\n")
    repository = Repository(project)
    first = install(repository, repository.worktree(), tmp_path / "arms")
    (project / "weightload" / "build" / "__init__.py").write_text("x = 2\n")
    second = install(repository, repository.worktree(), tmp_path / "arms")
    assert first.arm.digest != second.arm.digest


def test_a_package_that_is_not_there_is_told(project: Path, tmp_path: Path) -> None:
    """An entry point into a package that the revision lacks is refused."""
    repository = Repository(project)
    with pytest.raises(ArmError, match="installs no package 'other'"):
        install(
            repository, repository.revision("main"), tmp_path / "arms", Project(entry="other:load")
        )


def test_a_missing_build_backend_is_told(project: Path, tmp_path: Path) -> None:
    """A backend that is not installed is named as what is missing."""
    text = PROJECT.replace("hatchling.build", "no_such_backend.build")
    (project / "pyproject.toml").write_text(text)
    repository = Repository(project)
    with pytest.raises(ArmError, match="build backend is not installed"):
        install(repository, repository.worktree(), tmp_path / "arms")


def test_a_missing_pip_is_told(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pip there are no arms, and the sentence says so."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    repository = Repository(project)
    with pytest.raises(ArmError, match="install pip"):
        install(repository, repository.worktree(), tmp_path / "arms")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PROJECT.replace('version = "1"', ""), "ValueError: Field `project.version` can only be"),
        (PROJECT.replace('"weightload"', '"other"'), "ValueError: Unable to determine"),
        (PROJECT + 'requires-python = ">=3.99"', "Package 'weightload' requires a different Pyth"),
        ("[project", "TOMLDecodeError: Expected ']' at the end of a table declaration"),
        (None, "Directory 'source' is not installable. Neither 'setup.py' nor"),
    ],
)
def test_a_revision_that_does_not_build_is_told(
    project: Path, tmp_path: Path, text: str | None, said: str
) -> None:
    """One sentence: the revision, and why by the build's own words, without a temporary path."""
    if text is None:
        (project / "pyproject.toml").unlink()
    else:
        (project / "pyproject.toml").write_text(text)
    repository = Repository(project)
    with pytest.raises(ArmError, match="'worktree' cannot be installed") as caught:
        install(repository, repository.worktree(), tmp_path / "arms")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_the_digest_is_of_names_and_contents(tmp_path: Path) -> None:
    """Another name or byte changes it; a compiled cache does not."""
    tmp_path = tmp_path / "__pycache__"
    tmp_path.mkdir()
    nothing = package_digest(tmp_path)
    (tmp_path / "a.py").write_text("x")
    plain = package_digest(tmp_path)
    assert plain != nothing, "where the package lies must not matter"
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_bytes(b"y")
    assert package_digest(tmp_path) == plain
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    renamed = package_digest(tmp_path)
    (tmp_path / "b.py").write_text("y")
    assert len({plain, renamed, package_digest(tmp_path)}) == 3
