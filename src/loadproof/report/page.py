"""The receipt as one self-contained page: pictures and tables, nothing fetched from anywhere."""

from __future__ import annotations

import html
import importlib.util
from typing import TYPE_CHECKING

from loadproof.report.markdown import (
    MEMORY_HEADER,
    TIME_HEADER,
    headline,
    memory_rows,
    provenance,
    time_rows,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from loadproof.report.receipt import Predicate, Statement

_COLOURS = {
    "proven": "#0a7d4b",
    "refuted": "#b3261e",
    "failed": "#b3261e",
    "inconclusive": "#8a6100",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto;
       max-width: 62rem; padding: 1.5rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #ddd; }
.answer { border-left: .4rem solid var(--answer); padding-left: 1rem; }
.answer b { color: var(--answer); }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #e6e6e6;
         vertical-align: top; overflow-wrap: anywhere; }
th { color: #555; font-weight: 600; }
th.number, td.number { text-align: right; overflow-wrap: normal;
         font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font-size: .85em; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; margin-top: .8rem; }
p.note { color: #555; font-size: .9rem; }
"""


def can_draw() -> bool:
    """Say whether the plots can be drawn here; they need matplotlib, which is an extra."""
    return importlib.util.find_spec("matplotlib") is not None


def render_page(statement: Statement) -> str:
    """Return the whole page as HTML."""
    predicate = statement.predicate
    return document(headline(predicate), "\n".join(_body(predicate, statement)))


def document(title: str, body: str) -> str:
    """Put a body into a page that needs nothing else."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Return an HTML table; all but the first ``words`` columns are figures."""
    head = "".join(
        f"<th{' class=number' if place >= words else ''}>{html.escape(each)}</th>"
        for place, each in enumerate(header)
    )
    body = "\n".join(
        "<tr>"
        + "".join(
            f"<td{' class=number' if place >= words else ''}>{html.escape(each)}</td>"
            for place, each in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def _body(predicate: Predicate, statement: Statement) -> Iterator[str]:
    conclusion = predicate.conclusion
    signed = "It is hashed, not signed, unless an envelope around it says otherwise."
    yield (
        f'<div class="answer" style="--answer: {_COLOURS[conclusion.answer]}">'
        f"<h1>{html.escape(headline(predicate))}</h1>"
        f"<p>Required: {conclusion.requirement}, and that is <b>{conclusion.answer}</b>. "
        f"Class: <b>{html.escape(predicate.device_class)}</b>. {signed}</p>"
    )
    yield from (
        f"<p><code>{each.code}</code> {html.escape(each.sentence)}</p>"
        for each in conclusion.reasons
    )
    yield "</div>\n<h2>Time</h2>"
    yield table(TIME_HEADER, time_rows(predicate), words=2)
    if can_draw():
        yield from _time_plots(predicate)
    else:
        yield '<p class="note">Plots need matplotlib; render the page again where it is.</p>'
    yield "<h2>Memory</h2>"
    yield table(MEMORY_HEADER, memory_rows(predicate))
    if can_draw():
        yield from _memory_plot(predicate)
    yield "<h2>Weights</h2>"
    yield (
        f"<p>{predicate.tensors} tensors, {predicate.checkpoint_bytes:,} bytes, digest of all "
        f"<code>{statement.subject[0].digest.sha256}</code></p>"
    )
    yield table(
        ("hash leg", "tensors that differ", "in poisoned memory", "digest"),
        _weight_rows(predicate),
    )
    yield "<h2>Controls</h2>"
    yield table(("control", "planted", "in", "seen", "found"), _control_rows(predicate), words=5)
    yield "<h2>What ran, and where</h2>\n<ul>"
    yield from (f"<li>{_with_code(line)}</li>" for line in provenance(predicate))
    yield "</ul>\n<h2>Not run</h2>\n<ul>"
    yield from (
        f"<li>{html.escape(each.what)}: {html.escape(each.why)}</li>" for each in predicate.not_run
    )
    yield "</ul>"


def _with_code(line: str) -> str:
    """Turn Markdown's backticks into code."""
    pieces = html.escape(line).split("`")
    return "".join(
        f"<code>{piece}</code>" if place % 2 else piece for place, piece in enumerate(pieces)
    )


def _time_plots(predicate: Predicate) -> Iterator[str]:
    from loadproof.report import plots  # noqa: PLC0415 -- only where matplotlib is

    if predicate.conclusion.verdict.contrasts:
        yield plots.intervals(predicate)
        yield (
            '<p class="note">Bars are exact intervals, diamonds estimates, ticks single blocks. '
            "Dashed: the policy's margin. Shaded: the same code again.</p>"
        )
        yield plots.times(predicate)


def _memory_plot(predicate: Predicate) -> Iterator[str]:
    from loadproof.report import plots  # noqa: PLC0415 -- only where matplotlib is

    drawn = plots.memory(predicate)
    if drawn is not None:
        yield drawn
        yield '<p class="note">Each arm\'s first leg of the first block, seen from outside.</p>'


def _weight_rows(predicate: Predicate) -> Iterator[tuple[str, ...]]:
    for each in predicate.weights:
        poisoned = "unknown" if each.poisoned_bytes is None else f"{each.poisoned_bytes:,} bytes"
        yield each.arm, str(len(each.differences)), poisoned, each.manifest[:16] + "…"
        for one in each.differences[:10]:
            yield f"{one.tensor}: {one.sentence()}", "", "", ""


def _control_rows(predicate: Predicate) -> Iterator[tuple[str, ...]]:
    for each in predicate.controls:
        seen = "; ".join(each.seen) or "nothing"
        yield each.name, each.planted, each.tensor, seen, "yes" if each.found else "NO"
