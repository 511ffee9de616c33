"""The speed and memory of weightload beside its peers and beside the machine's limits.

Run on a CUDA GPU, from the repository's root:

    python -m qualification.speed make DIR            # the checkpoints, about 13 GB
    python -m qualification.speed run DIR --out OUT   # samples.json and table.md

Every leg is a process of its own that loads once. A block is a random order of the arms
followed by its mirror; ratios are taken within a half block, so that a machine that
slows down slows both sides. Raw samples are written beside the table.
"""

from __future__ import annotations

import json
import multiprocessing
import random
from pathlib import Path  # noqa: TC003 - typer reads annotations when it runs
from typing import Annotated, Any

import typer

from fixtures.checkpoints import RECIPES
from loadproof.loaders import PEERS
from qualification.legs import Leg, run_apart
from qualification.speed_leg import run_leg
from qualification.speed_table import table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["qualification.speed_leg"])
WARM_PEERS = (
    "instanttensor",
    "safetensors-prefetch",
    "safetensors",
    "fastsafetensors",
    "runai",
    "touch",
)


def _load(section: str, arm: str, recipe: str = "base", **options: Any) -> Leg:  # noqa: ANN401 - options of the loader
    return {"section": section, "arm": arm, "recipe": recipe, "options": options}


# Each section's arms, and what the page cache must be like beforehand.
SECTIONS: dict[str, tuple[str, list[Leg]]] = {
    "warm": (
        "warm",
        [
            _load("warm", "limits"),
            _load("warm", "weightload", route="buffered"),
            *[_load("warm", peer) for peer in WARM_PEERS],
        ],
    ),
    "cold": (
        "cold",
        [_load("cold", "limits"), _load("cold", "weightload", route="direct")],
    ),
    "verify": (
        "warm",
        [
            _load("verify", "limits"),
            _load("verify", "weightload", route="buffered"),
            _load("verify", "weightload-verify", route="buffered", verify="sha256"),
        ],
    ),
    "shapes": (
        "warm",
        [
            _load("shapes", "base", route="buffered"),
            _load("shapes", "many-small", "many-small", route="buffered"),
            _load("shapes", "one-large", "one-large", route="buffered"),
            _load("shapes", "safetensors", "many-small"),
            _load("shapes", "instanttensor", "many-small"),
        ],
    ),
    "memory": ("warm", [_load("memory", "weightload", route="buffered")]),
}


@app.command()
def make(folder: Path) -> None:
    """Write the checkpoints by recipe."""
    for name, recipe in RECIPES.items():
        recipe(folder / name)


@app.command()
def run(
    folder: Path,
    out: Annotated[Path, typer.Option(help="Where samples.json and table.md go.")],
    blocks: Annotated[int, typer.Option(help="Mirrored blocks; each gives two pairs.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the order of the arms.")] = 1,
    sections: Annotated[str, typer.Option(help="Which, with commas.")] = ",".join(SECTIONS),
    prefetch_site: Annotated[
        str, typer.Option(help="A folder with safetensors >= 0.9.0rc1, put first for that peer.")
    ] = "",
) -> None:
    """Run every leg, in mirrored random order, and write the table."""
    order = random.Random(seed)
    samples: list[Leg] = []
    out.mkdir(parents=True, exist_ok=True)
    for section in sections.split(","):
        cache, legs = SECTIONS[section]
        for block in range(blocks):
            first = order.sample(legs, len(legs))
            for half, sequence in enumerate((first, first[::-1])):
                for leg in sequence:
                    spec = leg | {"cache": cache, "folder": str(folder / leg["recipe"])}
                    if leg["arm"] == "safetensors-prefetch":
                        spec["site"] = prefetch_site
                    result = run_apart(_SERVER, run_leg, spec)
                    samples.append(leg | {"block": block, "half": half} | result)
                    typer.echo(json.dumps(samples[-1]))
            # A run that is cut short leaves what it has.
            (out / "samples.json").write_text(json.dumps(samples, indent=1))
    text = table(samples)
    (out / "table.md").write_text(text)
    typer.echo(text)


if __name__ == "__main__":
    missing = [peer for peer in WARM_PEERS if peer not in PEERS]
    if missing:
        raise SystemExit(f"no such peers: {missing}")
    app()
