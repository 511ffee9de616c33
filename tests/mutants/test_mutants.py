"""The positive control: every loader broken on purpose is caught, the right one never."""

import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fakecuda import HAZARDS, FakeCuda, Hazard, Late, Seeded, every_schedule
from fakecuda.choices import Choices
from fixtures.summary import leave_line

_LOADER = Path(__file__).with_name("loader.py")
_TABLE = Path(__file__).parents[2] / "fixtures" / "mutants" / "mutants.toml"
_MUTANTS: list[dict[str, Any]] = tomllib.loads(_TABLE.read_text())["mutant"]
_CHUNK, _SLOTS = 512, 2
_DATA = bytes((7 * i + 3) % 251 for i in range(2 * _CHUNK + 300))
_MUTANTS_MIN = 25
_SEEDS = 200


@dataclass
class Outcome:
    """How one run of a loader ended."""

    data: bytes | None
    error: Exception | None
    hazards: tuple[Hazard, ...]

    @property
    def ids(self) -> set[str]:
        """The hazards that were reported."""
        return {hazard.id for hazard in self.hazards}

    @property
    def wrong_bytes(self) -> int:
        """How many bytes of what was delivered are wrong; none if nothing was."""
        delivered = self.data or _DATA
        return sum(a != b for a, b in zip(delivered, _DATA, strict=True))


def _compile(mutant: dict[str, Any] | None) -> dict[str, Any]:
    text = _LOADER.read_text()
    if mutant is not None:
        assert text.count(mutant["find"]) == 1, f"{mutant['id']} must change one place"
        text = text.replace(mutant["find"], mutant["replace"])
    # A module name, so that the loader's dataclass can be made.
    space: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, str(_LOADER), "exec"), space)  # noqa: S102 - that is what a mutant is
    return space


def _run(space: dict[str, Any], choices: Choices, fault: dict[str, Any] | None) -> Outcome:
    cu = FakeCuda(choices=choices)
    if fault is not None:
        cu.faults.fail(fault["call"], nth=fault["nth"], persistent=fault.get("persistent", False))
    data, error = None, None
    try:
        data = space["Loader"](cu, _CHUNK, _SLOTS).load(_DATA)
    except space["LoadError"] as caught:
        error = caught
    cu.close(check=False)
    return Outcome(data, error, cu.hazards)


def _schedules() -> Iterator[Choices]:
    yield Late()
    for seed in range(_SEEDS):
        yield Seeded(seed)


@pytest.fixture(scope="module")
def caught(request: pytest.FixtureRequest) -> Iterator[dict[str, int]]:
    """How many wrong bytes each mutant that was caught delivered; printed at the end."""
    counts: dict[str, int] = {}
    yield counts
    for line in _caught_lines(counts):
        leave_line(request.config, "mutants: wrong bytes behind each, of " + str(len(_DATA)), line)


def _caught_lines(counts: dict[str, int]) -> list[str]:
    """The mutants by the hazard that names them."""
    harmful = sum(count > 0 for count in counts.values())
    lines = [f"{len(counts)} of {len(_MUTANTS)} caught, {harmful} of them with wrong bytes"]
    for hazard in HAZARDS:
        ids = [m["id"] for m in _MUTANTS if m["hazard"] == hazard and m["id"] in counts]
        text = f"{hazard}: " + ", ".join(f"{name} {counts[name]}" for name in ids)
        lines += textwrap.wrap(text, 98, subsequent_indent="    ", break_on_hyphens=False)
    return lines


@pytest.mark.parametrize("mutant", _MUTANTS, ids=[mutant["id"] for mutant in _MUTANTS])
def test_mutant_is_caught(mutant: dict[str, Any], caught: dict[str, int]) -> None:
    """The hazard named for it is reported, and wrong bytes are seen where they can be."""
    space = _compile(mutant)
    named, wrong = False, 0
    for choices in _schedules():
        outcome = _run(space, choices, mutant.get("fault"))
        named |= mutant["hazard"] in outcome.ids
        wrong = max(wrong, outcome.wrong_bytes)
        if named and (wrong or not mutant["bytes"]):
            break
    assert named, f"no schedule reported {mutant['hazard']}"
    assert (wrong > 0) == mutant["bytes"]
    caught[mutant["id"]] = wrong


@pytest.mark.parametrize("mutant", _MUTANTS, ids=[mutant["id"] for mutant in _MUTANTS])
def test_wrong_bytes_are_never_without_a_hazard(mutant: dict[str, Any]) -> None:
    """The two oracles agree: no schedule delivers wrong bytes and reports nothing."""
    space = _compile(mutant)
    for seed in range(40):
        outcome = _run(space, Seeded(seed), mutant.get("fault"))
        if outcome.wrong_bytes:
            assert outcome.hazards, f"seed {seed}"


def test_there_are_enough_mutants() -> None:
    """At least 25 mutants, no two alike, each named by a known hazard."""
    assert len(_MUTANTS) >= _MUTANTS_MIN
    assert len({mutant["id"] for mutant in _MUTANTS}) == len(_MUTANTS)
    assert {mutant["hazard"] for mutant in _MUTANTS} <= set(HAZARDS)


def test_every_hazard_has_its_mutant() -> None:
    """No hazard id goes without a mutant that provokes it."""
    assert {mutant["hazard"] for mutant in _MUTANTS} == set(HAZARDS)


@pytest.mark.parametrize("seed", range(_SEEDS))
def test_the_right_loader_passes_every_schedule(seed: int) -> None:
    """The unbroken loader delivers its bytes and breaks no rule, whatever the schedule."""
    outcome = _run(_compile(None), Seeded(seed), None)
    assert (outcome.data, outcome.hazards) == (_DATA, ())


def test_all_schedules_of_the_right_loader(request: pytest.FixtureRequest) -> None:
    """With one chunk there are few enough schedules to walk them all, and all are right."""
    loader, data = _compile(None)["Loader"], _DATA[:8]
    count = 0
    for choices in every_schedule(limit=10_000):
        with FakeCuda(choices=choices) as cu:
            assert loader(cu, 8, 1).load(data) == data
        count += 1
    line = f"all {count:,} schedules of the loader that mutants break, 1 chunk in 1 slot: right"
    leave_line(request.config, "schedules explored to the end", line)
    assert count > 1000


def _faults() -> list[tuple[str, int]]:
    """Every driver call that the right loader makes, by name and number."""
    cu = FakeCuda()
    _compile(None)["Loader"](cu, _CHUNK, _SLOTS).load(_DATA)
    cu.close()
    seen: dict[str, int] = {}
    out = []
    for record in cu.journal.records():
        if "call" in record and record["call"] != "cuInit":
            name = record["call"]
            seen[name] = seen.get(name, 0) + 1
            out.append((name, seen[name]))
    return out


@pytest.mark.parametrize("persistent", [False, True], ids=["transient", "persistent"])
@pytest.mark.parametrize(("call", "nth"), _faults())
def test_the_right_loader_survives_every_fault(call: str, nth: int, *, persistent: bool) -> None:
    """Whichever call fails, once or for ever: no wrong bytes, no hazard, the first error."""
    fault = {"call": call, "nth": nth, "persistent": persistent}
    for seed in range(8):
        outcome = _run(_compile(None), Seeded(seed), fault)
        assert outcome.hazards == ()
        assert outcome.data == _DATA or outcome.error is not None
