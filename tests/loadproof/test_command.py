"""Loaders that are programs: whatever one does, there is one outcome and nothing left running."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import os
import select
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest

from fixtures.legs import HARNESS, legs_left, run
from fixtures.processes import has_ended, written
from fixtures.programs import program_request, reference_request
from loadproof.measure.command import CommandError, CommandLoader
from loadproof.measure.device import Device
from loadproof.measure.digest import differences
from loadproof.measure.ground_truth import file_manifest, tensor_places
from loadproof.measure.handed_out import timed_load
from loadproof.measure.messages import (
    CopyChunk,
    Failure,
    FlipBit,
    Plant,
    Request,
    Result,
    SwapChunks,
    Truth,
)
from loadproof.measure.protocol import Load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Program = Callable[..., Request]

pytestmark = pytest.mark.usefixtures("kept_templates")

# Speaks rightly, of one tensor of eight zero bytes in shared memory; each test changes a piece.
PROGRAM = """
import io, json, os, sys, time

MEMORY = {"kind": "shared-memory", "path": "", "nbytes": 8}
TENSOR = {"name": "a", "dtype": "I8", "shape": [8], "nbytes": 8, "memory": 0, "offset": 0}


def say(type, **more):
    sys.stdout.write(json.dumps({"type": type, **more}) + "\\n")
    sys.stdout.flush()


def all_at_once():
    os.write(1, sys.stdout.getvalue().encode())
    sys.stdout = sys.__stdout__


def hear():
    return json.loads(sys.stdin.readline())


def ready(protocol=1, **more):
    say("ready", protocol=protocol, loader={"name": "x", "version": "1"}, **more)


def loaded(areas=(), **changes):
    say("loaded", memory=[{**MEMORY, **each} for each in areas or [{}]],
        tensors=[{**TENSOR, **changes}])


def shared(nbytes=8):
    file = os.memfd_create("x")
    os.truncate(file, nbytes)
    MEMORY["path"] = f"/proc/{os.getpid()}/fd/{file}"
    return file


shared()
HELLO
LOAD
RELEASE
"""
PIECES = {
    "HELLO": "hear(); ready()",
    "LOAD": "hear(); loaded()",
    "RELEASE": "hear(); say('bye')",
}


@pytest.fixture
def program(tmp_path: Path, checkpoint: Path) -> Program:
    """Make a request for a leg whose loader is PROGRAM with some pieces changed."""

    def make(*, pieces: dict[str, str] | None = None, **changes: object) -> Request:
        site = tmp_path / "site"
        site.mkdir()
        text = PROGRAM
        for name, piece in (PIECES | (pieces or {})).items():
            text = text.replace(name, textwrap.dedent(piece))
        (site / "loader.py").write_text(text)
        return msgspec.structs.replace(program_request(site, checkpoint), **changes)

    return make


@pytest.fixture
def reference(tmp_path: Path, checkpoint: Path) -> Program:
    """Make a request for a leg of the reference loader."""

    def make(**changes: object) -> Request:
        wanted = reference_request(tmp_path / "site", checkpoint)
        return msgspec.structs.replace(wanted, **changes)

    return make


@pytest.fixture
def in_shared_memory() -> Iterator[Path]:
    """A folder in shared memory."""
    folder = Path("/dev/shm", f"loadproof-test-{os.getpid()}")  # noqa: S108 - it has to be there
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def outcome(wanted: Request, timeout_s: float = 60.0) -> Result | Failure:
    """Run a leg and check that none of its processes is left."""
    ended = run(wanted, timeout_s)
    assert legs_left() == []
    return ended.outcome


def failure(wanted: Request) -> Failure:
    """Run a leg that has to fail."""
    found = outcome(wanted)
    assert isinstance(found, Failure), found
    return found


def test_the_reference_loads_the_files_bytes(reference: Program, checkpoint: Path) -> None:
    """A program that imports nothing of ours is hashed like any loader."""
    found = outcome(reference(kind="hash"))
    assert isinstance(found, Result), found
    assert found.manifest == file_manifest(tensor_places(checkpoint))
    assert found.identity is not None
    assert found.identity.name == "plain"
    assert found.device.fake
    assert found.device_to_host_copies is None
    assert found.report == {"route_bytes": {"whole-file": found.nbytes}}


def test_a_timing_leg_is_audited(reference: Program, checkpoint: Path) -> None:
    """What was timed is read back from the program's memory after the clock."""
    truth = file_manifest(tensor_places(checkpoint))
    found = outcome(reference(audit=truth, audit_bytes=truth.nbytes()))
    assert isinstance(found, Result), found
    assert (found.audited_bytes, found.audit_wrong) == (truth.nbytes(), ())


@pytest.mark.parametrize(
    ("plant", "byte"),
    [
        (FlipBit("head", 700, 3), 700),
        (SwapChunks("head", 0, 100, 50), 0),
        (CopyChunk("embed", 8, "head", 16, 64), 16),
    ],
)
def test_a_planted_fault_is_blamed(
    reference: Program, checkpoint: Path, plant: Plant, byte: int
) -> None:
    """Each kind of fault is planted in the program's memory and found where it is."""
    truth = file_manifest(tensor_places(checkpoint))
    found = outcome(reference(kind="hash", plant=plant, truth=Truth(str(checkpoint), truth)))
    assert isinstance(found, Result), found
    assert found.manifest is not None
    (wrong,) = differences(truth, found.manifest, found.mismatches)
    assert (wrong.tensor, wrong.kind) == ("head", "bytes")
    assert wrong.mismatch is not None
    assert wrong.mismatch.first_byte == byte
    assert found.poisoned_bytes == 0


def test_a_program_that_speaks_rightly_has_a_result(program: Program) -> None:
    """What every test below changes a piece of does work as it stands."""
    found = outcome(program())
    assert isinstance(found, Result), found
    assert (found.tensors, found.nbytes) == (1, 8)


def test_the_clock_begins_with_the_load_and_ends_with_its_answer(program: Program) -> None:
    """A pause before ready is not timed, one before loaded is."""
    found = outcome(
        program(
            pieces={
                "HELLO": "hear(); time.sleep(1.0); ready()",
                "LOAD": "hear(); time.sleep(0.2); loaded()",
            }
        )
    )
    assert isinstance(found, Result), found
    assert 0.2 <= found.elapsed_s < 1.0
    assert found.phases_s["ready"] >= 1.0


def test_a_program_learns_what_to_load_only_when_the_clock_runs(
    program: Program, checkpoint: Path
) -> None:
    """Nothing of the checkpoint is named before; the rest is as documented."""
    told = """
        first = sys.stdin.readline()
        assert json.loads(first) == {{"type": "hello", "protocol": 1, "device": "shared-memory"}}
        ready()
        second = json.loads(sys.stdin.readline())
        assert second == {{"type": "load", "checkpoint": {checkpoint!r}, "options": {{"n": 4}},
                          "deadline_s": 7.0}}, second
        """
    pieces = {"HELLO": told.format(checkpoint=str(checkpoint)), "LOAD": "loaded()"}
    found = outcome(program(pieces=pieces, options={"n": 4}, deadline_s=7.0))
    assert isinstance(found, Result), found


@pytest.mark.parametrize(
    "starts",
    [
        "import threading; threading.Thread(target=work).start()",
        "os.fork() or (work(), os._exit(0))",
    ],
    ids=["a thread", "a child"],
)
def test_a_program_that_works_on_after_its_answer_is_found(
    program: Program, checkpoint: Path, starts: str
) -> None:
    """Its processes are halted with the clock, so what they would do later is not there."""
    truth = file_manifest([each for each in tensor_places(checkpoint) if each.name == "head"])
    later = f"""
        path = json.loads(sys.stdin.readline())["checkpoint"] + "/model.safetensors"
        content = open(path, "rb").read()
        start = 8 + int.from_bytes(content[:8], "little")
        head = json.loads(content[8:start])["head"]
        file = shared(1320)

        def work():
            time.sleep(0.2)
            os.pwrite(file, content[start + head["data_offsets"][0]:][:1320], 0)

        {starts}
        time.sleep(LONG)
        loaded([{{"nbytes": 1320}}], name="head", dtype="I64", shape=[33, 5], nbytes=1320)
        """
    # The harness's own pause after the answer: long enough for the work, if it went on.
    wanted = {"delay_fraction": 20.0, "audit": truth}
    early = outcome(program(pieces={"LOAD": later.replace("LONG", "0.05")}, **wanted))
    assert isinstance(early, Result), early
    assert early.elapsed_s > 0.5
    assert early.audit_wrong == ("head",)


@pytest.mark.parametrize(
    ("pieces", "code", "told"),
    [
        ({"HELLO": "hear(); print('hallo', flush=True)"}, "protocol-line", "standard error"),
        ({"HELLO": "hear(); say('hi')"}, "protocol-line", "'hi'"),
        ({"HELLO": "hear(); ready(more=1)"}, "protocol-line", "more"),
        ({"HELLO": "hear(); os.write(1, b'\\xff\\n')"}, "protocol-line", "no answer to 'hello'"),
        ({"HELLO": "hear(); say('ready', protocol=1)"}, "protocol-line", "loader"),
        ({"HELLO": "hear(); os.write(1, b'x' * 70_000_000)"}, "protocol-line", "longer than"),
        ({"HELLO": "hear(); ready(protocol=2)"}, "protocol-version", "version 2"),
        ({"HELLO": "hear(); loaded()"}, "protocol-order", "'loaded', and 'ready' was its turn"),
        (
            {"HELLO": "sys.stdout = io.StringIO(); hear(); ready(); loaded(); all_at_once()"},
            "protocol-order",
            "'loaded' before it was asked",
        ),
        ({"LOAD": "hear(); say('bye')"}, "protocol-order", "'bye', and 'loaded'"),
        ({"RELEASE": "hear(); loaded()"}, "protocol-order", "'loaded', and 'bye'"),
        ({"HELLO": "hear(); say('error', message='no luck')"}, "loader-raised", "no luck"),
        ({"LOAD": "hear(); say('error', message='no luck')"}, "loader-raised", "no luck"),
        ({"HELLO": "sys.exit(0)"}, "loader-ended", "status 0 at 'hello'"),
        ({"HELLO": "os.close(0); ready(); sys.exit(0)"}, "loader-ended", "at 'load'"),
        ({"LOAD": "hear(); sys.exit(3)"}, "loader-ended", "status 3 at 'load'"),
        ({"LOAD": "hear(); os.abort()"}, "loader-ended", "SIGABRT at 'load'"),
        ({"LOAD": "hear(); os.kill(os.getpid(), 9)"}, "loader-ended", "SIGKILL at 'load'"),
        ({"LOAD": "hear(); os.write(1, b'{'); sys.exit(0)"}, "loader-ended", "at 'load'"),
        ({"RELEASE": "hear(); sys.exit(0)"}, "loader-ended", "status 0 at 'release'"),
        ({"RELEASE": "hear(); say('bye'); sys.exit(5)"}, "loader-ended", "status 5 at 'release'"),
    ],
)
def test_a_breach_of_the_protocol_is_a_failure_with_a_code(
    program: Program, pieces: dict[str, str], code: str, told: str
) -> None:
    """Lines that are none, answers out of turn and early ends are told apart, in one sentence."""
    found = failure(program(pieces=pieces))
    assert found.code == code
    assert told in found.sentence
    assert "\n" not in found.sentence


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ("dtype='INT8'", "no dtype of safetensors"),
        ("shape=[7]", "has not the length"),
        ("nbytes=4", "has not the length"),
        ("memory=1", "memory 1, which is not there"),
        ("offset=1", "past the end"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(program: Program, changes: str, told: str) -> None:
    """Lengths, places and names that contradict each other are a failure of the loader."""
    found = failure(program(pieces={"LOAD": f"hear(); loaded({changes})"}))
    assert found.code == "protocol-tensors"
    assert told in found.sentence


def test_a_tensor_that_is_there_twice_is_refused(program: Program) -> None:
    """One name is one tensor."""
    twice = "hear(); say('loaded', memory=[MEMORY], tensors=[TENSOR, TENSOR])"
    found = failure(program(pieces={"LOAD": twice}))
    assert (found.code, "'a' is there twice" in found.sentence) == ("protocol-tensors", True)


@pytest.mark.parametrize("changes", ["shape=[-8]", "offset=-1", "memory=-1", "shape=[8.0]"])
def test_a_number_below_zero_or_no_number_is_no_message(program: Program, changes: str) -> None:
    """Such a line is refused by its type."""
    assert failure(program(pieces={"LOAD": f"hear(); loaded({changes})"})).code == "protocol-line"


@pytest.mark.parametrize(
    ("load", "told"),
    [
        ("loaded([{'path': '/nonsense'}])", "cannot be opened"),
        ("loaded([{'path': sys.argv[0]}])", "is not in shared memory"),
        ("os.mkfifo(sys.argv[0] + '.p'); loaded([{'path': sys.argv[0] + '.p'}])", "not in shared"),
        ("loaded([{'nbytes': 9}])", "shorter than the loader says"),
        ("say('loaded', memory=[CUDA], tensors=[TENSOR])", "there is no GPU here"),
    ],
)
def test_memory_that_is_not_shared_memory_is_refused(
    program: Program, load: str, told: str
) -> None:
    """A file, a pipe, a short or an absent one, and a GPU's handle where there is none."""
    handle = "CUDA = {'kind': 'cuda-ipc', 'handle': 'A' * 85 + 'A==', 'nbytes': 8}"
    found = failure(program(pieces={"LOAD": f"hear(); {handle}; {load}"}))
    assert found.code == "protocol-memory"
    assert told in found.sentence


def test_the_checkpoint_itself_is_not_written_to(
    program: Program, checkpoint: Path, in_shared_memory: Path
) -> None:
    """A program that hands out the checkpoint's own file is refused, in shared memory too."""
    moved = in_shared_memory / "checkpoint"
    shutil.copytree(checkpoint, moved)
    before = (moved / "model.safetensors").read_bytes()
    itself = "path = hear()['checkpoint'] + '/model.safetensors'; loaded([{'path': path}])"
    wanted = program(pieces={"LOAD": itself}, checkpoint=str(moved), kind="hash")
    found = failure(msgspec.structs.replace(wanted, plant=FlipBit("a", 0, 0)))
    assert (found.code, "checkpoint's own" in found.sentence) == ("protocol-memory", True)
    assert (moved / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("piece", ["HELLO", "LOAD", "RELEASE"])
def test_a_program_that_hangs_is_killed_with_its_children(
    program: Program, tmp_path: Path, piece: str
) -> None:
    """After the time-out the whole group is gone, whatever step it was at."""
    path = str(tmp_path / "pid")
    hangs = f"""
        hear()
        import subprocess
        child = subprocess.Popen(["sleep", "1000"])
        with open({path + ".part"!r}, "w") as file:
            file.write(str(child.pid))
        os.rename({path + ".part"!r}, {path!r})
        time.sleep(1000)
        """
    found = outcome(program(pieces={piece: hangs}), timeout_s=3.0)
    assert found == Failure("leg-timeout", "It did not end within 3 s and was killed.")
    assert has_ended(int(written(tmp_path / "pid")))


def test_a_program_that_closes_its_output_and_stays_is_killed(program: Program) -> None:
    """The end of its lines is not its end."""
    found = outcome(program(pieces={"LOAD": "os.close(1); time.sleep(1000)"}), timeout_s=3.0)
    assert found == Failure("leg-timeout", "It did not end within 3 s and was killed.")


def test_a_program_that_cannot_be_started_is_told(program: Program) -> None:
    """A file that is no program is a failure of its leg."""
    wanted = program()
    script = Path(wanted.site or "", "loader.py")
    script.chmod(0o755)
    found = failure(msgspec.structs.replace(wanted, command=(str(script),)))
    assert (found.code, "cannot be started" in found.sentence) == ("loader-ended", True)


def test_code_that_changed_after_the_build_is_refused(program: Program) -> None:
    """All of the site is the loader: another file in it is another loader."""
    wanted = program()
    Path(wanted.site or "", "more.bin").write_bytes(b"x")
    assert failure(wanted).code == "wrong-code"


@pytest.mark.parametrize("device", ["fake:gb10", "gpu", "cuda:99"])
def test_a_device_that_a_program_cannot_have_is_told(program: Program, device: str) -> None:
    """A profile of the fake, and what is not here, end before the load."""
    assert failure(program(device=device)).code == "no-device"


def test_the_memory_is_the_programs(program: Program) -> None:
    """What is watched is the process that loads: its peak and its high-water mark."""
    ended = run(
        program(pieces={"LOAD": "hear(); kept = b'x' * (200 << 20); time.sleep(0.3); loaded()"}),
        60.0,
    )
    assert isinstance(ended.outcome, Result)
    assert (ended.outcome.vm_hwm_bytes or 0) > 200 << 20
    assert (ended.memory.process_anonymous_bytes or 0) > 200 << 20


class Exports:
    """The fake's driver, and the calls of CUDA IPC that it has not: one handle, one allocation."""

    HANDLE = bytes(range(192, 256))

    def __init__(self, fake: Any) -> None:
        self._fake = fake
        self.address = int(fake.cuMemAlloc(16)[1])
        self.closed: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fake, name)

    class CUipcMemHandle:  # noqa: D106 - the driver's own name
        def __init__(self) -> None:
            self._content = ctypes.create_string_buffer(64)

        def getPtr(self) -> int:  # noqa: D102, N802 - the driver's own name
            return ctypes.addressof(self._content)

    def cuIpcOpenMemHandle(self, handle: CUipcMemHandle, flags: int) -> tuple[int, int]:  # noqa: D102, N802
        sent = ctypes.string_at(handle.getPtr(), 64) == self.HANDLE
        return (0, self.address) if sent and flags == 1 else (400, 0)

    def cuIpcCloseMemHandle(self, address: int) -> tuple[int]:  # noqa: D102, N802
        self.closed.append(address)
        return (0,)


@pytest.mark.parametrize("handle", [Exports.HANDLE, bytes(64)], ids=["right", "wrong"])
def test_a_gpus_handle_is_opened_by_its_bytes_and_let_go(program: Program, handle: bytes) -> None:
    """All but the driver's own doing: the bytes that were sent, offsets, the refusal, the end."""
    memory = {"kind": "cuda-ipc", "handle": base64.b64encode(handle).decode(), "nbytes": 16}
    wanted = program(pieces={"LOAD": f"hear(); MEMORY = {memory}; loaded(offset=4)"})
    device = Device("fake")
    exports = Exports(device._cu)
    device._cu = exports
    loader = CommandLoader(wanted.command or ())
    try:
        loader.greet("cuda:0")
        load = Load(checkpoint=wanted.checkpoint, options={}, deadline_s=1.0)
        if handle != Exports.HANDLE:
            with pytest.raises(CommandError, match="cuIpcOpenMemHandle returned 400"):
                timed_load(loader, device, load, 0.0)
            return
        handed, _ = timed_load(loader, device, load, 0.0)
        assert handed["a"].data_ptr() == exports.address + 4
        device.write(exports.address, b"0123456789abcdef")
        (found,) = device.manifest(handed).tensors
        assert found.sha256 == hashlib.sha256(b"456789ab").hexdigest()
        handed.close()
        assert exports.closed == [exports.address]
    finally:
        loader._process.kill()
        loader._process.communicate()
        device.close()


def test_an_answer_that_is_there_before_the_load_is_refused(
    program: Program, tmp_path: Path
) -> None:
    """However late it is seen, one that was sent before the clock ran is not timed."""
    greeted = tmp_path / "greeted"
    waits = f"""
        hear(); ready()
        while not os.path.exists({str(greeted)!r}): time.sleep(0.01)
        loaded()
        """
    wanted = program(pieces={"HELLO": waits})
    loader = CommandLoader(wanted.command or ())
    try:
        loader.greet("shared-memory")
        greeted.touch()
        assert select.select([loader._answers], [], [], 60.0)[0]
        with pytest.raises(CommandError, match="before it was asked") as caught:
            loader.timed_load(Load(checkpoint="x", options={}, deadline_s=1.0), 0.0)
    finally:
        loader._process.kill()
        loader._process.communicate()
    assert caught.value.code == "protocol-order"


# Starts a program that, between its start and its becoming one, waits to open a pipe.
_STARTS_ANOTHER = """
import os, sys
pid = os.posix_spawn("/bin/cat", ["cat"], {}, file_actions=[
    (os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0),
])
os.waitpid(pid, 0)
"""


def _in_state(pid: int, *states: str) -> psutil.Process:
    """Wait until a process is in one of these states."""
    process, deadline = psutil.Process(pid), time.monotonic() + 30
    while process.status() not in states:
        assert time.monotonic() < deadline, process.status()
    return process


def test_a_program_that_is_starting_another_is_halted(tmp_path: Path) -> None:
    """It stops once the other has become a program, for which both are let go on."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    loader = CommandLoader([sys.executable, "-c", _STARTS_ANOTHER, str(pipe)])
    parent = _in_state(loader.pid, psutil.STATUS_DISK_SLEEP)
    (child,) = parent.children()
    try:
        halting = threading.Thread(target=loader._halt)
        halting.start()
        _in_state(child.pid, psutil.STATUS_STOPPED)
        opened = os.open(pipe, os.O_RDWR)
        halting.join(30)
        assert not halting.is_alive()
        assert {parent.status(), child.status()} == {psutil.STATUS_STOPPED}
        assert child.name() == "cat"
        os.close(opened)
    finally:
        child.kill()
        loader._process.kill()
        loader._process.communicate()


def test_a_killed_harness_leaves_no_program(program: Program, tmp_path: Path) -> None:
    """SIGKILL to the harness ends its leg, and the leg's program with it."""
    path = str(tmp_path / "pid")
    tells = f"""
        with open({path + ".part"!r}, "w") as file:
            file.write(str(os.getpid()))
        os.rename({path + ".part"!r}, {path!r})
        time.sleep(1000)
        """
    wanted = msgspec.json.encode(program(pieces={"LOAD": tells}))
    with subprocess.Popen([sys.executable, "-c", HARNESS], stdin=subprocess.PIPE) as harness:
        try:
            assert harness.stdin is not None
            with harness.stdin:
                harness.stdin.write(wanted)
            loader = int(written(tmp_path / "pid"))
        finally:
            harness.kill()
    assert has_ended(loader)
