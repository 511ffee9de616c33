"""Somebody else's project: what its file says, what is built by it, and whole trials of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pytest

from fixtures.programs import PROJECTS
from fixtures.repositories import commit_all
from loadproof.errors import ArmError
from loadproof.plan.arms import Arm, InstalledArm, install
from loadproof.plan.project import FILE_NAME, OURS, Project, read_project
from loadproof.plan.revisions import Repository, Revision
from loadproof.qualify import _require_one_difference
from loadproof.report.receipt import decode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COPY = ("cp", "-R", "{source}/.", "{site}")
RIGHT = 'entry = "package.module:function"\n'


def project_of(tmp_path: Path, name: str) -> Path:
    """One of the fixtures' projects, as a repository of its own."""
    folder = tmp_path / "somebodys-project"
    shutil.copytree(PROJECTS / name, folder)
    commit_all(folder, "as it is")
    return folder


def qualify(
    project: Path, checkpoint: Path, *more: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Qualify the worktree against main in one block; return its end and its receipt, if any."""
    command = [sys.executable, "-P", "-m", "loadproof", "qualify", "--baseline=main", "--seed=7"]
    command += [f"--checkpoint={checkpoint}", "--blocks=1", "--out=out", *more]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    receipt = project / "out" / "receipt.json"
    if not receipt.exists():
        return done, {}
    decode(receipt.read_bytes())
    predicate: dict[str, Any] = json.loads(receipt.read_text("utf-8"))["predicate"]
    return done, predicate


def failures(predicate: dict[str, Any]) -> list[dict[str, Any]]:
    """The legs that have no result."""
    return [leg["outcome"] for leg in predicate["legs"] if leg["outcome"]["type"] == "failure"]


class Against(NamedTuple):
    """A trial of a project against itself."""

    project: Path
    status: int
    said: str
    predicate: dict[str, Any]


@pytest.fixture(scope="module")
def against_itself(
    tmp_path_factory: pytest.TempPathFactory, kept_checkpoint: Path
) -> Callable[[str], Against]:
    """Qualify main of one of the projects against main; the tests below look at one trial each."""

    @cache
    def tried(name: str) -> Against:
        project = project_of(tmp_path_factory.mktemp(name), name)
        # A program's routes are its own; only weightload's are known beforehand.
        route = ["--changed-route=whole-file"] if name == "command_loader" else []
        done, predicate = qualify(project, kept_checkpoint, "--candidate=main", *route)
        return Against(project, done.returncode, done.stderr, predicate)

    return tried


@pytest.mark.parametrize("name", ["command_loader", "entry_loader"])
def test_a_project_against_itself(against_itself: Callable[[str], Against], name: str) -> None:
    """Its weights are equal, every control is blamed, every timing leg is audited."""
    _, status, said, predicate = against_itself(name)
    assert status == 3, said
    assert failures(predicate) == []
    assert predicate["conclusion"]["weights"] == "equal"
    assert [each["found"] for each in predicate["controls"]] == [True] * 4
    assert predicate["device_class"] == "rehearsal"
    timed = [leg["outcome"] for leg in predicate["legs"] if leg["purpose"] == "time"]
    assert len(timed) == 8
    assert {leg["audited_bytes"] for leg in timed} == {predicate["checkpoint_bytes"]}
    arms = predicate["arms"]
    assert arms["A"] == arms["B"]
    assert {leg["digest"] for leg in timed} == {arms["A"]["digest"]}
    # One block is too few by design; nothing else may be wrong but the machine's noise.
    codes = {each["code"] for each in predicate["conclusion"]["reasons"]}
    assert "blocks-too-few" in codes
    assert codes <= {"blocks-too-few", "delay-missed", "same-code-differs"}


def test_what_a_receipt_says_of_a_program(
    against_itself: Callable[[str], Against], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its command and what it says of itself are recorded; what was not looked at is listed."""
    project, _, _, predicate = against_itself("command_loader")
    assert predicate["conclusion"]["coverage"]["fraction"] == 1.0
    arm = predicate["arms"]["B"]
    assert arm["entry"] is None
    assert arm["command"] == ["{python}", "{site}/bin/loader.py"]
    assert arm["options"] == {"read_bytes": 1 << 20}
    identity = predicate["legs"][0]["outcome"]["identity"]
    assert (identity["name"], identity["version"]) == ("plain", "1")
    not_run = {each["what"] for each in predicate["not_run"]}
    assert "a destination filled with a pattern before every hash leg" in not_run
    assert "races, and copies off the device while it was timed" in not_run
    assert predicate["device"]["name"] == "shared memory"
    report = (project / "out" / "report.md").read_text("utf-8")
    assert "`{python} {site}/bin/loader.py`" in report
    assert str(tmp_path_factory.getbasetemp()) not in report


def test_the_version_of_what_was_installed_is_recorded(
    against_itself: Callable[[str], Against],
) -> None:
    """A distribution in an arm's folder is named with its version."""
    predicate = against_itself("entry_loader").predicate
    assert predicate["arms"]["B"]["versions"] == {"plainload": "2.3"}
    assert predicate["arms"]["B"]["entry"] == "plainload.whole:bring"


@pytest.mark.parametrize(
    ("name", "file", "old", "new"),
    [
        (
            "command_loader",
            "bin/loader.py",
            "    return file, view\n",
            "    view[-1] ^= 8\n    return file, view\n",
        ),
        (
            "entry_loader",
            "plainload/whole.py",
            "            piece = content[at : min(at + step, end)]\n",
            """            piece = bytearray(content[at : min(at + step, end)])
            piece[-1] ^= 8 * (name == "head")
            piece = bytes(piece)
""",
        ),
    ],
)
def test_a_wrong_byte_is_blamed_on_its_tensor(
    tmp_path: Path, checkpoint: Path, name: str, file: str, old: str, new: str
) -> None:
    """One bit in the last byte of the file: exit status 4, and the tensor it belongs to."""
    project = project_of(tmp_path, name)
    path = project / file
    text = path.read_text("utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    done, predicate = qualify(project, checkpoint, "--allow-dirty")
    assert done.returncode == 4, done.stderr
    (wrong,) = next(each for each in predicate["weights"] if each["arm"] == "B")["differences"]
    assert (wrong["tensor"], wrong["kind"]) == ("head", "bytes")
    assert wrong["mismatch"]["first_byte"] == 33 * 5 * 8 - 1
    assert wrong["mismatch"]["content"] == "one-bit"
    assert not any(each["differences"] for each in predicate["weights"] if each["arm"] == "A")
    assert "'head'" in done.stdout


def test_a_program_that_breaks_the_protocol_is_inconclusive(
    tmp_path: Path, checkpoint: Path
) -> None:
    """The trial ends with the code of the breach and exit status 3."""
    project = project_of(tmp_path, "command_loader")
    path = project / "bin" / "loader.py"
    path.write_text(path.read_text("utf-8").replace('say(type="bye")', 'print("bye", flush=True)'))
    done, predicate = qualify(project, checkpoint, "--allow-dirty")
    assert done.returncode == 3
    assert [each["code"] for each in failures(predicate)] == ["protocol-line"]
    assert "protocol-line" in done.stdout


def test_options_of_the_command_line_go_before_the_files(tmp_path: Path, checkpoint: Path) -> None:
    """What a person says for an arm holds for that arm; code and options may not both differ."""
    project = project_of(tmp_path, "command_loader")
    _, predicate = qualify(project, checkpoint, "--candidate=main?read_bytes=4096")
    assert predicate["arms"]["A"]["options"] == {"read_bytes": 1 << 20}
    assert predicate["arms"]["B"]["options"] == {"read_bytes": 4096}
    shutil.rmtree(project / "out")
    (project / "bin" / "more").write_text("x")
    spoken = "--candidate=worktree?read_bytes=4096"
    done, _ = qualify(project, checkpoint, spoken, "--allow-dirty")
    assert done.returncode == 2
    assert "differ in code and in options" in done.stderr


def test_a_file_that_is_named_goes_before_the_projects_own(
    tmp_path: Path, checkpoint: Path
) -> None:
    """--project-file takes another; a wrong one is one sentence and exit status 2."""
    project = project_of(tmp_path, "command_loader")
    other = tmp_path / "other.toml"
    other.write_text('comand = ["x"]\n')
    done, _ = qualify(project, checkpoint, f"--project-file={other}")
    assert done.returncode == 2
    assert "unknown field `comand`" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_project_that_says_nothing_is_taken_for_ours(tmp_path: Path) -> None:
    """Without a file everything is as it was; a file that is named has to be there."""
    assert read_project(tmp_path) == OURS
    with pytest.raises(ArmError, match="cannot be read"):
        read_project(tmp_path, tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("entry = [", "is not right"),
        ("", "give either 'entry'"),
        (RIGHT + 'command = ["{site}/x"]', "give either 'entry'"),
        (RIGHT + "more = 1", "unknown field `more`"),
        ('entry = "package"', "has to be package.module:function"),
        ('entry = "package.module:function()"', "has to be package.module:function"),
        ("command = []", "length >= 1"),
        ('command = ["{site}/x", ""]', "length >= 1"),
        ('command = "{site}/x"', "Expected `array | null`"),
        ('command = ["/usr/bin/loader"]', "names nothing in {site}"),
        ('command = ["{site}/x", "{source}"]', "no place {source}"),
        (RIGHT + 'build = ["make"]', "does not name {site}"),
        (RIGHT + 'build = ["make", "{site}", "{prefix}"]', "no place {prefix}"),
        (RIGHT + 'options = "fast"', "Expected `object`"),
    ],
)
def test_a_file_that_is_wrong_is_one_sentence(tmp_path: Path, text: str, told: str) -> None:
    """Whatever is wrong with it is named, with the file."""
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ArmError, match=FILE_NAME) as caught:
        read_project(tmp_path)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def built(tmp_path: Path, **words: tuple[str, ...]) -> InstalledArm:
    """Build a repository of one program, ``run``, by a project's words."""
    folder = tmp_path / "built"
    folder.mkdir(exist_ok=True)
    (folder / "run").write_text("#!/bin/sh\n")
    (folder / "run").chmod(0o755)
    commit_all(folder, "one")
    repository = Repository(folder)
    right = Project(build=COPY, command=("{site}/run",))
    project = msgspec.structs.replace(right, **words)
    return install(repository, repository.revision("main"), tmp_path / "arms", project)


def test_a_program_is_built_and_named(tmp_path: Path) -> None:
    """Its words are filled in only where a leg starts it."""
    arm = built(tmp_path)
    assert arm.arm.command == ("{site}/run",)
    assert arm.command() == (f"{arm.site}/run",)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"command": ("{site}/other",)}, "builds no program '{site}/other'"),
        ({"build": ("no-such-tool", "{site}")}, "'no-such-tool' cannot be run: No such file"),
        ({"build": ("ls", "{site}/none")}, "cannot be installed: "),
        ({"build": ("ln", "-s", "/bin/sh", "{site}/run")}, "leads out of {site}"),
        (
            {"build": ("ln", "-s", "/bin", "{site}/run"), "command": ("{python}", "{site}")},
            "leads",
        ),
    ],
)
def test_a_build_that_makes_no_arm_is_one_sentence(
    tmp_path: Path, words: dict[str, tuple[str, ...]], told: str
) -> None:
    """A missing program, a failing build, and code that no digest would cover."""
    with pytest.raises(ArmError) as caught:
        built(tmp_path, **words)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_where_pip_installed_from_is_no_part_of_the_code(tmp_path: Path) -> None:
    """One tree that is installed twice, at different places, has one digest."""
    folder = project_of(tmp_path, "entry_loader")
    repository = Repository(folder)
    project = Project(command=("{python}", "-m", "{site}"))
    arms = [
        install(repository, repository.revision("main"), tmp_path / place, project).arm
        for place in ("here", "elsewhere")
    ]
    assert arms[0].digest == arms[1].digest


REVISION = Revision(spoken="main", commit="c", tree="t", branch=None, dirty=False)
BASELINE = Arm(revision=REVISION, entry="a:b", digest="sha256:1")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"digest": "sha256:2", "options": {"n": 1}}, "code and in options"),
        ({"digest": "sha256:2", "entry": "a:c"}, "code and in entry point"),
        ({"entry": None, "command": ("{site}/x",)}, "entry point and in command"),
        ({"options": {"n": 1}, "entry": "a:c"}, "options and in entry point"),
    ],
)
def test_more_than_one_difference_is_refused(changes: dict[str, Any], told: str) -> None:
    """No verdict could say which of them it was."""
    with pytest.raises(ArmError, match=told):
        _require_one_difference(BASELINE, msgspec.structs.replace(BASELINE, **changes))


@pytest.mark.parametrize("changes", [{}, {"digest": "sha256:2"}, {"options": {"n": 1}}])
def test_one_difference_is_what_is_compared(changes: dict[str, Any]) -> None:
    """Nothing, the code or the options."""
    _require_one_difference(BASELINE, msgspec.structs.replace(BASELINE, **changes))
