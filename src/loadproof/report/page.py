"""The receipt as one self-contained page: pictures and tables, nothing fetched from anywhere."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from loadproof.plan.schedule import BASELINE, CANDIDATE
from loadproof.report.markdown import (
    MEMORY_HEADER,
    MEMORY_NOTE,
    SERVED_HEADER,
    TIME_HEADER,
    headline,
    memory_rows,
    provenance,
    served_rows,
    served_sentences,
    time_rows,
)
from loadproof.report.marks import HTML

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from loadproof.report.receipt import Predicate, Statement

# Every tensor that differs is shown beside these.
_TENSORS_SHOWN = 200
_STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --faint: #555; --line: #e2e2e2; }
.proven { --answer: #0a7d4b; }
.refuted, .failed { --answer: #b3261e; }
.inconclusive { --answer: #8a6100; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #181818; --faint: #aaa; --line: #3a3a3a; }
  .proven { --answer: #5fd0a0; }
  .refuted, .failed { --answer: #ff8a80; }
  .inconclusive { --answer: #e0b040; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       margin: 0 auto; max-width: 62rem; padding: 1.5rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
.answer { border-left: .4rem solid var(--answer); padding-left: 1rem; }
.answer b { color: var(--answer); }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line);
         vertical-align: top; }
th { color: var(--faint); font-weight: 600; vertical-align: bottom; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
p, li, code, td { overflow-wrap: anywhere; }
td:not(.number) { min-width: 4rem; }
td:first-child { min-width: 5.5rem; }
td:last-child:not(.number) { min-width: 11rem; }
code { font-size: .85em; }
svg { display: block; width: 100%; min-width: 40rem; height: auto; }
p.note { color: var(--faint); font-size: .9rem; }
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
        f"<title>{HTML.text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], figures: Collection[int] = ()
) -> str:
    """Return an HTML table; the columns in ``figures`` hold figures, the others words."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if place in figures else ''}>{HTML.text(each)}</{tag}>"
            for place, each in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class=wide><table>\n<tr>{cells('th', header)}</tr>\n{body}\n</table></div>"


def plot(svg: str) -> str:
    """Put a plot where it can be moved sideways on a narrow screen, its text still readable."""
    return f"<div class=wide>{svg}</div>"


def _body(predicate: Predicate, statement: Statement) -> Iterator[str]:
    conclusion = predicate.conclusion
    signed = "It is hashed, not signed, unless an envelope around it says otherwise."
    yield (
        f'<div class="answer {conclusion.answer}">'
        f"<h1>{HTML.text(headline(predicate))}</h1>"
        f"<p>Required: {conclusion.requirement}, and that is <b>{conclusion.answer}</b>. "
        f"Class: <b>{HTML.text(predicate.device_class)}</b>. {signed}</p>"
    )
    yield from (
        f"<p>{HTML.code(each.code)} {HTML.text(each.sentence)}</p>" for each in conclusion.reasons
    )
    yield "</div>\n<h2>Time</h2>"
    yield table(TIME_HEADER, time_rows(predicate), figures=range(2, 6))
    if can_draw():
        yield from _time_plots(predicate)
    else:
        yield '<p class="note">Plots need matplotlib; render the page again where it is.</p>'
    yield "<h2>Memory</h2>"
    yield table(MEMORY_HEADER, memory_rows(predicate), figures=range(1, 7))
    yield f'<p class="note">{MEMORY_NOTE}</p>'
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
        figures=range(1, 3),
    )
    yield "<h2>Served output</h2>"
    yield from (f"<p>{HTML.text(each)}</p>" for each in served_sentences(predicate))
    if any(served_rows(predicate)):
        yield table(SERVED_HEADER, served_rows(predicate), figures=(1, 3, 4, 5))
    yield "<h2>Controls</h2>"
    if predicate.controls:
        yield table(("control", "planted", "in", "seen", "found"), _control_rows(predicate))
    else:
        yield "<p>None was planted; the reason is under what was not run.</p>"
    yield "<h2>What ran, and where</h2>\n<ul>"
    yield from (f"<li>{line}</li>" for line in provenance(predicate, HTML))
    yield "</ul>\n<h2>Not run</h2>\n<ul>"
    yield from (
        f"<li>{HTML.text(each.what)}: {HTML.text(each.why)}</li>" for each in predicate.not_run
    )
    yield "</ul>\n<h2>Every tensor</h2>"
    yield from _tensors(predicate)


def _tensors(predicate: Predicate) -> Iterator[str]:
    """Show every tensor that differs, then the first others, and say how many are not shown."""
    wrong = {
        arm: {
            each.tensor: each.kind
            for check in predicate.weights
            if check.arm == arm
            for each in check.differences
        }
        for arm in (BASELINE, CANDIDATE)
    }
    hashed = {check.arm for check in predicate.weights}
    differing = {name for each in wrong.values() for name in each}
    lines = sorted(predicate.tensor_lines, key=lambda line: line.name not in differing)
    shown = [
        line
        for place, line in enumerate(lines)
        if place < _TENSORS_SHOWN or line.name in differing
    ]
    yield table(
        ("tensor", BASELINE, CANDIDATE, "dtype", "shape", "bytes", "SHA-256 in the files"),
        (
            (
                line.name,
                *(
                    wrong[arm].get(line.name, "equal" if arm in hashed else "not hashed")
                    for arm in (BASELINE, CANDIDATE)
                ),
                line.dtype,
                str(list(line.shape)),
                f"{line.nbytes:,}",
                line.sha256[:16] + "…",
            )
            for line in shown
        ),
        figures=(5,),
    )
    left_out = predicate.tensors - len(shown)
    listed = f"The receipt lists {len(predicate.tensor_lines):,} tensors with their whole digests."
    if left_out:
        hidden = differing - {each.name for each in shown}
        differ = f"{len(hidden):,} of them differ" if hidden else "none of them differs"
        listed = f"{left_out:,} more tensors are not shown here; {differ}. {listed}"
    yield f'<p class="note">{listed}</p>'


def _time_plots(predicate: Predicate) -> Iterator[str]:
    from loadproof.report import plots  # noqa: PLC0415 -- only where matplotlib is

    if predicate.conclusion.verdict.contrasts:
        yield plot(plots.intervals(predicate))
        yield (
            '<p class="note">Bars are exact intervals, diamonds estimates, ticks single blocks. '
            "Dashed: the policy's margin. Shaded: the same code again.</p>"
        )
        yield plot(plots.times(predicate))


def _memory_plot(predicate: Predicate) -> Iterator[str]:
    from loadproof.report import plots  # noqa: PLC0415 -- only where matplotlib is

    drawn = plots.memory(predicate)
    if drawn is not None:
        yield plot(drawn)
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
