"""From the models' samples to the table: paired ratios, memory, copies and equality."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Sample = dict[str, Any]

_MIB = 1 << 20
_OTHERS = ("transformers", "gb10-load-llm")
RATIO_MIN = 3.5
HOST_GROWTH_BYTES_MAX = 256 * _MIB


def table(samples: Sequence[Sample]) -> str:
    """Markdown: what was measured, what must be reached, and whether it was."""
    facts = next((sample for sample in samples if "torch" in sample), {})
    machine = (
        f"{facts.get('device')}, {facts.get('cores')} cores, kernel {facts.get('kernel')}, "
        f"torch {facts.get('torch')}, transformers {facts.get('transformers')}"
    )
    lines = [
        machine,
        "",
        "| what | median | min to max | pairs | must reach | reached |",
        "|---|---|---|---|---|---|",
        *_warm([sample for sample in samples if sample["section"] == "warm"]),
        *_prompt([sample for sample in samples if sample["section"] == "prompt"]),
        "",
        "| family | weights | tokens | zero-copy | on |",
        "|---|---|---|---|---|",
        *[row for sample in samples for row in _families(sample)],
    ]
    failed = [
        f"{sample['arm']} ({sample['section']}): {sample['failed']}"
        for sample in samples
        if "failed" in sample
    ]
    return "\n".join([*lines, "", *(f"- failed: {each}" for each in failed)]) + "\n"


def _by_half(samples: Sequence[Sample], arm: str, figure: str) -> dict[tuple[int, int], float]:
    return {
        (sample["block"], sample["half"]): sample[figure]
        for sample in samples
        if sample["arm"] == arm and figure in sample
    }


def _row(
    what: str, values: Sequence[float], bar: str = "", ok: Callable[[float], bool] | None = None
) -> str:
    if not values:
        return f"| {what} | no sample | | 0 | {bar} | no |"
    middle = median(values)
    verdict = "" if ok is None else ("yes" if ok(middle) else "**no**")
    spread = f"{min(values):.3g} to {max(values):.3g}"
    return f"| {what} | {middle:.3g} | {spread} | {len(values)} | {bar} | {verdict} |"


def _yes_or_no(what: str, bar: str, *, ok: bool) -> str:
    return f"| {what} | {'yes' if ok else 'no'} | | | {bar} | {'yes' if ok else '**no**'} |"


def _warm(samples: Sequence[Sample]) -> list[str]:
    arms = ("weightload", *_OTHERS, "placing")
    seconds = {arm: _by_half(samples, arm, "seconds") for arm in arms}
    growth = {arm: _by_half(samples, arm, "host_growth_bytes") for arm in arms}
    rows = [_row(f"warm, {arm}, s", list(seconds[arm].values())) for arm in arms]
    for arm in _OTHERS:
        ratios = [
            seconds[arm][half] / own
            for half, own in seconds["weightload"].items()
            if half in seconds[arm]
        ]
        what = f"warm, whole call, {arm}'s time over weightload's"
        rows.append(_row(what, ratios, f"{RATIO_MIN}", lambda value: value >= RATIO_MIN))
    rows += [
        _row(f"host peak growth, {arm}, MiB", [each / _MIB for each in growth[arm].values()])
        for arm in arms
    ]
    beyond = [
        (own - growth["placing"][half]) / _MIB
        for half, own in growth["weightload"].items()
        if half in growth["placing"]
    ]
    limit = HOST_GROWTH_BYTES_MAX / _MIB
    rows.append(
        _row(
            "host peak growth beyond transformers' own, MiB",
            beyond,
            f"at most {limit:.0f}",
            lambda value: value <= limit,
        )
    )
    rows += [
        _row(
            f"device memory reserved beyond the weights at the peak, {arm}, MiB",
            [
                (sample["device_reserved_bytes"] - sample["nbytes"]) / _MIB
                for sample in samples
                if sample["arm"] == arm and "device_reserved_bytes" in sample
            ],
        )
        for arm in ("weightload", *_OTHERS)
    ]
    return rows + _equal(samples)


def _equal(samples: Sequence[Sample]) -> list[str]:
    seen = [sample for sample in samples if "tokens" in sample]
    reports = [sample["report"] for sample in seen if sample.get("report")]
    fast = bool(reports) and all(
        report["how"] == "fast" and report["zero_copy"] == report["weights"] for report in reports
    )
    weights = reports[0]["weights"] if reports else 0
    several = len({sample["arm"] for sample in seen}) > 1
    tokens_equal = several and len({tuple(sample["tokens"]) for sample in seen}) == 1
    bits_equal = several and len({sample["bits"] for sample in seen}) == 1
    return [
        _yes_or_no(f"all {weights} weights where the upload put them", "no copy", ok=fast),
        _yes_or_no("sums of every weight's bits equal in all arms", "equal", ok=bits_equal),
        _yes_or_no("16 greedy tokens equal in all arms", "equal", ok=tokens_equal),
    ]


def _prompt(samples: Sequence[Sample]) -> list[str]:
    rows = []
    for arm in ("weightload", "transformers"):
        load = list(_by_half(samples, arm, "seconds").values())
        rows.append(_row(f"cold load, {arm}, s", load))
        served = list(_by_half(samples, arm, "prompt_seconds").values())
        rows.append(_row(f"32,768-token prompt right after it, {arm}, s", served))
    tokens = {tuple(sample["prompt_tokens"]) for sample in samples if "prompt_tokens" in sample}
    arms = {sample["arm"] for sample in samples if "prompt_tokens" in sample}
    same = len(tokens) == 1 and len(arms) > 1
    bits_equal = len(arms) > 1 and len({sample.get("bits") for sample in samples}) == 1
    return [
        *rows,
        _yes_or_no("sums of every weight's bits after it equal", "equal", ok=bits_equal),
        _yes_or_no("tokens after the long prompt equal", "equal", ok=same),
    ]


def _families(sample: Sample) -> list[str]:
    rows = []
    for name, row in sample.get("families", {}).items():
        if "failed" in row:
            rows.append(f"| {name} | **{row['failed']}** | | | |")
            continue
        tokens = {True: "equal", False: "**differ**", None: "-"}[row["tokens_equal"]]
        if row["not_served"]:
            tokens = f"not served ({row['not_served']})"
        different = row["different"]
        weights = f"**{len(different)} differ**" if different else "equal"
        where = ", ".join(row["devices"])
        count = f"{row['zero_copy']} of {row['weights']}"
        rows.append(f"| {name} | {weights} | {tokens} | {count} | {where} |")
    return rows
