"""Families of models on the fake device: equal weights, equal tokens, nothing copied twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
import transformers

from fixtures.model_equality import differences, ties
from fixtures.models import FAMILIES
from fixtures.summary import TABLES
from tests.weightload.model_support import on_fake, stored, written
from weightload import ModelReport, greedy_tokens, own_outputs

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT, NEW_TOKENS = [5, 9, 31, 7], 12
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}

# An 8-bit checkpoint is worked out into 16 bits where there is no GPU, and that is said.
pytestmark = pytest.mark.filterwarnings("ignore:.*FP8.*:UserWarning")


class Row(NamedTuple):
    """What one family showed."""

    family: str
    dtype: str
    weights_equal: bool
    tokens_equal: bool | None
    report: ModelReport


@pytest.fixture(scope="module")
def rows(request: pytest.FixtureRequest) -> Iterator[list[Row]]:
    """Rows of the family table, printed when all families were seen."""
    found: list[Row] = []
    yield found
    lines = [f"{'family':<20} {'stored':<9} {'weights':<8} {'tokens':<8} zero-copy"]
    for row in found:
        tokens = {True: "equal", False: "DIFFER", None: "-"}[row.tokens_equal]
        weights = "equal" if row.weights_equal else "DIFFER"
        count = f"{row.report.zero_copy} of {row.report.weights}"
        lines.append(f"{row.family:<20} {row.dtype:<9} {weights:<8} {tokens:<8} {count}")
    request.config.stash.setdefault(TABLES, {})["models on the fake device"] = "\n".join(lines)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_from_pretrained_s(
    name: str, rows: list[Row], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every weight and buffer bit for bit, ties, outputs, tokens, config and copies."""
    family = FAMILIES[name]
    folder = written(tmp_path_factory.getbasetemp() / "families", name)
    loader = getattr(transformers, family.loader)
    expected = loader.from_pretrained(folder)
    model = on_fake(loader, folder)
    report = model.weightload_report
    weights_equal = not differences(model, expected)
    tokens_equal = None
    if model.can_generate():
        served = [greedy_tokens(each, PROMPT, NEW_TOKENS) for each in (model, expected)]
        tokens_equal = served[0] == served[1]
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()
        assert model.generation_config.repetition_penalty == 1.25
    rows.append(Row(name, str(family.dtype)[6:], weights_equal, tokens_equal, report))
    assert weights_equal
    assert differences(model, expected) == []
    assert ties(model) == ties(expected)
    assert tokens_equal is not False
    ours, theirs = own_outputs(model, family.inputs()), own_outputs(expected, family.inputs())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert type(model) is type(expected)
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.name_or_path == expected.name_or_path
    assert (model.dtype, model.training) == (expected.dtype, False)
    assert (report.how, report.reason) == ("fast", "")


@pytest.mark.parametrize("name", FAMILIES)
def test_what_needs_no_conversion_is_not_copied(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A weight of the checkpoint's name, dtype and shape lies where the upload put it."""
    family = FAMILIES[name]
    folder = written(tmp_path_factory.getbasetemp() / "families", name)
    model = on_fake(getattr(transformers, family.loader), folder)
    files = stored(folder)
    unchanged = {
        weight.data_ptr()
        for key, weight in model.state_dict().items()
        if key in files
        and files[key][1] == tuple(weight.shape)
        and _DTYPES.get(files[key][0]) == weight.dtype
    }
    assert len(unchanged) <= model.weightload_report.zero_copy <= len(files)
    assert model.weightload_report.load.wanted_bytes > 0
