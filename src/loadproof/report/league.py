"""What a league leaves: its record as JSON, and the same as Markdown and as a page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Final, Literal

import msgspec

from loadproof.errors import ReceiptError
from loadproof.judge.standing import Standing
from loadproof.measure.cache_state import Wanted
from loadproof.measure.environment import Environment
from loadproof.measure.league import Entry
from loadproof.measure.legs import Leg
from loadproof.measure.messages import DeviceFacts
from loadproof.plan.policy import Policy
from loadproof.report.markdown import table
from loadproof.report.marks import HTML, MARKDOWN
from loadproof.report.page import can_draw, document, plot
from loadproof.report.page import table as html_table
from loadproof.report.privacy import first_private_text

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORD_TYPE: Final = "urn:loadproof:league:v1"
HEADER = (
    "loader",
    "median",
    "GB/s",
    "against the first",
    "interval",
    "host peak",
    "drop of MemAvailable",
    "weights",
)
_MIB = 1 << 20


class LeagueRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A league: who ran, on what, and every leg.

    Attributes:
        type_: What kind of record this is.
        device_class: As in a receipt; only ``gb10`` speaks of a GB10.
        policy: Whose conditions and confidence were used.
        blocks: Mirrored blocks that were fixed beforehand.
        seed: Where the order came from.
        cache: The page-cache state that every leg was to start from.
        device: What the device is; None when no leg got that far.
        environment: Machine and software.
        checkpoint_bytes: Bytes of all tensors.
        tensors: How many there are.
        standings: The table, the fastest first.
        entries: The loaders as they were asked for.
        legs: Every leg in order, with its raw samples.
    """

    type_: Literal["urn:loadproof:league:v1"] = msgspec.field(name="_type")
    device_class: str
    policy: Policy
    blocks: int
    seed: int
    cache: Wanted
    device: DeviceFacts | None
    environment: Environment
    checkpoint_bytes: int
    tensors: int
    standings: tuple[Standing, ...]
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(min_length=1)]
    legs: tuple[Leg, ...]


def encode_league(record: LeagueRecord) -> bytes:
    """Return a record's text.

    Raises:
        ReceiptError: Something that names one would be in it.
    """
    found = first_private_text(msgspec.to_builtins(record))
    if found is not None:
        raise ReceiptError(f"This record would name a place on a machine: {found!r}.")
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def decode_league(text: bytes) -> LeagueRecord:
    """Read a record strictly.

    Raises:
        ReceiptError: It is not a record of a league.
    """
    try:
        return msgspec.json.decode(text, type=LeagueRecord)
    except msgspec.DecodeError as error:
        raise ReceiptError(f"This is not a valid record of a league: {error}.") from error


def league_rows(record: LeagueRecord) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table, under ``HEADER``."""
    for line in record.standings:
        if line.median_s is None:
            yield line.name, "no time", "", "", "", "", "", line.weights
            continue
        ratio = interval = ""
        if line.against_first is not None:
            found = line.against_first
            ratio = f"{math.exp(found.estimate):.2f}x"
            enough = found.confidence >= record.policy.confidence
            interval = (
                "too few blocks"
                if not enough
                else (
                    f"{math.exp(found.low):.2f}x to {math.exp(found.high):.2f}x "
                    f"({found.confidence:.1%})"
                )
            )
        yield (
            line.name,
            f"{1000 * line.median_s:.1f} ms",
            f"{_median_gbs(record, line):.2f}",
            ratio,
            interval,
            _mib(line.host_peak_bytes),
            _mib(line.available_drop_bytes),
            line.weights,
        )


def render_league(record: LeagueRecord) -> str:
    """Return the league as Markdown."""
    text = MARKDOWN.text
    lines = [f"# Loaders on {text(record.device_class)}\n", *map(text, _notes(record)), ""]
    lines += table(HEADER, league_rows(record))
    lines += ["", *(f"- {text(each)}" for each in _failures(record))]
    return "\n".join(lines) + "\n"


def render_league_page(record: LeagueRecord) -> str:
    """Return the league as one self-contained page."""
    title = f"Loaders on {record.device_class}"
    parts = [f"<h1>{HTML.text(title)}</h1>"]
    parts += [f"<p>{HTML.text(each)}</p>" for each in _notes(record)]
    parts.append(html_table(HEADER, league_rows(record), figures=range(1, len(HEADER))))
    timed = [each for each in record.standings if each.rates_gbs]
    if can_draw() and timed:
        from loadproof.report import plots  # noqa: PLC0415 -- only where matplotlib is

        bars = [plots.Bar(each.name, each.rates_gbs, _median_gbs(record, each)) for each in timed]
        parts.append(plot(plots.league(bars)))
    parts.append("<ul>")
    parts += [f"<li>{HTML.text(each)}</li>" for each in _failures(record)]
    parts.append("</ul>")
    return document(title, "\n".join(parts))


def _median_gbs(record: LeagueRecord, line: Standing) -> float | None:
    """Return the rate of the median load, for the table and the plot alike."""
    return None if line.median_s is None else record.checkpoint_bytes / line.median_s / 1e9


def _notes(record: LeagueRecord) -> Iterator[str]:
    yield (
        f"{record.tensors} tensors, {record.checkpoint_bytes:,} bytes, {record.blocks} mirrored "
        f"blocks, seed {record.seed}, page cache {record.cache}; one fresh process per load, "
        "from the call until the device has everything, imports and context made before."
    )
    yield (
        f"Ratios are to {record.entries[0].name}, above 1 is faster. A league ranks and "
        "qualifies nothing; hashed, not signed."
    )


def _failures(record: LeagueRecord) -> Iterator[str]:
    for each in record.entries:
        if each.failure is not None:
            yield f"{each.name}: {each.failure}"
        for one in each.differences[:3]:
            yield f"{each.name}: tensor {one.tensor!r}: {one.sentence()}"
        if len(each.differences) > 3:
            yield f"{each.name}: and {len(each.differences) - 3} more tensors"
    marked = [leg for leg in record.legs if leg.conditions.marks]
    if marked:
        yield (
            f"{len(marked)} legs ran outside the policy's band, first one of {marked[0].arm}: "
            f"{marked[0].conditions.marks[0]}"
        )


def _mib(value: int | None) -> str:
    return "absent" if value is None else f"{value / _MIB:.0f} MiB"
