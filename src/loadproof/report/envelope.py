"""Receipts on disk: hashed as they are, or signed inside a DSSE envelope.

The envelope, its encoding and its keys are securesystemslib's; nothing here touches
cryptography.  A signature says who wrote a receipt and that nothing changed since; it does not
say that the figures are true.

Source: https://github.com/secure-systems-lab/dsse/blob/master/protocol.md
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from loadproof.errors import OutputError, ReceiptError
from loadproof.report.receipt import Statement, decode

if TYPE_CHECKING:
    from pathlib import Path

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
Integrity = Literal["hashed", "signed, key not given", "signed and verified"]


class Opened(msgspec.Struct, frozen=True):
    """A receipt that was read.

    Attributes:
        statement: What it says.
        integrity: What is known of who says it.
    """

    statement: Statement
    integrity: Integrity


def require_key(key: Path) -> None:
    """Try a private key before a run, by signing something with it.

    Raises:
        OutputError: securesystemslib is not installed, or the key cannot be used.
    """
    try:
        sign(b"", key)
    except ReceiptError as error:
        raise OutputError(str(error)) from error


def sign(content: bytes, key: Path) -> bytes:
    """Put a receipt's text into an envelope signed with a private key (PEM, unencrypted).

    Raises:
        ReceiptError: securesystemslib is not installed, or the key cannot be used.
    """
    dsse, signer_module = _library()
    try:
        signer = signer_module.CryptoSigner(_private_key(key))
    except (OSError, ValueError, TypeError) as error:
        raise ReceiptError(
            f"{key} cannot be used as a private key: {error}; give an unencrypted PEM of an "
            "Ed25519, ECDSA or RSA key."
        ) from error
    envelope = dsse.Envelope(content, PAYLOAD_TYPE, {})
    envelope.sign(signer)
    return json.dumps(envelope.to_dict(), indent=2).encode() + b"\n"


def open_receipt(content: bytes, public_key: Path | None = None) -> Opened:
    """Read a receipt, in its envelope or bare, and check what can be checked.

    Args:
        content: The file's bytes.
        public_key: PEM of the key that must have signed; None to ask for no signature.

    Raises:
        ReceiptError: It is not a valid receipt, or not signed by that key.
    """
    try:
        parsed: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ReceiptError(f"This is not a valid receipt: {error}.") from error
    if not isinstance(parsed, dict) or "payloadType" not in parsed:
        if public_key is not None:
            raise ReceiptError("This receipt is hashed, not signed, so no key can verify it.")
        return Opened(decode(content), "hashed")
    dsse, signer_module = _library()
    try:
        envelope = dsse.Envelope.from_dict(parsed)
    except Exception as error:
        raise ReceiptError(f"This envelope is malformed: {error}.") from error
    if envelope.payload_type != PAYLOAD_TYPE:
        raise ReceiptError(f"This envelope holds {envelope.payload_type!r}, which is no receipt.")
    integrity: Integrity = "signed, key not given"
    if public_key is not None:
        _verify(envelope, public_key, signer_module)
        integrity = "signed and verified"
    return Opened(decode(envelope.payload), integrity)


def _verify(envelope: Any, public_key: Path, signer_module: Any) -> None:  # noqa: ANN401 -- untyped
    from cryptography.hazmat.primitives.serialization import (  # noqa: PLC0415 -- an extra
        load_pem_public_key,
    )

    try:
        key = signer_module.SSlibKey.from_crypto(load_pem_public_key(public_key.read_bytes()))
    except (OSError, ValueError) as error:
        raise ReceiptError(f"{public_key} cannot be used as a public key: {error}.") from error
    try:
        envelope.verify([key], 1)
    except Exception as error:
        raise ReceiptError("This receipt was not signed by that key, or was changed since.") from (
            error
        )


def _private_key(path: Path) -> Any:  # noqa: ANN401 -- one of several kinds of key
    from cryptography.hazmat.primitives.serialization import (  # noqa: PLC0415 -- an extra
        load_pem_private_key,
    )

    return load_pem_private_key(path.read_bytes(), password=None)


def _library() -> tuple[Any, Any]:
    try:
        from securesystemslib import dsse, signer  # noqa: PLC0415 -- an extra
    except ImportError as error:
        raise ReceiptError(
            "Signed receipts need securesystemslib; run 'pip install loadproof[sign]'."
        ) from error
    return dsse, signer
