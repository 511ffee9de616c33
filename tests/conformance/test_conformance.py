"""The driver's contract, row by row, on the fake and on hardware."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from fakecuda import load_profile
from fakecuda.conformance import ROWS, Row, when_rows_ran

Runner = Callable[[Row], str]

_ONE_SIDED_MAX = 5
_TWO_SIDED = [name for name, row in ROWS.items() if not row.one_sided]


@pytest.mark.parametrize("name", ROWS)
def test_fake(name: str, fake_runner: Runner) -> None:
    """The fake keeps the contract."""
    row = ROWS[name]
    assert fake_runner(row) in row.allowed, row.fact


@pytest.mark.cuda
@pytest.mark.parametrize("name", _TWO_SIDED)
def test_cuda(name: str, real_runner: Runner) -> None:
    """A CUDA GPU keeps the contract; where it does not, the contract is wrong."""
    row = ROWS[name]
    assert real_runner(row) in row.allowed, row.fact


@pytest.mark.gb10
@pytest.mark.parametrize("name", _TWO_SIDED)
def test_gb10(name: str, real_runner: Runner) -> None:
    """A GB10 keeps the contract; where it does not, the contract is wrong."""
    row = ROWS[name]
    assert real_runner(row) in row.allowed, row.fact


@pytest.mark.parametrize("name", _TWO_SIDED)
def test_fake_equals_hardware(
    name: str, fake_runner: Runner, tables: list[dict[str, Any]]
) -> None:
    """The fake answers every row as the device did that it decides like."""
    seen = {
        table["rows"][name]
        for table in tables
        if table["device"] == "NVIDIA H200" and name in table["rows"]
    }
    # A row that never ran on hardware is listed as "never" at the end of the run.
    assert not seen or seen == {fake_runner(ROWS[name])}


def test_the_profile_is_the_device_that_was_asked(tables: list[dict[str, Any]]) -> None:
    """What landed from hardware and the profile agree on size and attributes."""
    profile = load_profile("h200")
    (table,) = (table for table in tables if table["device"] == profile.name)
    assert table["total_bytes"] == profile.total_bytes
    stated = {name: profile.attribute(name) for name in table["attributes"]}
    assert stated == table["attributes"]


def test_few_rows_are_one_sided() -> None:
    """At most five rows run on the fake alone, each with a written reason."""
    one_sided = [row for row in ROWS.values() if row.one_sided]
    assert len(one_sided) <= _ONE_SIDED_MAX
    assert all(" " in row.one_sided for row in one_sided)


def test_the_summary_says_for_every_row_when_it_ran() -> None:
    """Rows that ran together are one line; those that ran elsewhere or never are named."""
    first, second, third, *_ = (row for row in ROWS.values() if not row.one_sided)
    alone = next(row for row in ROWS.values() if row.one_sided)
    others = [dataclasses.replace(first, name=f"other{number}") for number in range(3)]
    names = [row.name for row in others]
    tables = [
        _table("2026-01-01", "Old", [second.name, *names]),
        _table("2026-02-02", "New", names),
    ]
    assert when_rows_ran([*others, second, third, alone], tables) == [
        "2026-02-02 on New, driver API 13000: 3 of 6 rows",
        f"2026-01-01 on Old, driver API 13000: {second.name}",
        f"never: {third.name}",
        f"the fake alone: {alone.name} ({alone.one_sided})",
    ]


def _table(date: str, device: str, names: list[str]) -> dict[str, Any]:
    outcomes = dict.fromkeys(names, "SUCCESS")
    return {"date": date, "device": device, "driver_api": 13000, "rows": outcomes}


def test_every_row_states_its_fact() -> None:
    """Every row says in a sentence what it shows."""
    assert all(row.fact and row.allowed for row in ROWS.values())
