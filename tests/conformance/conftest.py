"""Runs rows on fake and real drivers, and keeps the table of outcomes."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fakecuda.conformance import ROWS, FakeSubject, RealSubject, Row, when_rows_ran

_ROOT = Path(__file__).parents[2]
_TABLES = _ROOT / "qualification" / "conformance"
_OUTCOMES = pytest.StashKey[dict[str, str]]()
_DEVICE = pytest.StashKey[dict[str, Any]]()
_ALONE_WITHIN_S = 120

Runner = Callable[[Row], str]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where to write the table of a run on hardware."""
    group = parser.getgroup("conformance")
    group.addoption(
        "--conformance-table",
        metavar="DIR",
        help="write the outcomes of this run on a real driver into DIR as JSON",
    )
    group.addoption(
        "--conformance-commit",
        metavar="ID",
        help="the revision to name in the table where the tree is no git checkout",
    )


def landed_tables() -> list[dict[str, Any]]:
    """The outcome tables of earlier runs on hardware, oldest first."""
    tables = [json.loads(path.read_text()) for path in sorted(_TABLES.glob("*.json"))]
    return sorted(tables, key=lambda table: str(table["date"]))


@pytest.fixture(scope="session")
def tables() -> list[dict[str, Any]]:
    """The outcome tables of earlier runs on hardware, oldest first."""
    return landed_tables()


def run_on_fake(row: Row) -> str:
    """The outcome of a row on the fake, deciding as an H200 was seen to."""
    subject = FakeSubject("h200")
    if not row.alone:
        subject.start()
    outcome = row.body(subject)
    if not row.alone and not row.one_sided:
        subject.end()
    # Rows break rules on purpose: what the fake says about that is tested elsewhere.
    subject.cu.close(check=False)
    return outcome


@pytest.fixture(scope="session")
def fake_runner() -> Runner:
    """Runs a row on the fake, once for all tests that ask."""
    return cache(run_on_fake)


@pytest.fixture(scope="session")
def real_runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """Runs a row on the real driver; its primary context lives for the whole session."""
    driver: Any = importlib.import_module("cuda.bindings.driver")
    keeper = RealSubject(driver)
    keeper.start()
    request.config.stash[_DEVICE] = _describe(keeper)

    def run(row: Row) -> str:
        outcome = _alone(row) if row.alone else _here(RealSubject(driver), row)
        request.config.stash.setdefault(_OUTCOMES, {})[row.name] = outcome
        return outcome

    yield run
    keeper.ok(driver.cuDevicePrimaryCtxRelease(keeper.device_handle))


def _here(subject: RealSubject, row: Row) -> str:
    subject.start()
    try:
        return row.body(subject)
    finally:
        subject.end()
        subject.ok(subject.cu.cuDevicePrimaryCtxRelease(subject.device_handle))


def _alone(row: Row) -> str:
    """The outcome of a row in a process of its own; how that died, if it did."""
    script = Path(__file__).with_name("alone.py")
    done = subprocess.run(
        [sys.executable, str(script), row.name],
        capture_output=True,
        text=True,
        timeout=_ALONE_WITHIN_S,
        check=False,
    )
    printed = done.stdout.strip()
    if printed:
        return printed.splitlines()[-1]
    if done.returncode < 0:
        return f"crashed with signal {-done.returncode}"
    raise AssertionError(done.stderr)


def _describe(subject: RealSubject) -> dict[str, Any]:
    cu = subject.cu
    name = subject.ok(cu.cuDeviceGetName(256, subject.device_handle))
    attributes = cu.CUdevice_attribute
    facts = {}
    for key in (
        "COMPUTE_CAPABILITY_MAJOR",
        "COMPUTE_CAPABILITY_MINOR",
        "INTEGRATED",
        "PAGEABLE_MEMORY_ACCESS",
        "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES",
        "HOST_REGISTER_SUPPORTED",
        "READ_ONLY_HOST_REGISTER_SUPPORTED",
    ):
        attribute = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{key}")
        facts[key] = int(subject.ok(cu.cuDeviceGetAttribute(attribute, subject.device_handle)))
    return {
        "device": name.split(b"\0")[0].decode(),
        "attributes": facts,
        "total_bytes": int(subject.ok(cu.cuDeviceTotalMem(subject.device_handle))),
        "driver_api": int(subject.ok(cu.cuDriverGetVersion())),
        "bindings": importlib.import_module("cuda.bindings").__version__,
        "python": sys.version.split()[0],
    }


def _commit(config: pytest.Config) -> str:
    given = config.getoption("--conformance-commit", default=None)
    if given:
        return str(given)
    asked = subprocess.run(
        ["git", "-C", str(_ROOT), "rev-parse", "HEAD"],  # noqa: S607 - git is found by name
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or "unknown"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table of a run on hardware."""
    config = session.config
    folder = config.getoption("--conformance-table", default=None)
    if folder is None or _DEVICE not in config.stash:
        return
    device = config.stash[_DEVICE]
    table: dict[str, Any] = {
        **device,
        "date": datetime.now(tz=UTC).date().isoformat(),
        "commit": _commit(config),
        "rows": config.stash.get(_OUTCOMES, {}),
    }
    slug = table["device"].lower().replace(" ", "-")
    path = Path(folder) / f"{slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=2) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say for every row when it last ran on hardware."""
    terminalreporter.section("conformance rows: last run on hardware")
    for line in when_rows_ran(ROWS.values(), landed_tables()):
        terminalreporter.write_line(line)
