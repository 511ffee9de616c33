"""Receipts that every reader must accept, and ones that every reader must refuse."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import jsonschema
import pytest
from typer.testing import CliRunner

from fixtures.receipts import FOLDER, INVALID
from loadproof.cli import app
from loadproof.errors import ReceiptError
from loadproof.report.changes import changes
from loadproof.report.envelope import open_receipt, sign
from loadproof.report.receipt import json_schema

if TYPE_CHECKING:
    from pathlib import Path

HASHED, SIGNED = FOLDER / "valid" / "hashed.json", FOLDER / "valid" / "signed.json"
KEY = FOLDER / "signer.pub.pem"


def run(*arguments: object) -> tuple[int, str]:
    """Run the command line; return its exit status and everything it said."""
    done = CliRunner().invoke(app, ["receipt", *map(str, arguments)])
    return done.exit_code, done.output


def test_the_published_schema_is_the_one_in_the_code() -> None:
    """Whoever validates by the file validates by what the code reads."""
    published = json.loads((FOLDER / "receipt.schema.json").read_text("utf-8"))
    assert published == json.loads(json.dumps(json_schema()))
    jsonschema.validate(json.loads(HASHED.read_text("utf-8")), published)


def test_a_hashed_receipt_is_valid_and_says_hashed() -> None:
    """Nobody signed it, and it says so."""
    status, said = run("verify", HASHED)
    assert status == 0
    assert said.startswith("valid, hashed, class rehearsal")


def test_a_signed_receipt_is_verified_by_its_key() -> None:
    """With the key it is verified, without one it is only said to be signed."""
    assert run("verify", SIGNED, "--key", KEY)[1].startswith("valid, signed and verified")
    assert run("verify", SIGNED)[1].startswith("valid, signed, key not given")
    assert (
        open_receipt(SIGNED.read_bytes()).statement == open_receipt(HASHED.read_bytes()).statement
    )


@pytest.mark.parametrize("path", sorted((FOLDER / "invalid").glob("*.json")), ids=lambda p: p.stem)
def test_an_invalid_receipt_is_refused(path: Path) -> None:
    """Each has one thing wrong; it is refused in one sentence, with or without a key."""
    arguments = ["--key", KEY] if path.stem == "signature-changed" else []
    status, said = run("verify", path, *arguments)
    assert status == 1
    assert said.startswith("loadproof: This ")
    assert len(said.strip().splitlines()) == 1


def test_every_invalid_vector_is_there() -> None:
    """None went missing between the list and the folder."""
    found = {path.stem for path in (FOLDER / "invalid").glob("*.json")}
    assert found == {*INVALID, "signature-changed"}


def test_a_hashed_receipt_is_no_signed_one() -> None:
    """Asked for a signature, an unsigned receipt does not pass."""
    assert run("verify", HASHED, "--key", KEY)[0] == 1


def test_another_key_does_not_verify(tmp_path: Path) -> None:
    """A receipt that somebody else signed is refused."""
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (  # noqa: PLC0415
        Ed25519PrivateKey,
    )

    private = tmp_path / "key.pem"
    private.write_bytes(
        Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    signed = sign(HASHED.read_bytes(), private)
    assert open_receipt(signed).integrity == "signed, key not given"
    with pytest.raises(ReceiptError, match="not signed by that key"):
        open_receipt(signed, KEY)
    with pytest.raises(ReceiptError, match="cannot be used as a private key"):
        sign(b"x", KEY)


def test_a_rehearsal_is_refused_where_a_gb10_is_required() -> None:
    """Only a GB10's receipt speaks of a GB10."""
    status, said = run("verify", HASHED, "--require", "gb10")
    assert status == 1
    assert "class 'rehearsal', and 'gb10' was required" in said
    assert run("verify", HASHED, "--require", "rehearsal")[0] == 0


def test_a_receipt_is_shown_as_text_and_as_a_page(tmp_path: Path) -> None:
    """The page is whole, draws its plots, and fetches nothing from anywhere."""
    status, said = run("show", HASHED)
    assert status == 0
    assert "## Weights and controls" in said
    page = tmp_path / "page.html"
    assert run("show", HASHED, "--html", page)[0] == 0
    text = page.read_text("utf-8")
    assert text.count("<svg") == 3
    assert "change of load time against A" in text
    assert not any(word in text for word in ("<script", "src=", "@import", "url(http"))
    assert run("show", HASHED, "--html", tmp_path / "again.html")[0] == 0
    assert (tmp_path / "again.html").read_text("utf-8") == text


def test_differences_are_listed_by_field(tmp_path: Path) -> None:
    """A receipt does not differ from itself; another policy's name is one field."""
    assert run("diff", HASHED, SIGNED) == (0, "Nothing differs but the samples.\n")
    one = open_receipt(HASHED.read_bytes()).statement
    changed = json.loads(HASHED.read_text("utf-8"))
    changed["predicate"]["environment"]["kernel"] = "0.0.1"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(changed))
    (found,) = changes(one, open_receipt(other.read_bytes()).statement)
    assert (found[0], found[2]) == ("predicate.environment.kernel", '"0.0.1"')
    assert run("diff", HASHED, other)[0] == 1


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    """A missing file is wrong usage, and nonsense is refused."""
    assert run("verify", tmp_path / "none")[0] == 2
    (tmp_path / "nonsense").write_bytes(b"\xff{")
    assert run("verify", tmp_path / "nonsense")[0] == 1
