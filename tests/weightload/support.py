"""What the loader's tests share: a checkpoint's bytes, and reading them back."""

from __future__ import annotations

import ctypes
import json
import os
from typing import TYPE_CHECKING, Any

from weightload.host.system import Memory, System

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from fakecuda import FakeCuda


def file_tensors(folder: Path) -> dict[str, bytes]:
    """Every tensor's bytes by name, straight from the files."""
    tensors: dict[str, bytes] = {}
    for path in folder.glob("*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            first, last = entry["data_offsets"]
            tensors[name] = content[start + first : start + last]
    return tensors


def device_tensors(fake: FakeCuda, tensors: Mapping[str, Any]) -> dict[str, bytes]:
    """Every tensor's bytes by name, read back from the device."""
    _, context = fake.cuDevicePrimaryCtxRetain(0)
    fake.cuCtxSetCurrent(context)
    found = {}
    for name, tensor in tensors.items():
        buffer = (ctypes.c_ubyte * tensor.nbytes)()
        if tensor.nbytes:
            address = ctypes.addressof(buffer)
            (result,) = fake.cuMemcpyDtoH(address, tensor.data_ptr(), tensor.nbytes)
            assert result == 0
        found[name] = bytes(buffer)
    fake.cuCtxSetCurrent(0)
    fake.cuDevicePrimaryCtxRelease(0)
    return found


def driver_calls(fake: FakeCuda) -> list[str]:
    """The names of all driver calls so far, in order."""
    return [record["call"] for record in fake.journal.records() if "call" in record]


class ScriptedSystem(System):
    """A Linux whose reads, opens and figures are the test's.

    Args:
        on_read: called as `on_read(number, target, offset)` before each data read; it
            returns how many bytes to read at most, or raises.
        cached_share: share of every file in the page cache; None if unknown.
        direct_error: raised when a file is opened past the page cache.
        available_bytes: what MemAvailable says.
    """

    def __init__(
        self,
        on_read: Callable[[int, memoryview, int], int] | None = None,
        cached_share: float | None = 1.0,
        direct_error: OSError | None = None,
        available_bytes: int | None = None,
    ) -> None:
        self.reads: list[tuple[int, int, int]] = []
        self._on_read = on_read
        self._cached_share = cached_share
        self._direct_error = direct_error
        self._available_bytes = available_bytes

    def open_direct(self, descriptor: int) -> int:
        """Refuse, or open as Linux does."""
        if self._direct_error is not None:
            raise self._direct_error
        return super().open_direct(descriptor)

    def read(self, descriptor: int, target: memoryview, offset: int) -> int:
        """Note the read, then do as much of it as the script allows."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(target))
        self.reads.append((offset, len(target), address))
        limit = len(target)
        if self._on_read is not None:
            limit = self._on_read(len(self.reads) - 1, target, offset)
        return super().read(descriptor, target[:limit], offset)

    def cached_pages(self, descriptor: int) -> int | None:
        """What the script says is cached."""
        if self._cached_share is None:
            return None
        file_bytes = os.fstat(descriptor).st_size
        return int(self._cached_share * file_bytes / self.page_bytes)

    def memory(self) -> Memory:
        """What the script says is available."""
        real = super().memory()
        return real if self._available_bytes is None else Memory(real.total, self._available_bytes)
