"""What a leg's process is told, and what it says: JSON in once, JSON lines out.

One request on standard input; then a stage for each step begun, and last exactly one result
or one failure.  A process that ends without either was killed, and the last stage says when.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from loadproof.measure.digest import Manifest


class Plant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bit to flip on the device after the load.

    Attributes:
        tensor: Which tensor.
        byte: Offset into its bytes.
        bit: 0 (lowest) to 7.
    """

    tensor: str
    byte: int
    bit: int


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


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What one leg has to do.

    Attributes:
        kind: ``time`` loads and makes no device-to-host copy; ``hash`` loads and reads back.
        site: Folder with the arm's code, put first on the import path.
        entry: Entry point of the loader, ``package.module:function``.
        digest: Digest that the imported package must have.
        checkpoint: What to load.
        device: ``fake``, ``fake:<profile>`` or ``cuda:<ordinal>``.
        parent: Process id of the harness; the leg ends when that one does.
        delay_fraction: Sleep for this fraction of the load's own time, inside the timed part.
        plant: A bit to flip before reading back.
        options: More keyword arguments for the loader.
    """

    kind: Literal["time", "hash"]
    site: str
    entry: str
    digest: str
    checkpoint: str
    device: str
    parent: int
    delay_fraction: float = 0.0
    plant: Plant | None = None
    options: dict[str, Any] = {}


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """A step has begun."""

    name: str


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
        device_to_host_copies: Copies off the device, where the device counts them.
        read_bytes: Bytes this process fetched from storage while loading, by the kernel.
        vm_hwm_bytes: The kernel's high-water mark of this process.
        hazards: What the fake device found wrong, in its words.
        manifest: Digests of the device's bytes; only in hash legs.
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
    manifest: Manifest | None = None


class Failure(msgspec.Struct, frozen=True, tag="failure", forbid_unknown_fields=True):
    """Why a leg has no result.

    Attributes:
        code: A stable word: ``no-device``, ``wrong-code``, ``loader-raised``, ``device``,
            ``leg-killed``, ``leg-timeout`` or ``leg-mute``.
        sentence: The same for people.
    """

    code: str
    sentence: str


Message = Stage | Result | Failure
