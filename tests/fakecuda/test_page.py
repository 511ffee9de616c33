"""What the documentation of the fake shows is what happens."""

from pathlib import Path

import pytest

from fakecuda import HAZARDS

pytest_plugins = ["pytester"]

_PAGE = Path(__file__).parents[2] / "docs" / "fakecuda.md"


def test_the_example_catches_its_bug(pytester: pytest.Pytester) -> None:
    """The first example of the page, run as it stands, fails for the reason it gives."""
    example = _PAGE.read_text().split("```python\n")[1].split("```")[0]
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 10
    pytester.makepyfile(example)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=1, errors=1)
    result.stdout.fnmatch_lines(["*PIN-REUSE-BEFORE-COPY*bytes*of pinned0*"])


def test_the_page_lists_every_hazard() -> None:
    """Each hazard stands on the page with the words that a report uses."""
    page = _PAGE.read_text()
    assert all(f"| `{name}` | {rule} |" in page for name, rule in HAZARDS.items())
