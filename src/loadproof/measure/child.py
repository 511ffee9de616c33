"""The one process of a leg: import the arm's loader, load once, say what was seen.

Everything that measures comes from the running harness; only the loader comes from the arm's
folder.  ``loadproof`` and ``fakecuda`` are therefore imported before that folder is put on the
path, and the package that the loader really came from is proven by its place and its digest.

This module stays light: it imports no torch, no typer, no rich, so that a leg on the fake
device starts in a fraction of a second.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
import traceback
from contextlib import contextmanager
from pathlib import Path

# By their own names, before any loader is imported: what one puts in their place later is not
# what measures it.
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

import fakecuda  # noqa: F401 -- the harness's own, before the arm's folder is on the path
import loadproof
from loadproof.errors import LoadproofError, ServingError
from loadproof.measure.audit import Audit, audit
from loadproof.measure.command import CommandError, CommandLoader
from loadproof.measure.handed_out import AnyDevice, open_device, timed_load
from loadproof.measure.memory import high_water_bytes, storage_read_bytes
from loadproof.measure.messages import Elsewhere, Failure, Message, Request, Result, Stage
from loadproof.measure.mismatch import explain
from loadproof.measure.plants import plant_on_device
from loadproof.measure.protocol import Load
from loadproof.plan.identity import package_digest, package_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from loadproof.measure.digest import Manifest, Mismatch

_Loader: TypeAlias = "Callable[..., Any] | CommandLoader"

# What a thread may still take to end when the call has returned, inside the timed part: long
# enough for one that was told to end to have its turn, too short to load much.
_THREADS_GRACE_S = 0.005


class _WrongCodeError(LoadproofError):
    """The loader that was imported is not the arm's."""


class _StillLoadingError(LoadproofError):
    """A thread that the load started ran on when the clock had stopped."""


class _NotOnDeviceError(LoadproofError):
    """What the loader handed out is not in the device's memory."""


class _Channel:
    """The harness's end of standard output; whatever the loader prints goes to stderr."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    def send(self, message: Message) -> None:
        self._file.write(msgspec.json.encode(message) + b"\n")


class _Steps:
    """The steps of a leg, announced as they begin and timed."""

    def __init__(self, channel: _Channel) -> None:
        self._channel = channel
        self.current = "start"
        self.phases_s: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        self.current = name
        self._channel.send(Stage(name))
        begun = perf_counter()
        yield
        self.phases_s[name] = perf_counter() - begun

    def elsewhere(self, pid: int) -> None:
        self._channel.send(Elsewhere(pid))


def main() -> None:
    """Do one leg, as asked on standard input."""
    channel = _Channel()
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    steps = _Steps(channel)
    try:
        answer: Message = _leg(request, steps)
    except _WrongCodeError as error:
        answer = Failure("wrong-code", str(error))
    except _StillLoadingError as error:
        answer = Failure("still-loading", str(error))
    except _NotOnDeviceError as error:
        answer = Failure("not-on-device", str(error))
    except CommandError as error:
        answer = Failure(error.code, str(error))
    except ServingError as error:
        answer = Failure("cannot-serve", str(error))
    except LoadproofError as error:
        opening = steps.current == "device"
        answer = Failure("no-device" if opening else "device", str(error))
    except Exception as error:  # noqa: BLE001 -- the loader's, whatever it is: told, not raised
        traceback.print_exc()
        # A file's name, quoted, need not be UTF-8; an answer is.
        said = f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace").decode()
        answer = Failure("loader-raised", said)
    channel.send(answer)
    sys.stderr.flush()
    # Everything was closed and said; threads that a loader left must not keep the leg alive.
    os._exit(0)


def _leg(request: Request, steps: _Steps) -> Result:
    if request.serving is not None:
        with steps.step("import transformers"):
            # Before the arm's folder is on the path, as everything else that is the harness's.
            from loadproof.measure.server import Server  # noqa: PLC0415 -- others do without
    with steps.step("import"):
        loader, digest = _take_loader(request)
    with steps.step("device"):
        device = open_device(request.device, of_a_program=isinstance(loader, CommandLoader))
        facts = device.facts()
    if isinstance(loader, CommandLoader):
        with steps.step("ready"):
            loader.greet(device.loader_device)
            steps.elsewhere(loader.pid)
    if request.truth is not None:
        with steps.step("poison"):
            device.poison(request.truth.manifest.nbytes())
    server = None
    if request.serving is not None:
        with steps.step("config"):
            server = Server(request.serving, device)
        loader = server.load_reference if request.serving.reference else loader
    before, free_before = _read_bytes(loader), device.free_bytes()
    with steps.step("load"):
        loaded, elapsed_s = _timed_load(loader, request, device)
    after, free_after = _read_bytes(loader), device.free_bytes()
    copies = device.device_to_host_copies()
    if request.site is not None and not isinstance(loader, CommandLoader):
        _check_origin(request, loader)
    if request.serving is None or not request.serving.reference:
        _check_placed(device, loaded)
    served = None
    if server is not None:
        with steps.step("serve"):
            served = server.serve(loaded)
    audited = Audit()
    if request.audit is not None:
        with steps.step("audit"):
            audited = audit(request.audit, request.audit_bytes, device, loaded)
    seen = _look(request, steps, device, loaded) if request.kind == "hash" else _Seen()
    report = getattr(loaded, "report", None)
    sizes = [int(tensor.nbytes) for tensor in loaded.values()]
    high_water = high_water_bytes(loader.pid if isinstance(loader, CommandLoader) else os.getpid())
    with steps.step("close"):
        close = getattr(loaded, "close", None)
        if close is not None:
            close()
        device.close()
    return Result(
        elapsed_s=elapsed_s,
        phases_s=steps.phases_s,
        tensors=len(sizes),
        nbytes=sum(sizes),
        digest=digest,
        harness=package_digest(Path(loadproof.__file__).parent),
        device=facts,
        report=None if report is None else report.to_dict(),
        device_to_host_copies=copies,
        read_bytes=_change(before, after),
        vm_hwm_bytes=high_water,
        hazards=device.hazards(),
        device_taken_bytes=_change(free_after, free_before),
        poisoned_bytes=seen.poisoned_bytes,
        manifest=seen.manifest,
        mismatches=seen.mismatches,
        audited_bytes=audited.nbytes,
        audit_wrong=audited.wrong,
        identity=loader.identity if isinstance(loader, CommandLoader) else None,
        served=served,
    )


def _check_placed(device: AnyDevice, loaded: Mapping[str, Any]) -> None:
    """Check that every tensor is where it was to be loaded to.

    Raises:
        _NotOnDeviceError: One is not.
    """
    elsewhere = device.not_here(loaded)
    if elsewhere:
        raise _NotOnDeviceError(
            f"{len(elsewhere)} of {len(loaded)} tensors, such as {elsewhere[0]!r}, are not in the "
            "device's own memory, so they were not loaded onto it."
        )


class _Seen(NamedTuple):
    """What a hash leg saw on the device; a timing leg does not look."""

    manifest: Manifest | None = None
    mismatches: dict[str, Mismatch] = {}  # noqa: RUF012 -- never changed
    poisoned_bytes: int | None = None


def _look(request: Request, steps: _Steps, device: AnyDevice, loaded: Mapping[str, Any]) -> _Seen:
    """Plant what is to be planted, read every tensor back, and look into what is wrong."""
    if request.plant is not None:
        with steps.step("plant"):
            plant_on_device(device, loaded, request.plant)
    with steps.step("read-back"):
        manifest = device.manifest(loaded)
    if request.truth is None:
        return _Seen(manifest)
    with steps.step("explain"):
        mismatches = explain(
            request.truth,
            manifest,
            lambda name: device.chunks(name, loaded[name]),
            device.poison_pattern,
            int(getattr(getattr(loaded, "report", None), "slot_bytes", 0)),
        )
    return _Seen(manifest, mismatches, device.poisoned_bytes(loaded))


def _change(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _take_loader(request: Request) -> tuple[_Loader, str]:
    """Import the loader, or start it when it is a program.

    Raises:
        _WrongCodeError: It is not the arm's.
        CommandError: The program cannot be started.
    """
    if request.command is None:
        return _import_loader(request)
    digest = _proven(Path(request.site or "/"), request.digest)
    return CommandLoader(request.command), digest


def _read_bytes(loader: _Loader) -> int | None:
    if isinstance(loader, CommandLoader):
        return loader.read_bytes()
    return storage_read_bytes(os.getpid())


def _import_loader(request: Request) -> tuple[Callable[..., Any], str]:
    """Import the entry point from the arm's folder, and prove that it came from there.

    Raises:
        _WrongCodeError: It came from elsewhere, or its package is not the one installed.
    """
    if request.site is None:
        return _named_loader(request)
    sys.path.insert(0, request.site)
    importlib.invalidate_caches()
    module_name, _, function_name = request.entry.partition(":")
    module = importlib.import_module(module_name)
    package = Path(request.site, module_name.partition(".")[0])
    file = Path(module.__file__ or "/").resolve()
    if not file.is_relative_to(package.resolve()):
        raise _WrongCodeError(
            f"{module_name} was imported from outside the arm's folder, so another loader than "
            "the arm's would have been measured."
        )
    return getattr(module, function_name), _proven(package, request.digest)


def _check_origin(request: Request, loader: Callable[..., Any]) -> None:
    """Prove that the function that ran, and every module of its package, is the arm's.

    Raises:
        _WrongCodeError: Some of it came from elsewhere.
    """
    top = request.entry.partition(":")[0].partition(".")[0]
    package = Path(request.site or "/", top).resolve()
    files = {
        name: getattr(module, "__file__", None)
        for name, module in tuple(sys.modules.items())
        if name == top or name.startswith(f"{top}.")
    }
    files["the loader's own function"] = inspect.getsourcefile(inspect.unwrap(loader))
    for name, file in files.items():
        if file is None or not Path(file).resolve().is_relative_to(package):
            raise _WrongCodeError(
                f"{name} came from outside the arm's folder, so another loader than the arm's "
                "was measured."
            )


def _named_loader(request: Request) -> tuple[Callable[..., Any], str]:
    """Take a loader that is installed beside the harness, with its package already imported."""
    from loadproof.loaders import LOADERS  # noqa: PLC0415 -- other legs do without

    peer = LOADERS[request.entry]
    peer.prepare(request.checkpoint)
    digest = _proven(package_folder(peer.module), request.digest)
    return peer.as_loader, digest


def _proven(package: Path, wanted: str) -> str:
    digest = package_digest(package)
    if digest != wanted:
        raise _WrongCodeError(
            f"The arm's package {package.name!r} changed after it was installed."
        )
    return digest


def _timed_load(loader: _Loader, request: Request, device: AnyDevice) -> tuple[Any, float]:
    """Load once; the clock stops when the device has everything, not when the call returns.

    Every tensor is asked for its address before: what is only made when somebody wants it
    is made inside the timed part.  Threads of Python's that the load started get a moment to
    end, inside it too: one that runs on may still be loading.

    Raises:
        _StillLoadingError: One ran on.
        CommandError: A loader that is a program failed.
    """
    if isinstance(loader, CommandLoader):
        load = Load(
            checkpoint=request.checkpoint, options=request.options, deadline_s=request.deadline_s
        )
        return timed_load(loader, device, load, request.delay_fraction)
    known = set(threading.enumerate())
    begun = perf_counter()
    loaded = loader(
        request.checkpoint,
        device=device.loader_device,
        driver=device.loader_driver,
        **request.options,
    )
    for tensor in loaded.values():
        tensor.data_ptr()
    # Installed loaders are compared as they are, and may keep idle pools; so may transformers
    # where it loads the reference.
    is_reference = request.serving is not None and request.serving.reference
    left = [] if is_reference or request.site is None else _left_running(known)
    device.synchronize()
    if request.delay_fraction:
        sleep(request.delay_fraction * (perf_counter() - begun))
    elapsed_s = perf_counter() - begun
    if left:
        raise _StillLoadingError(
            f"{len(left)} of the threads that the load started ran on when it had returned "
            f"({', '.join(left)}), so it may not have been over; end or join them before it "
            "returns."
        )
    return loaded, elapsed_s


def _left_running(known: Collection[threading.Thread]) -> list[str]:
    """Name Python's threads that are not among the known and do not end within the grace."""
    deadline = perf_counter() + _THREADS_GRACE_S
    # A dummy stands for a thread of native code that came by; nobody can tell when it ends.
    # The watcher of tqdm's progress bars loads nothing, and never ends.
    started = [
        each
        for each in threading.enumerate()
        if each not in known
        and not isinstance(each, threading._DummyThread)  # noqa: SLF001
        and not type(each).__module__.startswith("tqdm.")
    ]
    for thread in started:
        thread.join(max(0.0, deadline - perf_counter()))
    return sorted(thread.name for thread in started if thread.is_alive())


if __name__ == "__main__":
    main()
