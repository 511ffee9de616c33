"""What a trial ran on, in words that name no person, no host and no path."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import msgspec

from loadproof.measure.memory import read_fields

# Whatever of these is installed may change a load's time.
_DISTRIBUTIONS = ("loadproof", "torch", "transformers", "safetensors", "cuda-bindings", "msgspec")


class Environment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine and the software, as far as both arms share them.

    Attributes:
        python: Version and implementation.
        machine: The processor's architecture, such as ``aarch64``.
        cpu: The processor's name; None when the kernel gives none.
        cpu_count: Processors this process may run on.
        kernel: The kernel's release.
        page_bytes: The page size.
        memory_bytes: All memory of the system; None when the kernel gives no figure.
        packages: Versions of what may matter; None for what is not installed.
    """

    python: str
    machine: str
    cpu: str | None
    cpu_count: int
    kernel: str
    page_bytes: int
    memory_bytes: int | None
    packages: dict[str, str | None]


def describe_environment() -> Environment:
    """Return the environment of this process, which its legs inherit."""
    return Environment(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        machine=platform.machine(),
        cpu=_cpu_name(),
        cpu_count=len(os.sched_getaffinity(0)),
        kernel=platform.release(),
        page_bytes=os.sysconf("SC_PAGE_SIZE"),
        memory_bytes=read_fields("/proc/meminfo").get("MemTotal"),
        packages={name: _version(name) for name in _DISTRIBUTIONS},
    )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            rows = (line.partition(":") for line in file)
            return next(
                (value.strip() for key, _, value in rows if key.strip() == "model name"), None
            )
    except OSError:
        return None
