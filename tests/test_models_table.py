"""The models' table: ratios within a half block, and a `no` for whatever falls short."""

from __future__ import annotations

from typing import Any

from qualification.models_table import table


def _sample(arm: str, half: int, seconds: float, **more: Any) -> dict[str, Any]:
    sample = {
        "section": "warm",
        "arm": arm,
        "block": 0,
        "half": half,
        "seconds": seconds,
        "host_growth_bytes": 10 << 20,
        "nbytes": 100,
        "bits": 5,
        "tokens": [1, 2],
        "torch": "2",
    }
    return sample | more


def _samples(slow: float, **more: Any) -> list[dict[str, Any]]:
    report = {"how": "fast", "zero_copy": 3, "weights": 3}
    return [
        each
        for half in (0, 1)
        for each in (
            _sample("weightload", half, 0.25 * (half + 1), report=report, **more),
            _sample("transformers", half, slow * (half + 1)),
            _sample("placing", half, 0.1),
        )
    ]


def _rows(samples: list[dict[str, Any]], what: str) -> list[str]:
    return [line for line in table(samples).splitlines() if what in line]


def test_ratios_are_paired_and_judged() -> None:
    """A machine that is half as fast in one half block changes no ratio."""
    (row,) = _rows(_samples(1.0), "transformers's time over")
    assert "| 4 | 4 to 4 | 2 | 3.5 | yes |" in row
    (row,) = _rows(_samples(0.5), "transformers's time over")
    assert row.endswith("| **no** |")
    (row,) = _rows(_samples(1.0), "gb10-load-llm's time over")
    assert "no sample" in row


def test_other_weights_or_tokens_are_a_no() -> None:
    """One arm with other bits, or other tokens, and the row says so."""
    (row,) = _rows(_samples(1.0), "bits equal")
    assert row.endswith("| yes |")
    (row,) = _rows(_samples(1.0, bits=6), "bits equal")
    assert row.endswith("| **no** |")
    (row,) = _rows(_samples(1.0, tokens=[1, 3]), "greedy tokens equal")
    assert row.endswith("| **no** |")


def test_a_leg_that_failed_is_listed() -> None:
    """A failure is shown with its reason and has no part in a ratio."""
    failed = {"section": "warm", "arm": "gb10-load-llm", "block": 0, "half": 0, "failed": "gone"}
    assert "- failed: gb10-load-llm (warm): gone" in table([*_samples(1.0), failed])


def test_a_family_that_differs_stands_out() -> None:
    """Differing weights, tokens, and a family that could not be loaded."""
    row = {
        "different": ["a"],
        "tokens_equal": False,
        "not_served": "",
        "devices": ["cuda:0"],
        "zero_copy": 1,
        "weights": 2,
    }
    families = {"one": row, "two": {"failed": "ValueError: no"}}
    sample = {"section": "families", "arm": "families", "families": families}
    text = table([sample])
    assert "| one | **1 differ** | **differ** | 1 of 2 | cuda:0 |" in text
    assert "| two | **ValueError: no** |" in text
