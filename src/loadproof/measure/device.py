"""The harness's own hold on the device: opened before a load, looked into after it.

The same few driver calls serve the fake and a GPU, since both have the shape of
``cuda.bindings.driver``.  The context is made here, before the clock starts, because whichever
arm came first would otherwise pay for it.
"""

from __future__ import annotations

import ctypes
from random import SystemRandom
from typing import TYPE_CHECKING, Any, NamedTuple

from loadproof.errors import DeviceError
from loadproof.measure.digest import Manifest, TensorDigest, digest_chunks
from loadproof.measure.messages import DeviceFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_READ_BACK_BYTES = 8 << 20
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
_IPC_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
_POISON_BYTE = 0xA5
_POISON_BLOCK_BYTES = 1 << 30
_POISON_SPARE_BYTES = 256 << 20
_FAKE_PATTERN_BYTES = 64 << 10

# torch's dtypes by the names that safetensors gives them.
DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
    "bool": "BOOL",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}


class _Found(NamedTuple):
    """A driver that was found, not yet asked for a context."""

    driver: Any
    ordinal: int
    # The fake's; None on a GPU.
    profile: str | None


def require_device(spoken: str) -> None:
    """Look for a device before a run, without bringing it up.

    Args:
        spoken: ``fake``, ``fake:<profile>`` or ``cuda:<ordinal>``.

    Raises:
        DeviceError: It is none of these, or there is no such device here.
    """
    _find(spoken)


class Device:
    """One device, opened: the fake by name, or a GPU by ordinal.

    Attributes:
        loader_device: What the loader is told as ``device``.
        loader_driver: What the loader is told as ``driver``: the fake, or None on a GPU.
    """

    def __init__(self, spoken: str, *, with_torch: bool = True) -> None:
        """Open ``fake``, ``fake:<profile>`` or ``cuda:<ordinal>``.

        Args:
            spoken: Which one.
            with_torch: Whether a GPU's loader runs in this process, and will need torch.

        Raises:
            DeviceError: It is none of these, or there is no such device here.
        """
        found = _find(spoken)
        ordinal = found.ordinal
        self._cu = found.driver
        self._fake: Any = found.driver if found.profile else None
        self._profile = found.profile
        self._poisoned: list[tuple[int, int]] = []
        self._with_torch = with_torch
        self.loader_device = f"cuda:{ordinal}"
        self.loader_driver = self._fake
        self._call("cuInit", 0)
        self._handle = self._call("cuDeviceGet", ordinal)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._handle)
        self._call("cuCtxSetCurrent", self._context)
        if self._fake is None and with_torch:
            _bring_up_torch(ordinal)

    def close(self) -> None:
        """Let the device go; the fake looks for leaks now, and keeps what it finds."""
        self._call("cuDevicePrimaryCtxRelease", self._handle)
        if self._fake is not None:
            self._fake.close(check=False)

    def synchronize(self) -> None:
        """Wait until the device has done everything that was asked of it."""
        self._call("cuCtxSynchronize")

    def facts(self) -> DeviceFacts:
        """Ask the device what it is."""
        name: bytes = self._call("cuDeviceGetName", 128, self._handle)
        return DeviceFacts(
            name=name.split(b"\0")[0].decode(),
            fake=self._fake is not None,
            capability=(
                self._attribute("COMPUTE_CAPABILITY_MAJOR"),
                self._attribute("COMPUTE_CAPABILITY_MINOR"),
            ),
            integrated=bool(self._attribute("INTEGRATED")),
            host_page_tables=bool(self._attribute("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES")),
            driver_version=int(self._call("cuDriverGetVersion")),
        )

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy bytes off the device through pinned memory.

        Raises:
            DeviceError: The copy failed.
        """
        pinned = int(self._call("cuMemHostAlloc", nbytes, _PORTABLE))
        self._call("cuMemcpyDtoH", pinned, address, nbytes)
        content = ctypes.string_at(pinned, nbytes)
        self._call("cuMemFreeHost", pinned)
        return content

    def write(self, address: int, content: bytes) -> None:
        """Copy bytes onto the device through pinned memory, and wait for them.

        Raises:
            DeviceError: The copy failed.
        """
        pinned = int(self._call("cuMemHostAlloc", len(content), _PORTABLE))
        ctypes.memmove(pinned, content, len(content))
        self._call("cuMemcpyHtoD", address, pinned, len(content))
        self.synchronize()
        self._call("cuMemFreeHost", pinned)

    def free_bytes(self) -> int | None:
        """Ask the driver for its free memory; None where it gives no figure."""
        result, *values = self._cu.cuMemGetInfo()
        return None if int(result) else int(values[0])

    def poison(self, nbytes: int) -> None:
        """Fill the memory that torch will hand out next with a pattern that is no weight.

        Where the loader does not run in this process there is no such memory, and nothing is
        filled.

        A loader that skips a tensor could otherwise find the right bytes of an earlier load
        there.  The fake device fills fresh memory with a pattern of its own.
        """
        if self._fake is not None or not self._with_torch:
            return
        import torch  # noqa: PLC0415 -- brought up when the device was opened

        blocks = []
        left = nbytes + nbytes // 8 + _POISON_SPARE_BYTES
        while left > 0:
            block = torch.empty(
                min(left, _POISON_BLOCK_BYTES), dtype=torch.uint8, device=self.loader_device
            )
            blocks.append(block.fill_(_POISON_BYTE))
            left -= block.nbytes
        self._poisoned = [(block.data_ptr(), block.nbytes) for block in blocks]
        # Freed, they stay in torch's cache, and the loader's tensors come from there.
        torch.cuda.synchronize()

    def poison_pattern(self) -> bytes:
        """Return what memory that nobody wrote holds; empty where nobody filled it."""
        if self._fake is None:
            return bytes([_POISON_BYTE]) * 64 if self._poisoned else b""
        # A second fake of the same seed may be read before it is written; this one may not.
        other = Device(f"fake:{self._profile}")
        address = int(other._call("cuMemAlloc", _FAKE_PATTERN_BYTES))
        pattern = other.read(address, _FAKE_PATTERN_BYTES)
        other._call("cuMemFree", address)
        other.close()
        self._call("cuCtxSetCurrent", self._context)
        return pattern

    def poisoned_bytes(self, tensors: Mapping[str, Any]) -> int:
        """Count the tensors' bytes that lie where the pattern was."""
        if self._fake is not None:
            return sum(int(tensor.nbytes) for tensor in tensors.values())
        return sum(
            max(0, min(at + int(tensor.nbytes), start + size) - max(at, start))
            for tensor in tensors.values()
            for at in (int(tensor.data_ptr()),)
            for start, size in self._poisoned
        )

    def manifest(self, tensors: Mapping[str, Any]) -> Manifest:
        """Read every tensor's bytes back from the device and hash them.

        The bytes come through one pinned buffer that is ours.  When a copy fails, the buffer is
        kept (the device may still write to it) and no digest is given out.

        Raises:
            DeviceError: A copy failed, or a tensor is not laid out contiguously.
        """
        pinned = int(self._call("cuMemHostAlloc", _READ_BACK_BYTES, _PORTABLE))
        found = manifest_of(
            tensors, lambda name, each: self._read_back(name, each, pinned, _READ_BACK_BYTES)
        )
        self._call("cuMemFreeHost", pinned)
        return found

    def chunks(self, name: str, tensor: Any) -> Iterator[memoryview]:  # noqa: ANN401
        """Read one tensor back in chunks, each good until the next is asked for."""
        # Pinning takes time by the byte, and a model has many small tensors.
        room = min(max(1, int(tensor.nbytes)), _READ_BACK_BYTES)
        pinned = int(self._call("cuMemHostAlloc", room, _PORTABLE))
        try:
            yield from self._read_back(name, tensor, pinned, room)
        finally:
            self.synchronize()
            self._call("cuMemFreeHost", pinned)

    def not_here(self, tensors: Mapping[str, Any]) -> list[str]:
        """Name the tensors that do not lie, from their first byte to their last, on the device.

        Memory of the host that the device can read as well would have the right bytes, and no
        copy to wait for; so would managed memory that has not moved yet.
        """
        return [name for name, tensor in tensors.items() if not self._is_here(tensor)]

    def open_ipc(self, handle: bytes) -> int:
        """Map an allocation that another process exported, and return its address here.

        Raises:
            DeviceError: The driver refuses the handle.
        """
        exported = self._cu.CUipcMemHandle()
        ctypes.memmove(exported.getPtr(), handle, len(handle))
        return int(self._call("cuIpcOpenMemHandle", exported, _IPC_LAZY_ENABLE_PEER_ACCESS))

    def close_ipc(self, address: int) -> None:
        """Unmap what ``open_ipc`` mapped.

        Raises:
            DeviceError: The driver refuses.
        """
        self._call("cuIpcCloseMemHandle", address)

    def device_to_host_copies(self) -> int | None:
        """Return how many copies left the device so far, or None where nobody counts."""
        if self._fake is None:
            return None
        return sum(map(_leaves_the_device, self._fake.journal.records()))

    def hazards(self) -> tuple[str, ...]:
        """Return what the fake found wrong so far; a GPU finds nothing by itself."""
        return tuple(str(each) for each in self._fake.hazards) if self._fake else ()

    def _read_back(
        self,
        name: str,
        tensor: Any,  # noqa: ANN401
        pinned: int,
        room: int,
    ) -> Iterator[memoryview]:
        """Read one tensor back through a pinned buffer that has this much room, in bytes."""
        is_contiguous = getattr(tensor, "is_contiguous", None)
        if is_contiguous is not None and not is_contiguous():
            raise DeviceError(f"Tensor {name!r} is not contiguous, so its bytes have no order.")
        window = memoryview((ctypes.c_ubyte * room).from_address(pinned))
        address, left = int(tensor.data_ptr()), int(tensor.nbytes)
        while left:
            count = min(left, room)
            self._call("cuMemcpyDtoH", pinned, address, count)
            yield window[:count]
            address += count
            left -= count

    def _is_here(self, tensor: Any) -> bool:  # noqa: ANN401
        first, nbytes = int(tensor.data_ptr()), int(tensor.nbytes)
        ends = (first, first + nbytes - 1) if nbytes else ()
        on_device = int(self._cu.CUmemorytype.CU_MEMORYTYPE_DEVICE)
        return all(
            self._pointer("MEMORY_TYPE", end) == on_device and not self._pointer("IS_MANAGED", end)
            for end in ends
        )

    def _pointer(self, tail: str, address: int) -> int | None:
        """Ask what an address is; None where the driver does not know it."""
        attribute = getattr(self._cu.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{tail}")
        result, *values = self._cu.cuPointerGetAttribute(attribute, address)
        return None if int(result) else int(values[0])

    def _attribute(self, tail: str) -> int:
        attribute = getattr(self._cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{tail}")
        return int(self._call("cuDeviceGetAttribute", attribute, self._handle))

    def _call(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401 -- the binding has no types
        result, *values = getattr(self._cu, name)(*arguments)
        if int(result):
            raise DeviceError(f"{name} returned {getattr(result, 'name', result)}.")
        return values[0] if values else None


def manifest_of(
    tensors: Mapping[str, Any], chunks: Callable[[str, Any], Iterator[memoryview]]
) -> Manifest:
    """Hash every tensor's bytes, in an order drawn only now.

    In an order that is known, what comes last could still be on its way while the rest is read.

    Args:
        tensors: By name.
        chunks: Reads one of them, in chunks.
    """
    aliases = _aliases(tensors)
    names = sorted(tensors)
    digests = {
        name: digest_chunks(chunks(name, tensors[name]))
        for name in SystemRandom().sample(names, len(names))
    }
    return Manifest(
        tuple(
            TensorDigest(
                name=name,
                dtype=dtype_name(tensors[name]),
                shape=tuple(int(n) for n in tensors[name].shape),
                nbytes=int(tensors[name].nbytes),
                alias=aliases.get(name),
                **digests[name],
            )
            for name in names
        )
    )


def _aliases(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Name, for every tensor whose memory overlaps another's, the one that begins before it."""
    ranges = sorted(
        (int(tensor.data_ptr()), int(tensor.nbytes), name)
        for name, tensor in tensors.items()
        if int(tensor.nbytes)
    )
    found = {}
    end, owner = 0, ""
    for start, nbytes, name in ranges:
        if start < end:
            found[name] = owner
        if start + nbytes > end:
            end, owner = start + nbytes, name
    return found


def _bring_up_torch(ordinal: int) -> None:
    """Import and start torch before the clock does: no arm may pay for it in its load."""
    import torch  # noqa: PLC0415 -- a leg on the fake device does without

    torch.empty(1, device=f"cuda:{ordinal}")
    torch.cuda.synchronize(ordinal)


def _leaves_the_device(record: Mapping[str, Any]) -> bool:
    """Say whether a journal's record is a call that copies from the device to the host."""
    call, given = record.get("call", ""), record.get("args", {})
    if call in {"cuMemcpy", "cuMemcpyAsync"}:
        source, target = str(given["src"]), str(given["dst"])
        return source.startswith("device") and not target.startswith("device")
    return "DtoH" in call


def dtype_name(tensor: Any) -> str:  # noqa: ANN401 -- torch's tensor or the fake's
    """Return the name that safetensors gives a tensor's dtype."""
    if isinstance(tensor.dtype, str):
        return tensor.dtype
    name = str(tensor.dtype).removeprefix("torch.")
    return DTYPE_NAMES.get(name, name)


def _find(spoken: str) -> _Found:
    kind, colon, detail = spoken.partition(":")
    if kind == "fake" and bool(colon) == bool(detail):
        return _Found(_open_fake(detail or "h200"), ordinal=0, profile=detail or "h200")
    if kind == "cuda" and detail.isdecimal():
        return _Found(_open_binding(int(detail)), ordinal=int(detail), profile=None)
    raise DeviceError(f"{spoken!r} is no device; say fake, fake:<profile> or cuda:<ordinal>.")


def _open_fake(profile: str) -> Any:  # noqa: ANN401 -- shaped like the binding
    import fakecuda  # noqa: PLC0415 -- only where it was asked for by name

    try:
        return fakecuda.FakeCuda(profile=profile)
    except ValueError as error:
        raise DeviceError(f"The fake driver has {error}.") from error


def _open_binding(ordinal: int) -> Any:  # noqa: ANN401 -- the binding publishes no types
    try:
        from cuda.bindings import driver  # noqa: PLC0415 -- has no wheel on some machines
    except ImportError as error:
        raise DeviceError(
            "cuda-bindings is not installed here; install it, or use --device fake."
        ) from error
    try:
        (result,) = driver.cuInit(0)
    except RuntimeError as error:
        raise DeviceError("There is no CUDA driver on this machine; use --device fake.") from error
    count = 0 if int(result) else int(driver.cuDeviceGetCount()[1])
    if ordinal >= count:
        raise DeviceError(
            f"There is no device cuda:{ordinal}: the CUDA driver of this machine shows {count}."
        )
    return driver
