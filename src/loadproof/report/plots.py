"""The plots of the page, as SVG text: times by block, intervals, memory over time, a league.

Text stays text (searchable, and in the reader's own font), ids are seeded, and no date is
written, so that one receipt always gives one page.
"""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from loadproof.measure.messages import Result
from loadproof.plan.schedule import AGAIN, ARMS, CANDIDATE, DELAYED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from loadproof.measure.legs import Leg
    from loadproof.report.receipt import Predicate

# Okabe and Ito's colours, told apart by colour-blind readers too.
COLOURS = {"A": "#555555", "A'": "#56B4E9", "B": "#D55E00", "S": "#009E73"}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "loadproof",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#999999",
    "axes.labelcolor": "#333333",
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
}
_MIB = 1 << 20
_KINDS = {
    "available_drop": ("drop of MemAvailable", "#000000"),
    "process_anonymous": ("anonymous", "#D55E00"),
    "process_shmem": ("shared and pinned", "#0072B2"),
    "process_file": ("file-backed", "#E69F00"),
}


class Bar(NamedTuple):
    """One loader of a league: its name, each of its rates and the median's, in GB/s."""

    name: str
    rates: tuple[float, ...]
    median: float | None


def times(predicate: Predicate) -> str:
    """Draw every leg's load time by block, one row of points per arm."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 3.2), layout="constrained")
        axes = figure.subplots()
        for place, arm in enumerate(ARMS):
            for half, marker in ((0, "o"), (1, "s")):
                chosen = [
                    (leg.block, 1000 * leg.outcome.elapsed_s)
                    for leg in _timed(predicate.legs, arm)
                    if leg.half == half and isinstance(leg.outcome, Result)
                ]
                axes.plot(
                    [(block or 0) + 1 + (place - 1.5) * 0.16 for block, _ in chosen],
                    [elapsed for _, elapsed in chosen],
                    marker,
                    color=COLOURS[arm],
                    markersize=4.5,
                    alpha=0.85,
                    label=f"{arm}, {'mirror' if half else 'first'} half",
                )
        axes.set_xlabel("mirrored block")
        axes.set_ylabel("load time, ms")
        axes.set_xlim(0.4, predicate.blocks + 0.6)
        figure.legend(loc="outside right center", fontsize=8)
        return _svg(figure)


def intervals(predicate: Predicate) -> str:
    """Draw each arm's interval beside the margin and the band of the same code again."""
    found = predicate.conclusion.verdict.contrasts
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 2.4), layout="constrained")
        axes = figure.subplots()
        margin = predicate.policy.margin_log_ratio
        again = found[AGAIN]
        axes.axvspan(_change(again.high), _change(again.low), color=COLOURS[AGAIN], alpha=0.15)
        axes.axvline(0, color="#555555", linewidth=1)
        for side in (margin, -margin):
            axes.axvline(_change(side), color="#555555", linewidth=1, linestyle="--")
        names = (DELAYED, CANDIDATE, AGAIN)
        for row, arm in enumerate(names):
            one = found[arm]
            ends = [_change(one.high), _change(one.low)]
            axes.plot(ends, [row, row], color=COLOURS[arm], linewidth=3, solid_capstyle="butt")
            axes.plot(_change(one.estimate), row, "D", color=COLOURS[arm], markersize=6)
            axes.plot(
                [_change(value) for value in one.per_block],
                [row + 0.22] * len(one.per_block),
                "|",
                color=COLOURS[arm],
                markersize=7,
                alpha=0.7,
            )
        words = {AGAIN: "A' (same code)", CANDIDATE: "B (candidate)", DELAYED: "S (delayed)"}
        axes.set_yticks(range(len(names)), [words[arm] for arm in names])
        axes.set_ylim(-0.5, len(names) - 0.3)
        axes.set_xlabel("change of load time against A, % (left is faster)")
        return _svg(figure)


def memory(predicate: Predicate) -> str | None:
    """Draw the memory curves of the first block, one panel per arm; None when there are none."""
    curves = {
        arm: leg.memory.curve
        for arm in ARMS
        for leg in _timed(predicate.legs, arm)
        if leg.block == 0 and leg.half == 0 and leg.memory.curve
    }
    if not curves:
        return None
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 2.8), layout="constrained")
        panels = figure.subplots(1, len(curves), sharey=True, squeeze=False)[0]
        for axes, (arm, curve) in zip(panels, curves.items(), strict=True):
            for field, (label, colour) in _KINDS.items():
                values = [getattr(point, field) for point in curve]
                known = [
                    (point.at_s, value / _MIB)
                    for point, value in zip(curve, values, strict=True)
                    if value is not None
                ]
                axes.plot(*_columns(known), color=colour, linewidth=1.3, label=label)
            axes.set_title(arm, fontsize=10, loc="left")
            axes.set_xlabel("s")
        panels[0].set_ylabel("MiB")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
        return _svg(figure)


def league(bars: Sequence[Bar]) -> str:
    """Draw every leg's rate, one row per loader, the fastest on top."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 0.8 + 0.38 * len(bars)), layout="constrained")
        axes = figure.subplots()
        for row, bar in enumerate(reversed(bars)):
            if bar.median is not None:
                axes.barh(row, bar.median, color="#56B4E9", alpha=0.35, height=0.6)
            axes.plot(bar.rates, [row] * len(bar.rates), "|", color="#0072B2", markersize=9)
        axes.set_yticks(range(len(bars)), [bar.name for bar in reversed(bars)])
        axes.set_xlim(left=0)
        axes.set_xlabel("GB/s, every leg and the median")
        return _svg(figure)


def _timed(legs: Iterable[Leg], arm: str) -> list[Leg]:
    return [leg for leg in legs if leg.purpose == "time" and leg.arm == arm]


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def _change(log_ratio: float) -> float:
    return 100 * math.expm1(-log_ratio)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    nothing: dict[str, Any] = {"Date": None, "Creator": None}
    figure.savefig(text, format="svg", metadata=nothing)
    whole = text.getvalue()
    return whole[whole.index("<svg") :]
