"""Reaching the bytes that a loader's process hands out, to hash them and to plant faults there.

On a GPU the harness opens the other process's allocations by CUDA IPC, and its own hold on the
device does the rest.  Where there is no GPU the bytes lie in shared memory, which stands for the
device's: that is a rehearsal of bytes and of the machinery, and nothing else.

Shared memory is mapped to be written to, so that faults can be planted.  Therefore it has to be
shared memory, and none of the checkpoint's own files.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from loadproof.errors import DeviceError
from loadproof.measure.command import CommandError
from loadproof.measure.device import Device, manifest_of
from loadproof.measure.ground_truth import shard_paths
from loadproof.measure.messages import DeviceFacts
from loadproof.measure.protocol import SHARED_MEMORY, CudaIpc, SharedMemory

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from loadproof.measure.command import CommandLoader
    from loadproof.measure.digest import Manifest
    from loadproof.measure.protocol import Load, Loaded, Memory

_SHARED_PLACES = ("/dev/shm/", "/memfd:")  # noqa: S108 -- what the kernel calls them


class HandedTensor(NamedTuple):
    """One tensor in another process's memory.

    Attributes:
        dtype: By the name that safetensors gives it.
        shape: Elements along each axis.
        nbytes: Length in bytes.
        address: Where its first byte is, as this process sees it.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    address: int

    def data_ptr(self) -> int:
        """Return the address, as a tensor of torch's does."""
        return self.address


class Routes(dict[str, int]):
    """What a loader says about its routes, in the shape of a loader's report."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {"route_bytes": dict(self)}


class HandedOut(dict[str, HandedTensor]):
    """All tensors of a loader's process; it keeps them until this is closed.

    Attributes:
        report: Bytes by route; None when the loader does not say.
    """

    def __init__(self, loader: CommandLoader, loaded: Loaded, areas: Sequence[_Area]) -> None:
        super().__init__()
        for each in loaded.tensors:
            address = areas[each.memory].address + each.offset
            self[each.name] = HandedTensor(each.dtype, each.shape, each.nbytes, address)
        self.report = Routes(loaded.route_bytes) if loaded.route_bytes else None
        self._loader = loader
        self._areas = areas

    def close(self) -> None:
        """Let go of the memory, have it freed, and wait for the process to end.

        Raises:
            CommandError: It did not end as it should.
        """
        with self._loader.running():
            for each in self._areas:
                each.close()
        self._loader.release()


class SharedMemoryDevice:
    """Shared memory in a device's place, with as much of its face as a leg needs.

    Attributes:
        loader_device: What the loader is told.
        loader_driver: None: there is no driver.
    """

    loader_device = SHARED_MEMORY
    loader_driver = None

    def __init__(self, spoken: str) -> None:
        """Take the fake device by its plain name: no profile has a say here.

        Raises:
            DeviceError: A profile was asked for.
        """
        if spoken != "fake":
            raise DeviceError(
                f"A loader that is a program has no fake device {spoken!r}: its process cannot "
                "reach one; say fake, for shared memory, or cuda:<ordinal>."
            )

    def close(self) -> None:
        """Do nothing: the memory is the loader's."""

    def synchronize(self) -> None:
        """Do nothing: the loader's processes stand still."""

    def poison(self, _nbytes: int) -> None:
        """Do nothing: memory that a loader will take cannot be filled from here."""

    def facts(self) -> DeviceFacts:
        """Say that this is no device."""
        return DeviceFacts(
            name="shared memory",
            fake=True,
            capability=(0, 0),
            integrated=False,
            host_page_tables=False,
            driver_version=0,
        )

    def read(self, address: int, nbytes: int) -> bytes:
        """Return bytes of the memory."""
        return ctypes.string_at(address, nbytes)

    def write(self, address: int, content: bytes) -> None:
        """Change bytes of the memory."""
        ctypes.memmove(address, content, len(content))

    def free_bytes(self) -> None:
        """Give no figure: what is free here is the machine's memory."""

    def not_here(self, _tensors: Mapping[str, Any]) -> list[str]:
        """Name none: whatever was handed out was mapped as shared memory."""
        return []

    def poison_pattern(self) -> bytes:
        """Return no pattern: nothing was put there before."""
        return b""

    def poisoned_bytes(self, _tensors: Mapping[str, Any]) -> int:
        """Return 0, for the same reason."""
        return 0

    def manifest(self, tensors: Mapping[str, Any]) -> Manifest:
        """Hash every tensor's bytes where they are."""
        return manifest_of(tensors, self.chunks)

    def chunks(self, _name: str, tensor: Any) -> Iterator[memoryview]:  # noqa: ANN401
        """Return all of a tensor as one chunk."""
        if tensor.nbytes:
            yield memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))

    def device_to_host_copies(self) -> None:
        """Give no figure: nobody counts."""

    def hazards(self) -> tuple[str, ...]:
        """Return none: nobody looks."""
        return ()


AnyDevice = Device | SharedMemoryDevice


def open_device(spoken: str, *, of_a_program: bool) -> AnyDevice:
    """Open what a loader loads onto.

    Args:
        spoken: ``fake``, ``fake:<profile>`` or ``cuda:<ordinal>``.
        of_a_program: Whether the loader runs in a process of its own.

    Raises:
        DeviceError: There is no such device here.
    """
    if of_a_program and spoken.partition(":")[0] == "fake":
        return SharedMemoryDevice(spoken)
    return Device(spoken, with_torch=not of_a_program)


def timed_load(
    loader: CommandLoader, device: AnyDevice, load: Load, delay_fraction: float
) -> tuple[HandedOut, float]:
    """Have a process load, and reach what it hands out once the clock has stopped.

    Raises:
        CommandError: It failed, or its memory cannot be reached.
    """
    loaded, elapsed_s = loader.timed_load(load, delay_fraction)
    private = {
        (file.st_dev, file.st_ino) for file in map(Path.stat, shard_paths(Path(load.checkpoint)))
    }
    if isinstance(device, SharedMemoryDevice):
        areas: list[_Area] = [_Mapped(each, private) for each in loaded.memory]
    else:
        # The driver may need the exporting process to open its memory.
        with loader.running():
            areas = [_Imported(each, device) for each in loaded.memory]
    return HandedOut(loader, loaded, areas), elapsed_s


class _Mapped:
    """A stretch of shared memory, mapped here."""

    def __init__(self, memory: Memory, private: Collection[tuple[int, int]]) -> None:
        """Map it.

        Args:
            memory: What the loader handed out.
            private: Device and inode of files that must never be written to.

        Raises:
            CommandError: It is not shared memory, or cannot be mapped.
        """
        if not isinstance(memory, SharedMemory):
            raise _unreachable("there is no GPU here, so it has to be shared-memory")
        self.address = 0
        self._view: Any = None
        try:
            # O_NONBLOCK: a pipe in its place must not hold the leg up.
            file = os.open(memory.path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                place = str(Path(f"/proc/self/fd/{file}").readlink())
                found = os.fstat(file)
                if not place.startswith(_SHARED_PLACES):
                    raise _unreachable("the file that it names is not in shared memory")
                if (found.st_dev, found.st_ino) in private:
                    raise _unreachable("the file that it names is the checkpoint's own")
                if memory.nbytes:
                    mapping = mmap.mmap(file, memory.nbytes)
                    self._view = (ctypes.c_ubyte * memory.nbytes).from_buffer(mapping)
                    self.address = ctypes.addressof(self._view)
            finally:
                os.close(file)
        except OSError as error:
            raise _unreachable(f"it cannot be opened: {error.strerror}") from error
        except ValueError as error:
            raise _unreachable("it is shorter than the loader says") from error

    def close(self) -> None:
        """Unmap it."""
        self._view = None


class _Imported:
    """An allocation of the other process on the GPU, opened here."""

    def __init__(self, memory: Memory, device: Device) -> None:
        """Open it.

        Raises:
            CommandError: It is no handle, or the driver refuses it.
        """
        if not isinstance(memory, CudaIpc):
            raise _unreachable("on a GPU it has to be cuda-ipc")
        self._device = device
        try:
            self.address = device.open_ipc(memory.handle)
        except DeviceError as error:
            raise _unreachable(str(error).rstrip(".")) from error

    def close(self) -> None:
        """Let go of it.

        Raises:
            DeviceError: The driver refuses.
        """
        self._device.close_ipc(self.address)


_Area = _Mapped | _Imported


def _unreachable(why: str) -> CommandError:
    return CommandError("protocol-memory", f"The loader's memory cannot be reached: {why}.")
