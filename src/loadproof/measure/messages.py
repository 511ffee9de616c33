"""What a leg's process is told, and what it says: JSON in once, JSON lines out.

One request on standard input; then a stage for each step begun, and last exactly one result
or one failure.  A process that ends without either was killed, and the last stage says when.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loadproof.measure.digest import Manifest, Mismatch


class FlipBit(msgspec.Struct, frozen=True, tag="flip-bit", forbid_unknown_fields=True):
    """One bit to flip on the device after the load.

    Attributes:
        tensor: Which tensor.
        byte: Offset into its bytes.
        bit: 0 (lowest) to 7.
    """

    tensor: str
    byte: int
    bit: int


class SwapChunks(msgspec.Struct, frozen=True, tag="swap-chunks", forbid_unknown_fields=True):
    """Two chunks of one tensor to exchange on the device after the load.

    Attributes:
        tensor: Which tensor.
        first: Offset of the first chunk.
        second: Offset of the second; they do not overlap.
        nbytes: Length of each.
    """

    tensor: str
    first: int
    second: int
    nbytes: int


class CopyChunk(msgspec.Struct, frozen=True, tag="copy-chunk", forbid_unknown_fields=True):
    """A chunk of one tensor to put over another's on the device after the load.

    Attributes:
        source: The tensor that is copied from.
        source_byte: Offset there.
        tensor: The tensor that is written to, and has to be blamed.
        byte: Offset there.
        nbytes: Length.
    """

    source: str
    source_byte: int
    tensor: str
    byte: int
    nbytes: int


Plant = FlipBit | SwapChunks | CopyChunk


class Truth(msgspec.Struct, frozen=True):
    """What a hash leg compares the device's bytes with.

    Attributes:
        checkpoint: The files, never an altered copy of them.
        manifest: Their digests.
    """

    checkpoint: str
    manifest: Manifest


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """How a serve leg turns a load into output.

    Attributes:
        folder: Where ``config.json`` lies.
        prompts: Lengths of the prompts in tokens, in the order in which they are served.
        new_tokens: Tokens to serve after each prompt.
        seed: Where the prompts' tokens come from.
        dtype: torch's name of the weights' dtype, for a config that names none.
        reference: Whether transformers loads the files itself, for the others to be compared
            with.
        cold: Whether the leg starts from a cold page cache, whatever the others do.
        plant: Whether one weight that the last prompt goes through is spoilt after the load.
    """

    folder: str
    prompts: tuple[int, ...]
    new_tokens: int
    seed: int
    dtype: str
    reference: bool = False
    cold: bool = False
    plant: bool = False


class OutputDigest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of a model's own output.

    Attributes:
        name: What the model calls it.
        dtype: torch's name of its dtype.
        shape: Elements along each axis.
        sha256: Hex SHA-256 of its bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a model served after one prompt.

    Attributes:
        asked_tokens: Length of the prompt that was asked for, in tokens.
        prompt_tokens: Its length as served: cut to what the model has positions for.
        first_s: Until the first new token, or until the model's own output.
        seconds: Until every token was served, by a second call for a model that generates.
        tokens: The new tokens, most probable first; empty for a model that generates none.
        outputs: The model's own output; empty for a model that generates.
    """

    asked_tokens: int
    prompt_tokens: int
    first_s: float
    seconds: float
    tokens: tuple[int, ...] = ()
    outputs: tuple[OutputDigest, ...] = ()


class Served(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a serve leg's model served.

    Attributes:
        model: The model's class in transformers.
        dtype: torch's name of its dtype.
        place: Where it ran: ``cpu`` (the bytes were read back) or ``cuda``.
        answers: One per prompt.
        planted: The fault that was planted before, in words; None without one.
        planted_in: The tensor that it was planted in.
    """

    model: str
    dtype: str
    place: str
    answers: tuple[Answer, ...]
    planted: str | None = None
    planted_in: str | None = None


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the device is, by its attributes.

    Attributes:
        name: What the driver calls it; for reading only.
        fake: Whether it is the fake device.
        capability: Compute capability, major and minor.
        integrated: CPU and GPU share one memory pool.
        host_page_tables: The device walks the host's page tables.
        driver_version: The driver's CUDA version, such as 13000.
    """

    name: str
    fake: bool
    capability: tuple[int, int]
    integrated: bool
    host_page_tables: bool
    driver_version: int


class LoaderIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a loader that is a program says of itself.

    Attributes:
        name: What it is called.
        version: Which one it is.
        environment: What else its time may depend on, such as its compiler and the CUDA runtime
            it brings; has to be the same in every leg.
    """

    name: str
    version: str
    environment: dict[str, str] = {}


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What one leg has to do.

    Attributes:
        kind: ``time`` makes no device-to-host copy before its clock has stopped, and audits a
            random sample of the tensors after; ``hash`` loads and reads everything back;
            ``serve`` loads and serves a model made of the tensors.
        site: Folder with the arm's code, put first on the import path; None for a loader that
            is installed beside the harness.
        entry: Entry point of the loader, ``package.module:function``; for a loader of
            ``loadproof.loaders``, its name; empty for a program.
        command: The words that start a loader that is a program; None for one in Python.
        digest: Digest that the imported package must have; for a program, the whole site.
        checkpoint: What to load.
        device: ``fake``, ``fake:<profile>`` or ``cuda:<ordinal>``.
        delay_fraction: Sleep for this fraction of the load's own time, inside the timed part.
        plant: What to change on the device before reading back.
        truth: What to explain wrong bytes by; only in hash legs.
        audit: What a timing leg's tensors must be; only in timing legs.
        audit_bytes: How many bytes of them it reads back, or a little more.
        serving: How to serve; only in serve legs.
        options: More keyword arguments for the loader.
        deadline_s: When the harness will end the leg.
    """

    kind: Literal["time", "hash", "serve"]
    site: str | None
    entry: str
    command: tuple[str, ...] | None = None
    digest: str
    checkpoint: str
    device: str
    delay_fraction: float = 0.0
    plant: Plant | None = None
    truth: Truth | None = None
    audit: Manifest | None = None
    audit_bytes: int = 0
    serving: Serving | None = None
    options: dict[str, Any] = {}
    deadline_s: float = 0.0


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """A step has begun."""

    name: str


class Elsewhere(msgspec.Struct, frozen=True, tag="elsewhere"):
    """The loader runs in a process of its own: its memory is the one to watch.

    Attributes:
        pid: That process.
    """

    pid: int


class Result(msgspec.Struct, frozen=True, kw_only=True, tag="result", forbid_unknown_fields=True):
    """What a leg saw.

    Attributes:
        elapsed_s: From the call of the loader until the device had everything.
        phases_s: Time of every step of the process, the untimed ones too.
        tensors: Tensors that the loader handed out.
        nbytes: Their length in bytes.
        digest: Digest of the package that was really imported.
        harness: Digest of the harness that measured.
        device: What the device is.
        report: The loader's own report, if it makes one.
        device_to_host_copies: Copies off the device until the clock stopped, where the device
            counts them.
        read_bytes: Bytes the loader's process fetched from storage while loading, by the kernel.
        vm_hwm_bytes: The kernel's high-water mark of that process.
        hazards: What the fake device found wrong, in its words.
        device_taken_bytes: Drop of the driver's free memory over the load; on a unified pool
            the page cache moves it too.  None when the driver gives no figure.
        poisoned_bytes: How many of the tensors' bytes lie in memory that was filled with a
            pattern before the load; None in timing legs.
        manifest: Digests of the device's bytes; only in hash legs.
        mismatches: What wrong bytes look like, by tensor; the first few only.
        audited_bytes: Bytes of tensors that a timing leg read back after its clock had stopped.
        audit_wrong: Audited tensors that were not the files'.
        identity: What a program says of itself; None for a loader in Python.
        served: What the model served; only in serve legs.
    """

    elapsed_s: float
    phases_s: dict[str, float]
    tensors: int
    nbytes: int
    digest: str
    harness: str
    device: DeviceFacts
    report: dict[str, Any] | None
    device_to_host_copies: int | None
    read_bytes: int | None
    vm_hwm_bytes: int | None
    hazards: tuple[str, ...] = ()
    device_taken_bytes: int | None = None
    poisoned_bytes: int | None = None
    manifest: Manifest | None = None
    mismatches: dict[str, Mismatch] = {}
    audited_bytes: int | None = None
    audit_wrong: tuple[str, ...] = ()
    identity: LoaderIdentity | None = None
    served: Served | None = None


class Failure(msgspec.Struct, frozen=True, tag="failure", forbid_unknown_fields=True):
    """Why a leg has no result.

    Attributes:
        code: A stable word: ``no-device``, ``wrong-code``, ``loader-raised``, ``device``,
            ``still-loading``, ``not-on-device``, ``cannot-serve``, ``leg-not-started``,
            ``leg-killed``, ``leg-timeout``, ``leg-mute``, or for a loader that is a program
            ``loader-ended``, ``protocol-line``, ``protocol-order``, ``protocol-version``,
            ``protocol-tensors`` or ``protocol-memory``.
        sentence: The same for people.
    """

    code: str
    sentence: str


Message = Stage | Elsewhere | Result | Failure
