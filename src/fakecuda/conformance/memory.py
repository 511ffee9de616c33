"""Rows about device, pinned and registered memory, and facts about addresses."""

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

from fakecuda.conformance.row import row
from fakecuda.conformance.subject import Subject

_PIB = 1 << 50
_MIB = 1 << 20


@row("INVALID_VALUE")
def alloc_nothing(subject: Subject) -> str:
    """CuMemAlloc of no bytes is refused."""
    return subject.code(subject.cu.cuMemAlloc(0))


@row("multiple of 256")
def alloc_alignment(subject: Subject) -> str:
    """Device addresses are multiples of 256."""
    addresses = [subject.device(nbytes) for nbytes in (1, 100, 257, 70_000)]
    return "multiple of 256" if all(a % 256 == 0 for a in addresses) else "less"


@row("OUT_OF_MEMORY, then SUCCESS")
def alloc_too_much(subject: Subject) -> str:
    """A refused device allocation does no lasting harm."""
    first = subject.code(subject.cu.cuMemAlloc(_PIB))
    result = subject.cu.cuMemAlloc(256)
    second = subject.code(result)
    if second == "SUCCESS":
        subject.ok(subject.cu.cuMemFree(int(result[1])))
    return f"{first}, then {second}"


@row("OUT_OF_MEMORY")
def pin_too_much(subject: Subject) -> str:
    """A pinned allocation beyond all memory is refused."""
    return subject.code(subject.cu.cuMemHostAlloc(_PIB, 0))


@row("SUCCESS")
def pin_nothing(subject: Subject) -> str:
    """CuMemHostAlloc of no bytes succeeds."""
    result = subject.cu.cuMemHostAlloc(0, 0)
    if subject.code(result) == "SUCCESS" and result[1]:
        subject.ok(subject.cu.cuMemFreeHost(int(result[1])))
    return subject.code(result)


@row("INVALID_VALUE, INVALID_VALUE")
def pin_with_unknown_flags(subject: Subject) -> str:
    """Flags 8 and 16 do not exist."""
    results = (subject.cu.cuMemHostAlloc(4096, flag) for flag in (8, 16))
    return ", ".join(subject.code(result) for result in results)


@row("not page-aligned")
def pin_alignment(subject: Subject) -> str:
    """Pinned allocations need not start at a page."""
    addresses = [subject.pinned(100) for _ in range(4)]
    aligned = all(address % mmap.PAGESIZE == 0 for address in addresses)
    return "page-aligned" if aligned else "not page-aligned"


@row("INVALID_VALUE")
def free_inside(subject: Subject) -> str:
    """Freeing an address inside an allocation is refused."""
    return subject.code(subject.cu.cuMemFree(subject.device(4096) + 256))


@row("INVALID_VALUE")
def free_twice(subject: Subject) -> str:
    """Freeing twice is refused."""
    address = int(subject.ok(subject.cu.cuMemAlloc(4096)))
    subject.ok(subject.cu.cuMemFree(address))
    return subject.code(subject.cu.cuMemFree(address))


@row("INVALID_VALUE")
def free_wild(subject: Subject) -> str:
    """Freeing an address that never was one is refused."""
    return subject.code(subject.cu.cuMemFree(0x1000))


@row("INVALID_VALUE")
def free_a_host_address(subject: Subject) -> str:
    """CuMemFree takes no pinned address."""
    return subject.code(subject.cu.cuMemFree(subject.pinned(4096)))


@row("SUCCESS, SUCCESS")
def free_null(subject: Subject) -> str:
    """Freeing null does nothing."""
    results = (subject.cu.cuMemFree(0), subject.cu.cuMemFreeHost(0))
    return ", ".join(subject.code(result) for result in results)


@row("INVALID_VALUE")
def free_host_inside(subject: Subject) -> str:
    """Freeing an address inside a pinned allocation is refused."""
    return subject.code(subject.cu.cuMemFreeHost(subject.pinned(4096) + 64))


@row("INVALID_VALUE")
def free_host_twice(subject: Subject) -> str:
    """Freeing pinned memory twice is refused."""
    address = int(subject.ok(subject.cu.cuMemHostAlloc(4096, 0)))
    subject.ok(subject.cu.cuMemFreeHost(address))
    return subject.code(subject.cu.cuMemFreeHost(address))


@row("INVALID_VALUE")
def free_host_a_device_address(subject: Subject) -> str:
    """CuMemFreeHost takes no device address."""
    return subject.code(subject.cu.cuMemFreeHost(subject.device(4096)))


@row("blocks")
def free_host_under_a_copy(subject: Subject) -> str:
    """Freeing pinned memory under a pending copy waits for the copy."""
    stream, target = subject.stream(), subject.device(4096)
    source = int(subject.ok(subject.cu.cuMemHostAlloc(4096, 0)))

    def free() -> tuple[Any, ...]:
        subject.ok(subject.cu.cuMemcpyHtoDAsync(target, source, 4096, stream))
        result: tuple[Any, ...] = subject.cu.cuMemFreeHost(source)
        return result

    return subject.waits(stream, free)


@row("blocks")
def free_under_a_copy(subject: Subject) -> str:
    """Freeing device memory under a pending copy waits for the copy."""
    stream, source = subject.stream(), subject.pinned(4096)
    target = int(subject.ok(subject.cu.cuMemAlloc(4096)))

    def free() -> tuple[Any, ...]:
        subject.ok(subject.cu.cuMemcpyHtoDAsync(target, source, 4096, stream))
        result: tuple[Any, ...] = subject.cu.cuMemFree(target)
        return result

    return subject.waits(stream, free)


@row("equal")
def device_pointer_of_pinned(subject: Subject) -> str:
    """The device knows pinned memory by the host's address."""
    host = subject.pinned(4096)
    device = int(subject.ok(subject.cu.cuMemHostGetDevicePointer(host, 0)))
    return "equal" if device == host else "another"


@row("equal", "another")
def device_pointer_of_write_combined(subject: Subject) -> str:
    """The device may know write-combined memory by an address of its own."""
    host = int(subject.ok(subject.cu.cuMemHostAlloc(4096, 4)))
    device = int(subject.ok(subject.cu.cuMemHostGetDevicePointer(host, 0)))
    subject.ok(subject.cu.cuMemFreeHost(host))
    return "equal" if device == host else "another"


@row("INVALID_VALUE")
def device_pointer_of_pageable(subject: Subject) -> str:
    """The device has no address for pageable memory."""
    address = subject.pageable(4096)
    return subject.code(subject.cu.cuMemHostGetDevicePointer(address, 0))


@row("HOST_MEMORY_ALREADY_REGISTERED")
def register_twice(subject: Subject) -> str:
    """Registering the same memory twice is refused."""
    return _register_again(subject, 0, mmap.PAGESIZE)


@row("HOST_MEMORY_ALREADY_REGISTERED")
def register_overlapping(subject: Subject) -> str:
    """Registering memory that overlaps a registration is refused."""
    return _register_again(subject, mmap.PAGESIZE, 2 * mmap.PAGESIZE)


@row("INVALID_VALUE", "HOST_MEMORY_ALREADY_REGISTERED")
def register_pinned(subject: Subject) -> str:
    """Registering memory of cuMemHostAlloc is refused."""
    address = subject.pinned(4 * mmap.PAGESIZE)
    return subject.code(subject.cu.cuMemHostRegister(address, mmap.PAGESIZE, 0))


def _register_again(subject: Subject, offset: int, nbytes: int) -> str:
    address = _pages(subject, 4)
    subject.ok(subject.cu.cuMemHostRegister(address, 2 * mmap.PAGESIZE, 0))
    result = subject.cu.cuMemHostRegister(address + offset, nbytes, 0)
    outcome = subject.code(result)
    if outcome == "SUCCESS":
        subject.ok(subject.cu.cuMemHostUnregister(address + offset))
    subject.ok(subject.cu.cuMemHostUnregister(address))
    return outcome


def _pages(subject: Subject, count: int) -> int:
    """The address of whole pages of ordinary memory."""
    start = subject.pageable((count + 1) * mmap.PAGESIZE)
    return -(-start // mmap.PAGESIZE) * mmap.PAGESIZE


@row("HOST_MEMORY_NOT_REGISTERED")
def unregister_unknown(subject: Subject) -> str:
    """Unregistering memory that nobody registered is refused."""
    return subject.code(subject.cu.cuMemHostUnregister(_pages(subject, 1)))


@row("INVALID_VALUE", "HOST_MEMORY_NOT_REGISTERED")
def unregister_inside(subject: Subject) -> str:
    """Unregistering takes only the address that was registered."""
    address = _pages(subject, 2)
    subject.ok(subject.cu.cuMemHostRegister(address, 2 * mmap.PAGESIZE, 0))
    outcome = subject.code(subject.cu.cuMemHostUnregister(address + mmap.PAGESIZE))
    subject.ok(subject.cu.cuMemHostUnregister(address))
    return outcome


@row("INVALID_VALUE")
def register_nothing(subject: Subject) -> str:
    """Registering no bytes is refused."""
    return subject.code(subject.cu.cuMemHostRegister(_pages(subject, 1), 0, 0))


@row("INVALID_VALUE")
def register_with_unknown_flags(subject: Subject) -> str:
    """Flag 32 does not exist."""
    address = _pages(subject, 1)
    return subject.code(subject.cu.cuMemHostRegister(address, mmap.PAGESIZE, 32))


@row("as the attribute says")
def register_read_only(subject: Subject) -> str:
    """A read-only registration succeeds exactly where the device's attribute says so."""
    attribute = subject.cu.CUdevice_attribute
    wanted = attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
    supported = int(subject.ok(subject.cu.cuDeviceGetAttribute(wanted, subject.device_handle)))
    address = _pages(subject, 1)
    outcome = subject.code(subject.cu.cuMemHostRegister(address, mmap.PAGESIZE, 8))
    if outcome == "SUCCESS":
        subject.ok(subject.cu.cuMemHostUnregister(address))
    expected = "SUCCESS" if supported else "NOT_SUPPORTED"
    return "as the attribute says" if outcome == expected else f"{outcome} at {supported}"


@row("DEVICE, HOST, INVALID_VALUE")
def memory_types(subject: Subject) -> str:
    """An address tells where its memory lives, unless it is pageable."""
    wanted = subject.cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    known = []
    for address in (subject.device(256), subject.pinned(256)):
        value = int(subject.ok(subject.cu.cuPointerGetAttribute(wanted, address)))
        known.append(subject.cu.CUmemorytype(value).name.removeprefix("CU_MEMORYTYPE_"))
    pageable = subject.cu.cuPointerGetAttribute(wanted, subject.pageable(256))
    return ", ".join([*known, subject.code(pageable)])


@row("base and size")
def range_of_an_address(subject: Subject) -> str:
    """An address inside device memory leads to its base and size."""
    address = subject.device(70_000)
    base, nbytes = subject.ok(subject.cu.cuMemGetAddressRange(address + 300))
    right = int(base) == address and int(nbytes) == 70_000
    return "base and size" if right else f"{int(base) - address}, {int(nbytes)}"


@row("NOT_FOUND", "INVALID_VALUE")
def range_of_a_wild_address(subject: Subject) -> str:
    """An address of nothing has no range."""
    return subject.code(subject.cu.cuMemGetAddressRange(0x1000))


@row("free is at most total")
def memory_info(subject: Subject) -> str:
    """Free memory is part of the total that the device states."""
    free, total = (int(value) for value in subject.ok(subject.cu.cuMemGetInfo()))
    stated = int(subject.ok(subject.cu.cuDeviceTotalMem(subject.device_handle)))
    return "free is at most total" if 0 < free <= total == stated else f"{free}, {total}, {stated}"


@row("less by the size")
def memory_info_after_alloc(subject: Subject) -> str:
    """A large allocation makes free memory less."""
    before, _ = subject.ok(subject.cu.cuMemGetInfo())
    subject.device(256 * _MIB)
    after, _ = subject.ok(subject.cu.cuMemGetInfo())
    drop = int(before) - int(after)
    # Others may use a shared device at the same time; the allocation dwarfs them.
    return "less by the size" if drop >= 200 * _MIB else f"less by {drop}"


@row("returns, returns, returns, returns")
def memory_calls_beside_a_held_stream(subject: Subject) -> str:
    """Allocating and asking do not wait for a held non-blocking stream."""
    stream, spare, cu = subject.stream(), subject.stream(), subject.cu

    def keep(result: tuple[Any, ...], free: Callable[[int], object]) -> tuple[Any, ...]:
        subject.afterwards(lambda: free(int(result[1])))
        return result

    return ", ".join(
        [
            subject.waits(stream, lambda: keep(cu.cuMemHostAlloc(4096, 0), cu.cuMemFreeHost)),
            subject.waits(stream, lambda: keep(cu.cuMemAlloc(4096), cu.cuMemFree)),
            subject.waits(stream, cu.cuMemGetInfo),
            subject.waits(stream, lambda: cu.cuStreamQuery(spare)),
        ]
    )


@row("faults", one_sided="an H200's host could read there; the fake must fault")
def host_reads_device_memory(subject: Subject) -> str:
    """The host cannot read the fake's device memory at its address."""
    address = subject.device(4096)
    with open("/proc/self/mem", "rb", buffering=0) as own:  # noqa: PTH123 - not a file
        try:
            own.seek(address)
            own.read(16)
        except (OSError, OverflowError):
            return "faults"
    return "reads"


@row("SUCCESS")
def free_host_on_another_thread(subject: Subject) -> str:
    """Pinned memory may be freed on another thread of the context."""
    address = int(subject.ok(subject.cu.cuMemHostAlloc(4096, 0)))
    ctypes.memset(address, 1, 4096)

    def free() -> tuple[Any, ...]:
        subject.ok(subject.cu.cuCtxSetCurrent(subject.context))
        result: tuple[Any, ...] = subject.cu.cuMemFreeHost(address)
        return result

    return subject.code(subject.on_new_thread(free))
