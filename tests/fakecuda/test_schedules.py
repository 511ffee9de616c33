"""Schedules: every one can be reached, printed, and taken again to the same journal."""

import dataclasses
import itertools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fakecuda
from fakecuda import (
    Drawn,
    FakeCuda,
    Late,
    Limits,
    Replay,
    Seeded,
    every_schedule,
    load_profile,
)
from fakecuda.choices import Choices, Trail, format_trail, parse_trail
from fixtures.summary import leave_line
from tests.fakecuda.programs import pattern, ring_load

_DATA = pattern(1300)
_EXPLORED = "schedules explored to the end"


def _run_seed() -> str:
    """What makes this run's sample: the commit, so that each one tries other schedules."""
    given_seed = os.environ.get("FAKECUDA_SEED")
    if given_seed:
        return given_seed
    asked = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],  # noqa: S607 - by name
        capture_output=True,
        text=True,
        check=False,
    )
    return asked.stdout.strip() or "no commit"


def _journal(choices: Choices, *, settle: bool = True) -> tuple[list[str], FakeCuda]:
    cu = FakeCuda(choices=choices)
    ring_load(cu, _DATA, chunk=300, slots=2, settle=settle)
    cu.close(check=False)
    return list(cu.journal.lines()), cu


@given(st.lists(st.integers(0, 35)))
def test_trails_survive_writing(answers: list[int]) -> None:
    """What is written reads back the same, up to zeros at the end."""
    trimmed = answers[:]
    while trimmed and trimmed[-1] == 0:
        trimmed.pop()
    assert trimmed == parse_trail(format_trail(answers))


@pytest.mark.parametrize("text", ["(", "(x)", "A", "1 2", "(3"])
def test_what_is_no_trail_is_refused(text: str) -> None:
    """A damaged schedule is an error, not another schedule."""
    with pytest.raises(ValueError, match="not a schedule"):
        Replay(text)


def test_a_trail_for_another_program_is_refused() -> None:
    """An answer that the program does not offer is an error."""
    with pytest.raises(ValueError, match="does not fit this program"):
        Replay("9").pick("query", 2)


def test_every_schedule_is_every_combination() -> None:
    """A program with 2 x 3 x 2 answers has exactly 12 schedules, each once."""
    seen = [
        tuple(choices.pick("kind", options) for options in (2, 3, 2))
        for choices in every_schedule()
    ]
    assert sorted(seen) == sorted(itertools.product(range(2), range(3), range(2)))


def test_too_many_schedules_are_an_error() -> None:
    """A walk that would go on past its limit says so instead of stopping early."""
    walk = (choices.pick("kind", 9) for choices in every_schedule(limit=3))
    with pytest.raises(RuntimeError, match="more than 3 schedules"):
        list(walk)


def test_seeds_differ_in_kind() -> None:
    """Swarm weights make some seeds as late as can be, and others eager."""
    shares = []
    for seed in range(40):
        source = Seeded(seed)
        shares.append(sum(source.pick("progress", 2) for _ in range(100)))
    assert min(shares) == 0
    assert max(shares) > 85


@pytest.mark.parametrize("number", range(20))
def test_a_seed_gives_the_same_journal_twice(number: int) -> None:
    """Two runs of one seed write the same journal, line by line."""
    seed = f"{_run_seed()}/{number}"
    first, _ = _journal(Seeded(seed))
    second, _ = _journal(Seeded(seed))
    assert first == second, f"FAKECUDA_SEED={_run_seed()}"


@pytest.mark.parametrize("number", range(20))
def test_a_printed_schedule_replays_a_hazard(number: int) -> None:
    """The schedule that a hazard prints leads to the same journal and the same hazard."""
    seed = f"{_run_seed()}/{number}"
    first, cu = _journal(Seeded(seed), settle=False)
    second, again = _journal(Replay(cu.schedule), settle=False)
    assert first == second, f"FAKECUDA_SEED={_run_seed()}"
    # The two runs start on two lines of this test, so their call sites differ.
    found = [(h.id, h.detail, h.call, h.schedule) for h in cu.hazards]
    assert found == [(h.id, h.detail, h.call, h.schedule) for h in again.hazards]
    assert found


def _gb10_of_4_kib() -> FakeCuda:
    facts = dataclasses.replace(load_profile("gb10"), total_bytes=1 << 13)
    limits = Limits(page_cache_bytes=1 << 12, pinned_call_error=FakeCuda.CUresult(2))
    return FakeCuda(facts, seed="x", limits=limits, devices=2, choices=Seeded("7"))


@pytest.mark.parametrize("make", [lambda: FakeCuda(choices=Seeded("7")), _gb10_of_4_kib])
def test_the_printed_line_runs_the_same_again(make: Callable[[], FakeCuda]) -> None:
    """The line that a failing test prints makes a fake with the same journal and memory."""

    def run(cu: FakeCuda) -> list[str]:
        ring_load(cu, _DATA, chunk=300, slots=2, settle=False)
        cu.close(check=False)
        return [*cu.journal.lines(), *map(str, cu.hazards)]

    cu, journals = make(), []
    for _ in range(2):
        journals.append(run(cu))
        cu = eval(cu.replay, dict(vars(fakecuda)))  # noqa: S307 - the line is our own
    assert journals[0] == journals[1]


def test_late_is_a_replay_of_nothing() -> None:
    """The default schedule is the empty trail."""
    late, cu = _journal(Late())
    replayed, _ = _journal(Replay(""))
    assert cu.schedule == ""
    assert late == replayed


@given(st.data())
def test_hypothesis_draws_schedules(data: st.DataObject) -> None:
    """A right loader is right in whatever schedule Hypothesis comes up with."""
    drawn = Drawn(lambda most: data.draw(st.integers(0, most)))
    with FakeCuda(choices=drawn) as cu:
        assert ring_load(cu, _DATA, chunk=400, slots=2) == _DATA


def _walk(data: bytes, *, chunk: int, settle: bool) -> tuple[int, int, int]:
    """Count all schedules, those with a hazard, and those with wrong bytes."""
    count = hazardous = wrong = 0
    for choices in every_schedule(limit=50_000):
        cu = FakeCuda(choices=choices)
        loaded = ring_load(cu, data, chunk=chunk, slots=2, settle=settle)
        cu.close(check=False)
        count += 1
        hazardous += bool(cu.hazards)
        wrong += loaded != data
    return count, hazardous, wrong


def test_all_schedules_of_a_right_loader(request: pytest.FixtureRequest) -> None:
    """3 chunks in 2 slots, each settled, come out right in every schedule there is."""
    count, hazardous, wrong = _walk(_DATA[:384], chunk=128, settle=True)
    leave_line(request.config, _EXPLORED, f"all {count:,} schedules of 3 chunks in 2 slots: right")
    assert (hazardous, wrong) == (0, 0)
    assert count > 1000


def test_all_schedules_of_a_wrong_loader(request: pytest.FixtureRequest) -> None:
    """Without settling, every schedule reports it, also where the bytes come out right."""
    count, hazardous, wrong = _walk(_DATA[:384], chunk=128, settle=False)
    leave_line(
        request.config,
        _EXPLORED,
        f"all {count:,} schedules of the same, not settled: each with a hazard, "
        f"{wrong:,} with wrong bytes",
    )
    assert hazardous == count
    assert 0 < wrong < count


def test_a_trail_inside_a_trail_is_not_made() -> None:
    """A source that records already is used as it is."""
    trail = Trail(Late())
    cu = FakeCuda(choices=trail)
    assert cu._trail is trail
    cu.close()
