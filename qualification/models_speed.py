"""Whole models beside transformers and gb10-load-llm: seconds, memory, copies, tokens.

Run on a CUDA GPU, from the repository's root, with gb10-load-llm importable:

    python -m qualification.models_speed run FOLDER --out OUT   # samples.json and table.md

It makes the model by recipe in FOLDER if it is not there: shaped like Qwen2, random
weights, about 4.3 GB. Every leg is a fresh process that loads once. A block is a random
order of the arms followed by its mirror; ratios are taken within a half block. The
families of `fixtures/models.py` are loaded on the GPU as well, and the model is served a
prompt of 32,768 tokens right after a cold load. `--device fake` with `--layers 1` tries
the script itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import time
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated, Any

import typer

from qualification.legs import Leg, run_apart
from qualification.models_leg import ARMS, make_model, run_leg
from qualification.models_table import table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# The server imports what every arm needs and forks the legs. It must not touch CUDA, which
# torch's own question whether there is a device would do; asked by NVML it does not.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["qualification.models_leg"])
_SPAWN = multiprocessing.get_context("spawn")


@app.command()
def make(
    folder: Path,
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 25,
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 1,
) -> None:
    """Write the model by recipe."""
    make_model(folder, layers, seed)


@app.command()
def run(
    folder: Path,
    out: Annotated[Path, typer.Option(help="Where samples.json and table.md go.")],
    blocks: Annotated[int, typer.Option(help="Mirrored blocks; each gives two pairs.")] = 5,
    layers: Annotated[int, typer.Option(help="Layers of the model, if it is made.")] = 25,
    seed: Annotated[int, typer.Option(help="Of the weights and the order of the arms.")] = 1,
    device: Annotated[str, typer.Option(help="A CUDA device, or fake.")] = "cuda:0",
    budget_s: Annotated[int, typer.Option(help="No leg starts after this many seconds.")] = 240,
) -> None:
    """Run every leg and write the table."""
    begun = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    start: Any = _SERVER
    probe = {"section": "probe", "folder": str(folder), "device": device}
    if "failed" in run_apart(start, run_leg, probe):
        # Some import touched CUDA after all: legs then import everything themselves.
        start = _SPAWN
    if not (folder / "config.json").exists():
        recipe = {"section": "make", "folder": str(folder), "layers": layers, "seed": seed}
        made = run_apart(start, run_leg, recipe)
        if "failed" in made:
            raise SystemExit(f"the model could not be made: {made['failed']}")
    samples: list[Leg] = []
    for leg in _legs(blocks, random.Random(seed)):
        if time.monotonic() - begun > budget_s:
            samples.append(leg | {"failed": "no time left"})
            continue
        samples.append(
            leg | run_apart(start, run_leg, leg | {"folder": str(folder), "device": device})
        )
        typer.echo(json.dumps(samples[-1]))
        (out / "samples.json").write_text(json.dumps(samples, indent=1))
    text = table(samples)
    (out / "table.md").write_text(text)
    typer.echo(text)


def _legs(blocks: int, order: random.Random) -> list[Leg]:
    """The families first, since they prove what the times are of; then warm, then cold."""
    legs: list[Leg] = [{"section": "families", "arm": "families", "block": 0, "half": 0}]
    for section, arms, count in (
        ("warm", ARMS, blocks),
        ("prompt", ("weightload", "transformers"), 1),
    ):
        for block in range(count):
            first = order.sample(arms, len(arms))
            for half, sequence in enumerate((first, first[::-1])):
                legs += [
                    {"section": section, "arm": arm, "block": block, "half": half}
                    for arm in sequence
                ]
    return legs


if __name__ == "__main__":
    app()
