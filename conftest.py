"""For the whole suite: its hardware gate, an error on the wrong machine, and its tables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, get_args

import pytest
from hypothesis import settings

from fixtures.summary import TABLES
from loadproof.gate import DeviceClass, GateError, require

if TYPE_CHECKING:
    from collections.abc import Iterator

# torch's threads sleep while they wait for each other: where they spin, and other work is done
# on the same cores, a small model takes seconds.  It is read when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# CI explores the same examples on every run; a developer's machine explores new ones.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def _classes_of(session: pytest.Session) -> Iterator[DeviceClass]:
    for device_class in get_args(DeviceClass):
        if any(item.get_closest_marker(device_class) for item in session.items):
            yield device_class


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check the machine once for every class that the selected tests need."""
    if session.config.option.collectonly:
        return
    for device_class in _classes_of(session):
        try:
            require(device_class)
        except GateError as error:
            raise pytest.UsageError(str(error)) from error


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the tables that tests left."""
    for title, text in config.stash.get(TABLES, {}).items():
        terminalreporter.section(title)
        terminalreporter.write_line(text)
