"""Policies: where they are found, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from loadproof.errors import PolicyError
from loadproof.plan.policy import BLOCKS_MIN, load_policy, policy_folder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", ["rehearsal", "gpu"])
def test_our_policies_can_give_a_verdict(name: str) -> None:
    """Each policy has enough blocks, and a planted delay beyond its margin."""
    policy = load_policy(name)
    assert policy.name == name
    assert policy.blocks >= BLOCKS_MIN
    assert 1 + policy.planted_delay_fraction > 2.718281828**policy.margin_log_ratio


def test_the_digest_is_of_the_values(tmp_path: Path) -> None:
    """Comments and spelling do not matter; a value does."""
    text = (policy_folder() / "gpu.toml").read_text("utf-8")
    (tmp_path / "gpu.toml").write_text("# another comment\n" + text)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "gpu.toml").write_text(text.replace("blocks = 8", "blocks = 9"))
    assert load_policy(str(tmp_path / "gpu.toml")).digest() == load_policy("gpu").digest()
    assert load_policy(str(tmp_path / "other/gpu.toml")).digest() != load_policy("gpu").digest()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("blocks = 99", "not valid"),
        ("blocks = 'many'", "not valid"),
        ("surprise = 1", "not valid"),
        ("margin_log_ratio = -1", "not valid"),
        ("blocks = ", "cannot be read"),
    ],
)
def test_a_bad_policy_is_one_sentence(tmp_path: Path, change: str, complaint: str) -> None:
    """A value of the wrong type or range, an unknown field and bad TOML are told apart."""
    key = change.partition("=")[0]
    lines = (policy_folder() / "gpu.toml").read_text("utf-8").splitlines()
    kept = [line for line in lines if not line.startswith(key.strip() + " ")]
    (tmp_path / "bad.toml").write_text("\n".join([*kept, change]))
    with pytest.raises(PolicyError, match=complaint):
        load_policy(str(tmp_path / "bad.toml"))


def test_an_unknown_policy_names_the_known_ones() -> None:
    """The sentence says what there is."""
    with pytest.raises(PolicyError, match="gpu, rehearsal"):
        load_policy("nonsense")
