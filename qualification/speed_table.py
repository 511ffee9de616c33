"""From samples to the table: paired ratios, their median and their spread."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Sample = dict[str, Any]
Half = tuple[int, int]

_MIB = 1 << 20


def table(samples: Sequence[Sample]) -> str:
    """Markdown: what was measured, what must be reached, and whether it was."""
    present = {sample["section"] for sample in samples}
    lines = [
        _header(samples),
        "",
        "| what | median | min to max | pairs | must reach | reached |",
        "|---|---|---|---|---|---|",
    ]
    for section, rows in (
        ("warm", _warm),
        ("cold", _cold),
        ("memory", _memory),
        ("shapes", _shapes),
        ("verify", _verify),
    ):
        if section in present:
            lines += rows([sample for sample in samples if sample["section"] == section])
    return "\n".join(lines) + "\n"


def _header(samples: Sequence[Sample]) -> str:
    facts = next((sample for sample in samples if "device" in sample), None)
    if facts is None:
        return "No leg gave a result."
    return (
        f"{facts['device']}, {facts['cores']} cores, kernel {facts['kernel']}, driver API "
        f"{facts['driver']}, torch {facts['torch']}"
    )


def _by_half(samples: Iterable[Sample], arm: str, figure: str) -> dict[Half, float]:
    return {
        (sample["block"], sample["half"]): sample[figure]
        for sample in samples
        if sample["arm"] == arm and figure in sample
    }


def _ratios(above: dict[Half, float], below: dict[Half, float]) -> list[float]:
    return [above[half] / below[half] for half in above if half in below]


def _row(what: str, values: Sequence[float], bar: str, ok: Callable[[float], bool] | None) -> str:
    if not values:
        return f"| {what} | no sample | | 0 | {bar} | no |"
    middle = median(values)
    verdict = "" if ok is None else ("yes" if ok(middle) else "**no**")
    spread = f"{min(values):.3g} to {max(values):.3g}"
    return f"| {what} | {middle:.3g} | {spread} | {len(values)} | {bar} | {verdict} |"


def _warm(samples: list[Sample]) -> list[str]:
    ours = _by_half(samples, "weightload", "gbs")
    peers = sorted({s["arm"] for s in samples} - {"weightload", "limits"})
    ratios = {peer: _ratios(ours, _by_half(samples, peer, "gbs")) for peer in peers}
    measured = [peer for peer in peers if ratios[peer]]
    fastest = min(measured, key=lambda peer: median(ratios[peer]), default=None)
    rows = [_row("warm, weightload, GB/s", list(ours.values()), "", None)]
    for peer in peers:
        speed = list(_by_half(samples, peer, "gbs").values())
        rows.append(_row(f"warm, {peer}, GB/s", speed, "", None))
    for peer in peers:
        bar = "1.15 (the fastest peer)" if peer == fastest else ""
        check = (lambda value: value >= 1.15) if peer == fastest else None
        rows.append(_row(f"warm, whole call, weightload over {peer}", ratios[peer], bar, check))
    limit = _by_half(samples, "limits", "host_to_device_gbs")
    streaming = {
        (s["block"], s["half"]): s["nbytes"] / s["report"]["phases_s"]["stream"] / 1e9
        for s in samples
        if s["arm"] == "weightload" and "report" in s
    }
    rows.append(_row("pinned host to device, GB/s", list(limit.values()), "", None))
    page_cache = list(_by_half(samples, "limits", "page_cache_gbs").values())
    rows.append(_row("page cache reads, 12 threads, GB/s", page_cache, "", None))
    rows.append(
        _row(
            "warm, streaming phase over pinned host to device",
            _ratios(streaming, limit),
            "0.90",
            lambda value: value >= 0.90,
        )
    )
    rows.append(
        _row(
            "warm, whole call over pinned host to device",
            _ratios(ours, limit),
            "0.75",
            lambda value: value >= 0.75,
        )
    )
    return rows


def _cold(samples: list[Sample]) -> list[str]:
    disk = _by_half(samples, "limits", "disk_gbs")
    ours = _by_half(samples, "weightload", "gbs")
    resident = [s["resident_share"] for s in samples if s["arm"] == "weightload"]
    read = [
        s["disk_read_bytes"] / s["nbytes"]
        for s in samples
        if s["arm"] == "weightload" and "nbytes" in s
    ]
    return [
        _row("cold, share resident beforehand", resident, "0", lambda value: value < 0.01),
        _row("cold, bytes read from disk over bytes loaded", read, "1", lambda v: 0.99 < v < 1.02),
        _row("O_DIRECT disk, GB/s", list(disk.values()), "", None),
        _row("cold, weightload, GB/s", list(ours.values()), "", None),
        _row("cold, over O_DIRECT disk", _ratios(ours, disk), "0.97", lambda value: value >= 0.97),
    ]


def _memory(samples: list[Sample]) -> list[str]:
    good = [s for s in samples if "report" in s]
    pinned = [s["report"]["pinned_bytes"] / _MIB for s in good]
    beyond = [s["device_beyond_weights_bytes"] / _MIB for s in good]
    host = [s["host_growth_bytes"] / _MIB for s in good]
    return [
        _row("pinned memory, MiB", pinned, "at most 128", lambda value: value <= 128),
        _row("device memory beyond weights, MiB", beyond, "at most 64", lambda value: value <= 64),
        _row("host peak growth, MiB", host, "at most 256", lambda value: value <= 256),
    ]


def _shapes(samples: list[Sample]) -> list[str]:
    base = _by_half(samples, "base", "gbs")
    small = _by_half(samples, "many-small", "gbs")
    large = _by_half(samples, "one-large", "gbs")
    ours = _by_half(samples, "many-small", "seconds")
    peers = [
        _row(
            f"60,000 tensors of 16 bytes, {peer}'s time over ours",
            _ratios(_by_half(samples, peer, "seconds"), ours),
            "",
            None,
        )
        for peer in sorted({s["arm"] for s in samples} - {"base", "many-small", "one-large"})
    ]
    return [
        *peers,
        _row("60,000 tensors of 16 bytes, s", _seconds(samples, "many-small"), "", None),
        _row(
            "60,000 tensors of 16 bytes, time per byte over the base case's",
            _ratios(base, small),
            "at most 10",
            lambda value: value <= 10,
        ),
        _row(
            "one tensor of 3 GiB, time per byte over the base case's",
            _ratios(base, large),
            "at most 1",
            lambda value: value <= 1,
        ),
    ]


def _seconds(samples: list[Sample], arm: str) -> list[float]:
    return list(_by_half(samples, arm, "seconds").values())


def _verify(samples: list[Sample]) -> list[str]:
    plain = _by_half(samples, "weightload", "seconds")
    verified = _by_half(samples, "weightload-verify", "seconds")
    rates = list(_by_half(samples, "limits", "hashing_gbs").values())
    one = list(_by_half(samples, "limits", "hashing_one_thread_gbs").values())
    tensors = _by_half(samples, "limits", "hashing_tensors_s")
    added = [
        (verified[half] - plain[half]) / tensors[half]
        for half in verified
        if half in plain and half in tensors
    ]
    return [
        _row("SHA-256 of equal pieces on all cores, GB/s", rates, "", None),
        _row("SHA-256 on one core, GB/s", one, "", None),
        _row("SHA-256 of these tensors on all cores, s", list(tensors.values()), "", None),
        _row("verify, s", list(verified.values()), "", None),
        _row(
            "verify, time added over hashing these tensors on all cores",
            added,
            "at most 1",
            lambda value: value <= 1,
        ),
    ]
