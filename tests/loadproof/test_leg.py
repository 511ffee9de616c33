"""Legs: however the loader behaves, there is one outcome and nothing left running."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest

from fixtures.legs import HARNESS, legs_left, run
from fixtures.processes import TELL_AND_HANG, has_ended, written
from loadproof.measure.digest import differences
from loadproof.measure.ground_truth import file_manifest, tensor_places
from loadproof.measure.messages import Failure, FlipBit, Request, Result

if TYPE_CHECKING:
    from collections.abc import Callable

    Stub = Callable[..., Request]

pytestmark = pytest.mark.usefixtures("kept_templates")

# Loads for real, through the loader of this repository.
REAL = """
    from weightload import load as _load

    def load(*arguments, **options):
        return _load(*arguments, **options)
    """
LAZY = """
    from weightload import load as _load

    class Tensor:
        def __init__(self, whole, name, like):
            self.whole, self.name = whole, name
            self.nbytes, self.dtype, self.shape = like.nbytes, like.dtype, like.shape

        def data_ptr(self):
            return self.whole()[self.name].data_ptr()

    def load(*arguments, **options):
        loaded = None

        def whole():
            nonlocal loaded
            loaded = loaded or _load(*arguments, **options)
            return loaded

        with _load(*arguments, **options) as seen:
            names = {name: Tensor(whole, name, like) for name, like in seen.items()}
        real_close = lambda: loaded and loaded.close()
        return type("Lazy", (dict,), {"close": lambda self: real_close()})(names)
    """
# Gives all tensors out at once, and loads them in a thread that ends ``{seconds}`` s later.
EARLY = """
    import threading, time
    from weightload import load as _load

    def load(*arguments, driver, **options):
        loaded = _load(*arguments, driver=driver, **options)
        thread = threading.Thread(target=time.sleep, args=({seconds},))
        thread.start()
        return loaded
    """
TWO_FACED = """
    import sys
    from weightload import load as _load

    def load(*arguments, driver, **options):
        loaded = _load(*arguments, driver=driver, **options)
        if sys._getframe(1).f_locals["request"].kind == "time":
            for tensor in loaded.values():
                driver.cuMemsetD8(tensor.data_ptr(), 0, tensor.nbytes)
            driver.cuCtxSynchronize()
        return loaded
    """


def outcome(request: Request, timeout_s: float = 60.0) -> Result | Failure:
    """Run a leg and check that none of its processes is left."""
    ended = run(request, timeout_s)
    assert legs_left() == []
    return ended.outcome


def test_a_timing_leg_reads_nothing_back(stub: Stub) -> None:
    """It delivers every byte, and makes no copy from device to host while it is timed."""
    found = outcome(stub(REAL))
    assert isinstance(found, Result), found
    assert found.tensors == 5
    assert found.nbytes == 64 * 32 * 2 + 28 + 4 + 33 * 5 * 8
    assert found.device_to_host_copies == 0
    assert found.manifest is None
    assert 0 < found.elapsed_s < 30
    assert found.device.fake
    assert found.hazards == ()


@pytest.mark.parametrize("call", ["cuMemcpyDtoH", "cuMemcpy"])
def test_a_loader_that_reads_back_is_counted(stub: Stub, call: str) -> None:
    """A copy off the device inside the load is seen, by its own call or by the general one."""
    source = f"""
        from weightload import load as _load

        def load(*arguments, driver, **options):
            loaded = _load(*arguments, driver=driver, **options)
            _, pinned = driver.cuMemHostAlloc(64, 0)
            driver.{call}(pinned, loaded["head"].data_ptr(), 64)
            driver.cuMemFreeHost(pinned)
            return loaded
        """
    found = outcome(stub(source))
    assert isinstance(found, Result), found
    assert found.device_to_host_copies == 1


def test_a_hash_leg_finds_the_files_bytes(stub: Stub, checkpoint: Path) -> None:
    """Device bytes, read back, are those of an independent read of the files."""
    found = outcome(stub(REAL, kind="hash"))
    assert isinstance(found, Result), found
    assert found.manifest == file_manifest(tensor_places(checkpoint))


def test_a_timing_leg_is_audited_after_its_clock(stub: Stub, checkpoint: Path) -> None:
    """What was timed is read back afterwards; nothing was copied off the device before."""
    truth = file_manifest(tensor_places(checkpoint))
    found = outcome(stub(REAL, audit=truth, audit_bytes=truth.nbytes()))
    assert isinstance(found, Result), found
    assert found.audited_bytes == truth.nbytes()
    assert found.audit_wrong == ()
    assert found.device_to_host_copies == 0


def test_a_loader_that_is_right_only_where_it_is_hashed(stub: Stub, checkpoint: Path) -> None:
    """A loader that tells timing from hashing and spares itself the bytes is found out."""
    truth = file_manifest(tensor_places(checkpoint))
    found = outcome(stub(TWO_FACED, audit=truth, audit_bytes=truth.nbytes()))
    assert isinstance(found, Result), found
    assert found.audit_wrong


def test_what_is_loaded_when_it_is_asked_for_is_timed(stub: Stub, checkpoint: Path) -> None:
    """Lazy tensors are asked for their addresses inside the timed part."""
    truth = file_manifest(tensor_places(checkpoint))
    found = outcome(stub(LAZY, audit=truth, audit_bytes=truth.nbytes(), delay_fraction=0.0))
    assert isinstance(found, Result), found
    assert found.audit_wrong == ()
    assert found.device_taken_bytes
    assert found.device_taken_bytes >= truth.nbytes()


def test_the_clock_is_the_harnesss_own(stub: Stub) -> None:
    """A loader that puts another clock into the time module does not change its time."""
    source = """
        import time
        time.perf_counter = lambda: 0.0
        time.sleep = lambda seconds: None
        from weightload import load as _load

        def load(*arguments, **options):
            return _load(*arguments, **options)
        """
    found = outcome(stub(source))
    assert isinstance(found, Result), found
    assert found.elapsed_s > 0


def test_a_loader_of_somewhere_else_is_not_the_arms(stub: Stub) -> None:
    """A package that hands out another one's function is refused, though its file is right."""
    found = outcome(stub("from weightload import load"))
    assert isinstance(found, Failure)
    assert found.code == "wrong-code"
    assert "outside the arm's folder" in found.sentence


def test_a_planted_bit_is_blamed_on_its_tensor(stub: Stub, checkpoint: Path) -> None:
    """One bit on the device changes one tensor's digests and nothing else."""
    found = outcome(stub(REAL, kind="hash", plant=FlipBit("head", 700, 3)))
    assert isinstance(found, Result), found
    assert found.manifest is not None
    wrong = differences(file_manifest(tensor_places(checkpoint)), found.manifest)
    assert [(each.tensor, each.kind) for each in wrong] == [("head", "bytes")]


def test_the_delay_is_inside_the_timed_part(stub: Stub) -> None:
    """A delay of three times the load's own time makes it at least four times as long."""
    source = """
        import time
        from weightload import load as _load

        def load(*arguments, **options):
            time.sleep(0.05)
            return _load(*arguments, **options)
        """
    found = outcome(stub(source, delay_fraction=3.0))
    assert isinstance(found, Result), found
    assert found.elapsed_s >= 0.2


def test_a_loader_that_lies_about_being_done_is_waited_for(stub: Stub) -> None:
    """Work still queued on the device when the call returns is inside the timed part."""
    source = """
        from weightload import load as _load

        def load(*arguments, driver, **options):
            loaded = _load(*arguments, driver=driver, **options)
            _, stream = driver.cuStreamCreate(1)
            tensor = loaded["head"]
            driver.cuMemsetD8Async(tensor.data_ptr(), 7, tensor.nbytes, stream)
            driver.cuStreamDestroy(stream)
            return loaded
        """
    found = outcome(stub(source, kind="hash"))
    assert isinstance(found, Result), found
    assert found.manifest is not None
    by_name = {each.name: each for each in found.manifest.tensors}
    assert by_name["head"].sha256 == hashlib.sha256(b"\7" * 1320).hexdigest()


# Hands out the host's own memory, which the driver reads as well as the device's.
ON_THE_HOST = """
    import ctypes
    from dataclasses import replace
    from weightload import load as _load

    def load(*arguments, driver, **options):
        loaded = _load(*arguments, driver=driver, **options)
        tensors = {{}}
        for name, tensor in loaded.items():
            if {chosen}:
                _, block = driver.cuMemHostAlloc(max(1, tensor.nbytes), 1)
                driver.cuMemcpyDtoH(block, tensor.data_ptr(), tensor.nbytes)
                tensor = replace(tensor, address=int(block))
            tensors[name] = tensor
        return tensors
    """


@pytest.mark.parametrize("kind", ["time", "hash"])
@pytest.mark.parametrize("chosen", ["tensor.nbytes", "name == 'head'"])
def test_a_loader_that_leaves_weights_on_the_host_is_refused(
    stub: Stub, kind: str, chosen: str
) -> None:
    """The right bytes in the wrong memory are no load, be it all of them or one."""
    found = outcome(stub(ON_THE_HOST.format(chosen=chosen), kind=kind))
    assert isinstance(found, Failure), found
    assert found.code == "not-on-device"
    assert "'head'" in found.sentence or chosen == "tensor.nbytes"


def test_a_loader_that_returns_before_its_threads_is_refused(stub: Stub) -> None:
    """A thread that the load started and that runs on has no place after the clock."""
    found = outcome(stub(EARLY.format(seconds=1000)))
    assert isinstance(found, Failure)
    assert found.code == "still-loading"
    assert "1 of the threads" in found.sentence


def test_a_thread_that_is_about_to_end_is_waited_for_inside_the_clock(stub: Stub) -> None:
    """What a thread does in its last moments is timed, so that nobody gains by it."""
    patient = """
    import sys
    sys.modules["loadproof.measure.child"]._THREADS_GRACE_S = 30.0
    """
    found = outcome(stub(patient + EARLY.format(seconds=0.2)))
    assert isinstance(found, Result), found
    assert found.elapsed_s >= 0.2


def test_the_watcher_of_a_progress_bar_may_stay(stub: Stub) -> None:
    """A bar once drawn keeps a thread for ever, which loads nothing."""
    source = """
        import threading
        from tqdm import tqdm
        from weightload import load as _load

        def load(*arguments, **options):
            for _ in tqdm([1]):
                loaded = _load(*arguments, **options)
            assert any("TMonitor" in type(each).__name__ for each in threading.enumerate())
            return loaded
        """
    assert isinstance(outcome(stub(source)), Result)


def test_a_thread_of_native_code_is_not_the_loaders(stub: Stub) -> None:
    """A runtime's own threads live on; one that once came by in Python is no fault."""
    source = """
        import _thread, threading, time
        from weightload import load as _load

        def load(*arguments, **options):
            came_by = threading.Event()

            def native():
                threading.current_thread()
                came_by.set()
                time.sleep(1000)

            _thread.start_new_thread(native, ())
            came_by.wait()
            return _load(*arguments, **options)
        """
    found = outcome(stub(source))
    assert isinstance(found, Result), found


@pytest.mark.parametrize(
    ("body", "code", "told"),
    [
        ("raise ValueError('no such luck')", "loader-raised", "ValueError: no such luck"),
        ("import os; os._exit(7)", "leg-mute", "status 7 during 'load'"),
        ("import os; os.abort()", "leg-killed", "SIGABRT during 'load'"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "leg-killed", "SIGKILL"),
        ("import ctypes; ctypes.string_at(0)", "leg-killed", "SIGSEGV"),
    ],
)
def test_a_loader_that_dies_is_a_failure_with_a_code(
    stub: Stub, body: str, code: str, told: str
) -> None:
    """An exception, an exit and every signal are told apart, in one sentence."""
    found = outcome(stub(f"def load(*_, **__): {body}"))
    assert isinstance(found, Failure)
    assert found.code == code
    assert told in found.sentence


def test_a_leg_that_hangs_is_killed_with_its_children(stub: Stub, tmp_path: Path) -> None:
    """After the time-out the whole group is gone, grandchildren too."""
    path = str(tmp_path / "pid")
    source = f"""
        import os, subprocess, time

        def load(*_, **__):
            child = subprocess.Popen(["sleep", "1000"])
            with open({path!r} + ".part", "w") as file:
                file.write(str(child.pid))
            os.rename({path!r} + ".part", {path!r})
            time.sleep(1000)
        """
    found = outcome(stub(source), timeout_s=3.0)
    assert found == Failure("leg-timeout", "It did not end within 3 s and was killed.")
    assert has_ended(int(written(tmp_path / "pid")))


@pytest.mark.parametrize(
    ("leader", "code"),
    [("os._exit(7)", "leg-mute"), ("time.sleep(1000)", "leg-timeout")],
)
def test_a_child_of_another_session_does_not_hold_the_harness_up(
    stub: Stub, tmp_path: Path, leader: str, code: str
) -> None:
    """A leg is over when its process is, whoever else still holds its output open."""
    path = str(tmp_path / "pid")
    source = f"""
        import os, time
        from pathlib import Path

        def load(*_, **__):
            if os.fork() == 0:
                os.setsid()
                Path({path!r} + ".new").write_text(str(os.getpid()))
                os.rename({path!r} + ".new", {path!r})
                time.sleep(15)
                os._exit(0)
            while not Path({path!r}).exists():
                pass
            {leader}
        """
    found = run(stub(source), 3.0).outcome
    # It is still there to be ended: the harness did not wait for it.
    stranger = psutil.Process(int(written(tmp_path / "pid")))
    assert stranger.status() != psutil.STATUS_ZOMBIE
    stranger.kill()
    assert isinstance(found, Failure)
    assert found.code == code


def test_what_a_loader_prints_does_not_reach_the_harness(stub: Stub) -> None:
    """Prints, from Python and from C, go to standard error."""
    source = """
        import os
        from weightload import load as _load

        def load(*arguments, **options):
            print('{"type": "result"}')
            os.write(1, b"noise")
            return _load(*arguments, **options)
        """
    ended = run(stub(source), 60.0)
    assert isinstance(ended.outcome, Result)
    assert "noise" in ended.said


def test_a_loader_from_elsewhere_is_refused(stub: Stub) -> None:
    """An entry point that resolves outside of the arm's folder is not measured."""
    found = outcome(stub(REAL, entry="weightload:load"))
    assert isinstance(found, Failure)
    assert (found.code, "outside the arm's folder" in found.sentence) == ("wrong-code", True)


def test_code_that_changed_after_installation_is_refused(stub: Stub) -> None:
    """The digest of the imported package must be the installed one's."""
    request = stub(REAL)
    assert request.site is not None
    Path(request.site, "stubloader", "more.py").write_text("x = 1\n")
    found = outcome(request)
    assert isinstance(found, Failure)
    assert found.code == "wrong-code"


@pytest.mark.parametrize("device", ["fake:nonsense", "gpu", "cuda:", "cuda:99"])
def test_a_device_that_is_not_here_is_told(stub: Stub, device: str) -> None:
    """A device by a wrong name, or an absent one, is a failure before any load."""
    found = outcome(stub(REAL, device=device))
    assert isinstance(found, Failure)
    assert found.code == "no-device"


def test_a_killed_harness_leaves_no_leg(stub: Stub, tmp_path: Path) -> None:
    """SIGKILL to the harness ends its leg too."""
    source = TELL_AND_HANG.format(path=str(tmp_path / "pid"))
    request = msgspec.json.encode(stub(source))
    command = [sys.executable, "-c", HARNESS]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as harness:
        try:
            assert harness.stdin is not None
            with harness.stdin:
                harness.stdin.write(request)
            leg = int(written(tmp_path / "pid"))
        finally:
            harness.kill()
    assert has_ended(leg)
