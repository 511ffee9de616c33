"""Receipts that contradict what they carry: each edit of a valid one is refused, and says why."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.receipts import FOLDER
from loadproof.errors import ReceiptError
from loadproof.report.receipt import decode

if TYPE_CHECKING:
    from collections.abc import Callable

REHEARSED = FOLDER / "valid" / "hashed.json"
LANDED = (
    Path(__file__)
    .parents[2]
    .joinpath("qualification", "receipts", "2026-11-30-nvidia-h200", "main-against-main.json")
)
DIGESTS = ["b" * 64, 1]
HUGE = ["t0000", "U8", [10**12], 10**12, *DIGESTS]
GB10 = {"fake": False, "capability": [12, 1], "integrated": True, "host_page_tables": True}


@cache
def text(path: Path) -> bytes:
    """Return a valid receipt's text."""
    return path.read_bytes()


def edited(path: Path, edit: Callable[[dict[str, Any]], object]) -> bytes:
    """Return a valid receipt's text after an edit of its predicate."""
    statement: Any = json.loads(text(path))
    edit(statement["predicate"])
    return json.dumps(statement).encode()


def legs(predicate: dict[str, Any], purpose: str, **changes: Any) -> None:
    """Change the outcome of every leg of a purpose."""
    for leg in predicate["legs"]:
        if leg["purpose"] == purpose:
            leg["outcome"].update(changes)


def is_unhashed(predicate: dict[str, Any]) -> None:
    """Leave out the hash legs, and what they found."""
    predicate["legs"] = [each for each in predicate["legs"] if each["purpose"] != "hash"]
    predicate["weights"] = []


def is_hashed_by_one_arm(predicate: dict[str, Any]) -> None:
    """Let every hash leg be the baseline's."""
    hashed = [each for each in predicate["legs"] if each["purpose"] == "hash"]
    for each in (*hashed, *predicate["weights"]):
        each["arm"] = "A"


def is_gain(predicate: dict[str, Any]) -> None:
    """Let the timing legs' audits fail, and the conclusion say gain for all that."""
    legs(predicate, "time", audit_wrong=["a"])
    conclusion = predicate["conclusion"]
    conclusion["verdict"] |= {"outcome": "gain", "sound": True}
    conclusion |= {"answer": "failed", "weights": "differ"}
    conclusion["reasons"] = [{"code": "audit-failed", "sentence": "One leg."}]
    predicate["exit_status"] = 4


def difference_in(tensor: str) -> Callable[[dict[str, Any]], None]:
    """Let a check of the weights name a tensor."""

    def edit(predicate: dict[str, Any]) -> None:
        predicate["weights"][0]["differences"].append({"tensor": tensor, "kind": "bytes"})

    return edit


def is_gb10(predicate: dict[str, Any]) -> None:
    """Say that the device is a GB10, and leave the legs as they are."""
    predicate["device"] |= GB10
    predicate["device_class"] = "gb10"


def is_gb10_in_one_leg(predicate: dict[str, Any]) -> None:
    """Say that the device is a GB10, and let the first leg say so too."""
    is_gb10(predicate)
    predicate["legs"][0]["outcome"]["device"] |= GB10


@pytest.mark.parametrize("path", [REHEARSED, LANDED], ids=["rehearsed", "landed"])
def test_what_is_edited_below_is_valid(path: Path) -> None:
    """Read and written again without an edit, it is accepted: the edits are what is refused."""
    assert decode(edited(path, lambda _: None)) == decode(text(path))


@pytest.mark.parametrize("path", [REHEARSED, LANDED], ids=["rehearsed", "landed"])
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda p: legs(p, "time", hazards=["PIN-REUSE-BEFORE-COPY: x"]), "PIN-REUSE"),
        (lambda p: legs(p, "time", nbytes=1), "fewer or more bytes than the files"),
        (lambda p: legs(p, "time", audited_bytes=None), "was not read back afterwards"),
        (lambda p: legs(p, "time", device_to_host_copies=1), "copied from the device"),
        (lambda p: p["legs"][-1]["outcome"].update(harness="x"), "harness itself changed"),
        (lambda p: p["legs"][-1]["cache"].update(state="unknown"), "page-cache states"),
        (lambda p: p["legs"][-1]["conditions"].update(marks=["hot"]), "policy's band"),
        (is_gain, "the verdict on time, 'gain', does not follow"),
        (lambda p: p.update(weights=[]), "checks of the weights are not those"),
        (is_unhashed, "the word on the weights"),
        (is_hashed_by_one_arm, "the word on the weights"),
        (lambda p: legs(p, "hash", hazards=["RACE: x"]), "checks of the weights are not those"),
        (lambda p: p["weights"][0].update(manifest="0" * 64), "than its digest shows"),
        (lambda p: p["controls"][1].update(found=False), "Control 'file-bit'"),
        (lambda p: p["controls"].pop(2), "control 'swapped-chunks' was not planted"),
        (lambda p: p["controls"][0].update(blamed=["other"]), "did not blame its own tensor"),
        (lambda p: legs(p, "hash", digest="sha256:" + "0" * 64), "hash leg of A ran other code"),
        (lambda p: legs(p, "time", digest="sha256:" + "0" * 64), "ran other code than the arm's"),
        (lambda p: p["arms"].pop("B"), "subjects are not"),
        (lambda p: p["arms"]["B"].update(digest="sha256:" + "0" * 64), "'loader:candidate'"),
        (lambda p: p["legs"][-1].update(arm="C"), "no arm of it"),
        (lambda p: p.update(checkpoint_bytes=1), "the checkpoint's length"),
        (lambda p: p.update(tensors=1), "tensors are listed, of 1, of which 1 have to be"),
        (lambda p: p.update(tensors=p["tensors"] + 1), "tensors are listed, of "),
        (lambda p: p.update(tensors=5000), "of 5000, of which 2000 have to be"),
        (lambda p: p.update(tensors=0, tensor_lines=[]), "do not have the digest"),
        (lambda p: p.update(tensor_lines=[]), "0 tensors are listed"),
        (lambda p: p["tensor_lines"].reverse(), "not sorted by name"),
        (lambda p: p["tensor_lines"].__setitem__(1, p["tensor_lines"][0]), "each once"),
        (lambda p: p["tensor_lines"][0].__setitem__(2, [1]), "than its dtype and shape give"),
        (lambda p: p["tensor_lines"][0].__setitem__(1, "X"), "than its dtype and shape give"),
        (lambda p: p["tensor_lines"][0].__setitem__(4, "0" * 64), "do not have the digest"),
        (difference_in("a.tensor.that.never.was"), "lack one that differs"),
        (lambda p: p["device"].update(name="NVIDIA GB10"), "device's facts are not those"),
        (is_gb10, "device's facts are not those"),
        (is_gb10_in_one_leg, "device class is not that"),
        (lambda p: p["conclusion"]["coverage"].update(route_bytes={"direct": 1}), "the coverage"),
        (lambda p: legs(p, "time", report={"route_bytes": ["direct"]}), "the coverage"),
        (lambda p: p["conclusion"]["reasons"].pop(), "the list of reasons"),
        (
            lambda p: p["conclusion"]["reasons"][0].update(sentence="B is twice as fast."),
            "the list of reasons",
        ),
    ],
)
def test_a_receipt_that_contradicts_itself_is_refused(
    path: Path, edit: Callable[[dict[str, Any]], object], said: str
) -> None:
    """Whatever part of the evidence is edited, the words no longer follow from it."""
    with pytest.raises(ReceiptError) as refused:
        decode(edited(path, edit))
    sentence = str(refused.value)
    assert sentence.startswith("This is not a valid receipt: ")
    assert said in sentence
    assert "\n" not in sentence


def test_a_receipt_without_its_subjects_is_refused() -> None:
    """What it speaks of cannot be left out."""
    statement = json.loads(text(REHEARSED)) | {"subject": []}
    with pytest.raises(ReceiptError, match="subjects are not"):
        decode(json.dumps(statement).encode())


def listed_in_part(predicate: dict[str, Any]) -> None:
    """Make the checkpoint one of 2,500 small tensors, of which the first 2,000 are listed."""
    line = ["F32", [2], 8, *DIGESTS]
    predicate["tensor_lines"] = [[f"t{n:04}", *line] for n in range(2000)]
    predicate["tensors"] = 2500


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda p: p["controls"].pop(3), "control 'duplicated-chunk' was not planted"),
        (lambda p: p["tensor_lines"].pop(), "1999 tensors are listed, of 2500"),
        (lambda p: p["tensor_lines"].append(["u", "U8", [1], 1, *DIGESTS]), "or have one more"),
        (difference_in("u"), "lack one that differs"),
        (lambda p: p["tensor_lines"][7].__setitem__(0, "t0006"), "each once"),
        (lambda p: p["tensor_lines"][0].__setitem__(3, 4), "than its dtype and shape give"),
        (
            lambda p: p["tensor_lines"].__setitem__(
                0, ["t0000", "U8", [10**12], 10**12, *DIGESTS]
            ),
            "the checkpoint's length",
        ),
    ],
)
def test_a_list_in_part_is_held_to_its_rule(
    edit: Callable[[dict[str, Any]], object], said: str
) -> None:
    """Of more than 2,000 tensors the first by name are listed, and those left out still count."""

    def changed(predicate: dict[str, Any]) -> None:
        listed_in_part(predicate)
        edit(predicate)

    assert len(decode(edited(LANDED, listed_in_part)).predicate.tensor_lines) == 2000
    with pytest.raises(ReceiptError, match=said):
        decode(edited(LANDED, changed))
