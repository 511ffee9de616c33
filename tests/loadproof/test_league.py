"""Leagues and named loaders: listed with their reasons, never dropped, weights first."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from fixtures.models import FAMILIES
from loadproof.cli import app
from loadproof.doctor import Finding, examine
from loadproof.errors import ArmError
from loadproof.loaders import LOADERS
from loadproof.measure.ground_truth import file_manifest, tensor_places
from loadproof.plan.arms import named_loader, split_options
from loadproof.report import plots
from loadproof.report.league import decode_league, league_rows, render_league_page

if TYPE_CHECKING:
    from pathlib import Path


def league(checkpoint: Path, out: Path, loaders: str, *more: str) -> tuple[int, str]:
    """Run a league on the fake device."""
    options = [f"--loaders={loaders}", f"--checkpoint={checkpoint}", f"--out={out}"]
    done = CliRunner().invoke(app, ["compare", *options, "--blocks=1", "--seed=1", *more])
    return done.exit_code, done.output


_LOADED_AFTER_PREPARING = """
import sys
from pathlib import Path
from loadproof.loaders import LOADERS
peer = LOADERS[sys.argv[1]]
peer.prepare(sys.argv[2])
before = set(sys.modules)
assert peer.load(Path(sys.argv[2]), "cpu")
print(*sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("name", ["safetensors", "safetensors-cpu", "transformers"])
def test_what_a_loader_imports_is_imported_before_the_clock(name: str, tmp_path: Path) -> None:
    """A prepared load imports nothing more, so that no peer is called slow for its imports."""
    FAMILIES["llama"].write(tmp_path)
    command = [sys.executable, "-c", _LOADED_AFTER_PREPARING, name, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_our_routes_stand_in_a_league(checkpoint: Path, tmp_path: Path) -> None:
    """Two routes of one loader: equal weights, a ratio to the first, a record and two pages."""
    names = "weightload?route=buffered,weightload?route=direct"
    status, said = league(checkpoint, tmp_path / "out", names)
    assert status == 0, said
    record = decode_league((tmp_path / "out" / "league.json").read_bytes())
    assert {each.weights for each in record.standings} == {"equal"}
    assert {len(each.rates_gbs) for each in record.standings} == {2}
    with_ratio = [each.name for each in record.standings if each.against_first]
    assert with_ratio == ["weightload?route=direct"]
    assert record.device_class == "rehearsal"
    assert render_league_page(record).count("<svg") == 1
    assert str(tmp_path) not in (tmp_path / "out" / "league.json").read_text("utf-8")


def test_the_bar_of_a_plot_is_the_median_of_the_table(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an even number of legs the median lies between two of them, in both."""
    league(checkpoint, tmp_path / "out", "weightload")
    record = decode_league((tmp_path / "out" / "league.json").read_bytes())
    drawn: list[plots.Bar] = []

    def draw(bars: list[plots.Bar]) -> str:
        drawn.extend(bars)
        return ""

    monkeypatch.setattr(plots, "league", draw)
    render_league_page(record)
    (bar,) = drawn
    assert bar.median is not None
    assert min(bar.rates) < bar.median < max(bar.rates)
    assert f"{bar.median:.2f}" in next(iter(league_rows(record)))


def test_a_loader_that_cannot_load_is_listed_with_its_reason(
    checkpoint: Path, tmp_path: Path
) -> None:
    """The others run on, and the status says that the table is not whole."""
    status, said = league(checkpoint, tmp_path / "out", "weightload,safetensors")
    assert status == 3
    assert "safetensors needs a CUDA GPU" in said
    entries = json.loads((tmp_path / "out" / "league.json").read_text())["entries"]
    assert [bool(each["failure"]) for each in entries] == [False, True]


def test_a_record_of_nobody_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """A league that somebody emptied is no record, and that is one sentence."""
    league(checkpoint, tmp_path / "out", "weightload")
    record = json.loads((tmp_path / "out" / "league.json").read_text())
    (tmp_path / "empty.json").write_text(json.dumps(record | {"entries": []}))
    done = CliRunner().invoke(app, ["receipt", "show", str(tmp_path / "empty.json")])
    assert (done.exit_code, "not a valid record of a league" in done.output) == (1, True)


@pytest.mark.parametrize(
    ("loaders", "said"),
    [
        ("nonsense", "There is no loader 'nonsense'"),
        ("weightload,weightload", "Name each loader once"),
        ("safetensors?speed=11", "has no option 'speed'"),
        ("weightload?route=banana", "no route 'banana'; it has: auto, direct"),
        ("", "Name each loader once"),
    ],
)
def test_a_wrong_name_is_one_sentence(
    checkpoint: Path, tmp_path: Path, loaders: str, said: str
) -> None:
    """Nothing runs and nothing is written."""
    status, output = league(checkpoint, tmp_path / "out", loaders)
    assert status == 2
    assert said in output
    assert not (tmp_path / "out").exists()


def test_a_loader_that_is_not_installed_says_how_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names the distribution."""
    missing = LOADERS["runai"]._replace(module="no_such_module_here")
    monkeypatch.setitem(LOADERS, "runai", missing)
    with pytest.raises(ArmError, match="pip install runai-model-streamer"):
        named_loader("runai")


def test_options_are_json_where_they_read_as_json() -> None:
    """Numbers and booleans come as themselves, words as words."""
    assert split_options("main?read_ahead=0&nogds=true&route=direct") == (
        "main",
        {"read_ahead": 0, "nogds": True, "route": "direct"},
    )
    assert split_options("main") == ("main", {})


@pytest.mark.parametrize("name", ["safetensors", "safetensors-cpu"])
def test_a_peer_that_can_load_onto_the_cpu_loads_the_files_bytes(
    checkpoint: Path, name: str
) -> None:
    """The adapter returns every tensor of the files, under its name and with its bytes."""
    truth = {each.name: each for each in file_manifest(tensor_places(checkpoint)).tensors}
    loaded = LOADERS[name].load(checkpoint, "cpu")
    assert {name: (tuple(t.shape), t.nbytes) for name, t in loaded.items()} == {
        name: (each.shape, each.nbytes) for name, each in truth.items()
    }


def test_the_doctor_finds_this_machine_and_a_broken_checkpoint(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Every finding that is not good says what was found; a missing checkpoint stops."""
    found: list[Finding] = list(examine(tmp_path, checkpoint))
    assert {each.what for each in found} >= {"device", "memory", "page cache", "checkpoint"}
    assert all(each.found for each in found)
    (broken,) = [each for each in examine(tmp_path, tmp_path / "none") if each.state == "stops"]
    assert broken.what == "checkpoint"
    done = CliRunner().invoke(app, ["doctor", f"--checkpoint={tmp_path / 'none'}"])
    assert done.exit_code == 3
