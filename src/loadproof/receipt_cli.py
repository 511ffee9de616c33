"""``loadproof receipt verify | show | diff``: reading what a qualification left."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import msgspec
import typer

from loadproof.errors import ReceiptError
from loadproof.given import GIVEN
from loadproof.report.changes import changes
from loadproof.report.envelope import Opened, open_receipt
from loadproof.report.files import write_whole
from loadproof.report.league import RECORD_TYPE, decode_league, render_league, render_league_page
from loadproof.report.markdown import headline, render
from loadproof.report.page import render_page
from loadproof.report.receipt import json_schema

app = typer.Typer(no_args_is_help=True, help="Read receipts: verify, show, compare.")

REFUSED = 1
_LEAGUE = (
    "This is no receipt but the record of a league, which ranks loaders and proves nothing; "
    "`loadproof receipt show` prints it."
)
_File = Annotated[Path, typer.Argument(help="A receipt, bare or in its envelope.", **GIVEN)]
_Key = Annotated[
    Path | None, typer.Option(help="PEM of the public key that must have signed.", **GIVEN)
]


@app.command()
def verify(
    file: _File,
    key: _Key = None,
    require: Annotated[
        str | None, typer.Option(help="Class that it must be of, such as gb10.")
    ] = None,
) -> None:
    """Check a receipt's form, figures, class and signature, as far as they are asked for.

    Exit status: 0 it holds, 1 it does not, 2 it cannot be read.
    """
    content = _read(file)
    try:
        opened = open_receipt(content, key)
    except ReceiptError as error:
        _refuse(_LEAGUE if RECORD_TYPE.encode() in content else error)
    predicate = opened.statement.predicate
    if require is not None and predicate.device_class != require:
        _refuse(
            f"This receipt is of class {predicate.device_class!r}, and {require!r} was required: "
            "it says nothing about that hardware."
        )
    typer.echo(f"valid, {opened.integrity}, class {predicate.device_class}: {headline(predicate)}")


@app.command()
def show(
    file: _File,
    html: Annotated[
        Path | None, typer.Option(help="Write the page there instead.", **GIVEN)
    ] = None,
) -> None:
    """Print a receipt, or the record of a league, as Markdown, or write it as a page."""
    content = _read(file)
    try:
        if RECORD_TYPE.encode() in content:
            record = decode_league(content)
            text, page = render_league(record), render_league_page
            whole = page(record) if html else ""
        else:
            statement = open_receipt(content).statement
            text = render(statement)
            whole = render_page(statement) if html else ""
    except ReceiptError as error:
        _refuse(error)
    if html is None:
        typer.echo(text)
        return
    try:
        write_whole(html, whole.encode())
    except ReceiptError as error:
        _refuse(error)
    typer.echo(f"Page: {html}")


@app.command()
def diff(old: _File, new: _File) -> None:
    """Print every field in which two receipts differ; raw samples are left out.

    Exit status: 0 nothing differs, 1 something does, 2 one cannot be read.
    """
    opened: list[Opened] = []
    for file in (old, new):
        try:
            opened.append(open_receipt(_read(file)))
        except ReceiptError as error:
            _refuse(f"{file}: {error}")
    found = changes(opened[0].statement, opened[1].statement)
    for field, before, after in found:
        typer.echo(f"{field}: {before} -> {after}")
    if not found:
        typer.echo("Nothing differs but the samples.")
    raise typer.Exit(REFUSED if found else 0)


@app.command()
def schema() -> None:
    """Print the JSON Schema that every receipt matches."""
    typer.echo(msgspec.json.format(msgspec.json.encode(json_schema())).decode())


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        typer.echo(f"loadproof: {file} cannot be read: {error.strerror}.", err=True)
        raise typer.Exit(2) from None


def _refuse(why: object) -> NoReturn:
    typer.echo(f"loadproof: {why}", err=True)
    raise typer.Exit(REFUSED)
