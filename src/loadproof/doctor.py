"""What this machine is, which routes it can take, and what would stop a qualification.

Every check is the thing itself, tried once, and never a guess from a version: a folder is
written to, a file is opened with O_DIRECT, a package is looked for, the device is asked.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

import weightload
from loadproof.errors import ArmError, CheckpointError
from loadproof.gate import describe
from loadproof.loaders import LOADERS
from loadproof.measure import cache_state
from loadproof.measure.environment import describe_environment
from loadproof.measure.ground_truth import shard_paths
from loadproof.measure.memory import read_fields
from loadproof.plan.arms import named_loader
from loadproof.report.files import require_writable

if TYPE_CHECKING:
    from collections.abc import Iterator

State = Literal["good", "limited", "stops"]
_DIRECT_BYTES = 4096


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at.

    Attributes:
        what: The thing.
        state: ``good``, ``limited`` (works, with less to say) or ``stops`` a qualification.
        found: What was found.
        remedy: What to do about it; empty when nothing is to be done.
    """

    what: str
    state: State
    found: str
    remedy: str = ""


def examine(folder: Path, checkpoint: Path | None = None) -> Iterator[Finding]:
    """Look at this machine, at a folder for arms, and at a checkpoint if one is given.

    Raises:
        OutputError: Nothing can be written to the folder.
    """
    require_writable(folder, (), option="--folder")
    environment = describe_environment()
    yield Finding(
        "machine",
        "good",
        f"{environment.machine}, {environment.cpu_count} processors, kernel "
        f"{environment.kernel}, pages of {environment.page_bytes} bytes",
    )
    yield _device()
    yield _memory()
    yield from _tools()
    yield _page_cache(folder)
    yield _direct(folder)
    yield _nvml()
    yield _loaders()
    if checkpoint is not None:
        yield _checkpoint(checkpoint)


def _device() -> Finding:
    try:
        profile = weightload.device_profile(0)
    except weightload.WeightloadError as error:
        return Finding(
            "device", "limited", f"none: {error}", "Rehearse with --device fake; time needs a GPU."
        )
    kind = "a GB10" if profile.is_gb10 else "no GB10, so its receipts say nothing about one"
    return Finding("device", "good", f"{describe(profile)}: {kind}")


def _memory() -> Finding:
    fields = read_fields("/proc/meminfo")
    available, swap = fields.get("MemAvailable"), fields.get("SwapTotal", 0)
    if available is None:
        return Finding("memory", "limited", "the kernel gives no MemAvailable")
    found = f"{available / 2**30:.1f} GiB available, {swap / 2**30:.1f} GiB of swap"
    if swap:
        return Finding("memory", "limited", found, "Swapping marks legs; switch swap off.")
    return Finding("memory", "good", found)


def _tools() -> Iterator[Finding]:
    for name, needed in (("git", "arms are exported from git"), ("pip", "arms are installed")):
        there = shutil.which(name) if name == "git" else importlib.util.find_spec(name)
        if there is None:
            yield Finding(name, "stops", f"not here, and {needed}", f"Install {name}.")
        else:
            yield Finding(name, "good", needed)
    if importlib.util.find_spec("hatchling") is None:
        yield Finding(
            "build backend",
            "limited",
            "hatchling is not here, and arms are built without a network",
            "pip install hatchling, or what your project's pyproject.toml names.",
        )


def _page_cache(folder: Path) -> Finding:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(os.urandom(1 << 20))
        file.flush()
        path = Path(file.name)
        states = {each: cache_state.prepare([path], each) for each in ("warm", "cold")}
    wrong = [each for name, each in states.items() if each.state != name]
    if not wrong:
        return Finding("page cache", "good", "can be made warm and cold, and both be proven")
    why = wrong[0].why or f"pages stayed {wrong[0].state}"
    return Finding(
        "page cache", "limited", why, "Keep the checkpoint on a disk and own its files."
    )


def _direct(folder: Path) -> Finding:
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(os.urandom(_DIRECT_BYTES))
        file.flush()
        os.fsync(file.fileno())
        try:
            descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            return Finding(
                "route direct", "limited", f"refused: {error.strerror}", "Use --route buffered."
            )
        os.close(descriptor)
    return Finding("route direct", "good", "O_DIRECT is accepted where --out and arms are")


def _nvml() -> Finding:
    if importlib.util.find_spec("pynvml") is None:
        return Finding(
            "clocks and power",
            "limited",
            "nvidia-ml-py is not here",
            "pip install loadproof[nvml]",
        )
    done = (
        subprocess.run(
            ["nvidia-smi", "-L"],  # noqa: S607 -- the machine's own, as on the PATH
            capture_output=True,
            check=False,
        )
        if shutil.which("nvidia-smi")
        else None
    )
    if done is None or done.returncode:
        return Finding("clocks and power", "limited", "NVML shows no GPU")
    return Finding("clocks and power", "good", "NVML answers")


def _loaders() -> Finding:
    there, missing = [], []
    for name in LOADERS:
        try:
            named_loader(name)
        except ArmError:
            missing.append(name)
        else:
            there.append(name)
    found = f"installed: {', '.join(there)}; not: {', '.join(missing) or 'none'}"
    return Finding("loaders", "limited" if missing else "good", found)


def _checkpoint(checkpoint: Path) -> Finding:
    try:
        paths = shard_paths(checkpoint)
    except CheckpointError as error:
        return Finding("checkpoint", "stops", str(error))
    state = cache_state.look(paths)
    found = f"{len(paths)} shards, {state.total_bytes:,} bytes, page cache {state.state}"
    available = read_fields("/proc/meminfo").get("MemAvailable")
    if available is not None and available < 2 * state.total_bytes:
        return Finding(
            "checkpoint",
            "limited",
            f"{found}; less than twice that is available",
            "On one pool of memory it may not fit beside its page cache; free memory first.",
        )
    if state.why:
        return Finding("checkpoint", "limited", f"{found}: {state.why}")
    return Finding("checkpoint", "good", found)
