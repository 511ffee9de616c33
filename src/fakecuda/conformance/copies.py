"""Rows about copies and fills: when they read, when they return, what they refuse."""

import ctypes
import mmap

from fakecuda.conformance.row import row
from fakecuda.conformance.subject import Subject

_KIB = 1 << 10
_MIB = 1 << 20
_EARLY, _LATE = 0x11, 0x22
# Far from any allocation and not a canonical user address.
_WILD = 0x000B_0000_0000_0000


def _rewritten_source(subject: Subject, source: int, nbytes: int) -> str:
    """Rewrite a copy's source while the stream is held; tell which bytes arrive."""
    stream, target = subject.stream(), subject.device(nbytes)
    ctypes.memset(source, _EARLY, nbytes)
    with subject.held(stream):
        subject.ok(subject.cu.cuMemcpyHtoDAsync(target, source, nbytes, stream))
        ctypes.memset(source, _LATE, nbytes)
    subject.ok(subject.cu.cuStreamSynchronize(stream))
    return {_EARLY: "early", _LATE: "late"}[subject.first_byte(target, nbytes)]


@row("late, late")
def pinned_source_is_read_late(subject: Subject) -> str:
    """An asynchronous copy reads its pinned source when it runs."""
    sizes = (4 * _KIB, 8 * _MIB)
    return ", ".join(_rewritten_source(subject, subject.pinned(n), n) for n in sizes)


@row("late")
def registered_source_is_read_late(subject: Subject) -> str:
    """An asynchronous copy reads its registered source when it runs."""
    start = subject.pageable(3 * mmap.PAGESIZE)
    source = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    subject.ok(subject.cu.cuMemHostRegister(source, 2 * mmap.PAGESIZE, 0))
    outcome = _rewritten_source(subject, source, 2 * mmap.PAGESIZE)
    subject.ok(subject.cu.cuMemHostUnregister(source))
    return outcome


@row("early, early, early")
def pageable_source_is_read_early(subject: Subject) -> str:
    """An asynchronous copy has read a pageable source of up to 1 MiB when it returns."""
    sizes = (4 * _KIB, 64 * _KIB, _MIB)
    return ", ".join(_rewritten_source(subject, subject.pageable(n), n) for n in sizes)


@row("blocks")
def large_pageable_copy_blocks(subject: Subject) -> str:
    """An asynchronous copy of 8 MiB of pageable memory waits for its stream."""
    stream, target, source = subject.stream(), subject.device(8 * _MIB), subject.pageable(8 * _MIB)
    return subject.waits(
        stream, lambda: subject.cu.cuMemcpyHtoDAsync(target, source, 8 * _MIB, stream)
    )


@row("blocks")
def copy_to_pageable_blocks(subject: Subject) -> str:
    """An asynchronous copy to pageable memory waits for its stream."""
    stream, source, target = subject.stream(), subject.device(4 * _KIB), subject.pageable(4 * _KIB)
    return subject.waits(
        stream, lambda: subject.cu.cuMemcpyDtoHAsync(target, source, 4 * _KIB, stream)
    )


@row("returns")
def copy_to_pinned_returns(subject: Subject) -> str:
    """An asynchronous copy to pinned memory returns at once."""
    stream, source, target = subject.stream(), subject.device(4 * _KIB), subject.pinned(4 * _KIB)
    return subject.waits(
        stream, lambda: subject.cu.cuMemcpyDtoHAsync(target, source, 4 * _KIB, stream)
    )


@row("returns")
def fill_returns(subject: Subject) -> str:
    """An asynchronous fill returns at once."""
    stream, target = subject.stream(), subject.device(4 * _KIB)
    return subject.waits(stream, lambda: subject.cu.cuMemsetD8Async(target, 7, 4 * _KIB, stream))


@row("equal")
def round_trip(subject: Subject) -> str:
    """Bytes come back as they went: host, device, device, host."""
    nbytes = 100_003
    source, target = subject.pinned(nbytes), subject.pinned(nbytes)
    first, second = subject.device(nbytes), subject.device(nbytes)
    data = bytes((7 * i + 3) % 251 for i in range(nbytes))
    ctypes.memmove(source, data, nbytes)
    subject.ok(subject.cu.cuMemcpyHtoD(first, source, nbytes))
    subject.ok(subject.cu.cuMemcpyDtoD(second, first, nbytes))
    subject.ok(subject.cu.cuMemcpyDtoH(target, second, nbytes))
    return "equal" if ctypes.string_at(target, nbytes) == data else "unequal"


@row("equal")
def copies_between_any(subject: Subject) -> str:
    """CuMemcpy finds out by itself where its ends live."""
    nbytes = 5000
    source, target = subject.pinned(nbytes, _LATE), subject.pinned(nbytes)
    memory = subject.device(nbytes)
    subject.ok(subject.cu.cuMemcpy(memory, source, nbytes))
    subject.ok(subject.cu.cuMemcpy(target, memory, nbytes))
    return "equal" if ctypes.string_at(target, nbytes) == bytes([_LATE]) * nbytes else "unequal"


@row("SUCCESS")
def copy_nothing(subject: Subject) -> str:
    """A copy of no bytes succeeds."""
    target, source, stream = subject.device(256), subject.pinned(256), subject.stream()
    return subject.code(subject.cu.cuMemcpyHtoDAsync(target, source, 0, stream))


@row("returns")
def sync_copy_beside_a_held_stream(subject: Subject) -> str:
    """A synchronous copy does not wait for a held non-blocking stream."""
    stream, target, source = subject.stream(), subject.device(4 * _KIB), subject.pinned(4 * _KIB)
    return subject.waits(stream, lambda: subject.cu.cuMemcpyHtoD(target, source, 4 * _KIB))


@row("blocks")
def sync_copy_behind_a_blocking_stream(subject: Subject) -> str:
    """A synchronous copy waits for a held blocking stream."""
    stream, target, source = subject.stream(0), subject.device(4 * _KIB), subject.pinned(4 * _KIB)
    return subject.waits(stream, lambda: subject.cu.cuMemcpyHtoD(target, source, 4 * _KIB))


@row("returns")
def null_stream_copy_beside_a_held_stream(subject: Subject) -> str:
    """An asynchronous copy on the null stream returns beside a held stream."""
    stream, target, source = subject.stream(), subject.device(4 * _KIB), subject.pinned(4 * _KIB)
    return subject.waits(stream, lambda: subject.cu.cuMemcpyHtoDAsync(target, source, 4 * _KIB, 0))


@row("INVALID_VALUE", alone=True)
def copy_to_a_wild_address(subject: Subject) -> str:
    """A copy to an address of nothing is refused at the call."""
    subject.start()
    source, stream = subject.pinned(4096), subject.stream()
    first = subject.code(subject.cu.cuMemcpyHtoDAsync(_WILD, source, 4096, stream))
    if first != "SUCCESS":
        return first
    return "SUCCESS, then " + subject.code(subject.cu.cuStreamSynchronize(stream))


@row("INVALID_VALUE", alone=True)
def copy_beyond_device_memory(subject: Subject) -> str:
    """A copy that runs over the end of a large device allocation is refused."""
    subject.start()
    nbytes = 64 * _MIB
    target, source = subject.device(nbytes), subject.pinned(4096)
    result = subject.cu.cuMemcpyHtoD(target + nbytes - 2048, source, 4096)
    return subject.code(result)


@row("INVALID_VALUE", alone=True)
def copy_beyond_pinned_memory(subject: Subject) -> str:
    """A copy that runs over the end of a large pinned allocation is refused."""
    subject.start()
    nbytes = 4 * _MIB
    target, source = subject.device(nbytes), subject.pinned(nbytes)
    return subject.code(subject.cu.cuMemcpyHtoD(target, source + 4096, nbytes))


@row("INVALID_VALUE", alone=True)
def copy_across_two_registrations(subject: Subject) -> str:
    """A source that lies in two registrations is refused."""
    subject.start()
    page = mmap.PAGESIZE
    start = subject.pageable(5 * page)
    address = -(-start // page) * page
    target, stream = subject.device(4 * page), subject.stream()
    subject.ok(subject.cu.cuMemHostRegister(address, 2 * page, 0))
    subject.ok(subject.cu.cuMemHostRegister(address + 2 * page, 2 * page, 0))
    return subject.code(subject.cu.cuMemcpyHtoDAsync(target, address, 4 * page, stream))


@row("SUCCESS", alone=True)
def copy_from_a_device_address_as_host(subject: Subject) -> str:
    """CuMemcpyHtoD goes by the addresses: its host source may be a device address."""
    subject.start()
    target, source = subject.device(4096), subject.device(4096)
    return subject.code(subject.cu.cuMemcpyHtoD(target, source, 4096))


@row("INVALID_VALUE", alone=True)
def copy_to_a_pageable_address_as_device(subject: Subject) -> str:
    """CuMemcpyHtoD takes no pageable address as its device target."""
    subject.start()
    attribute = subject.cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS
    if int(subject.ok(subject.cu.cuDeviceGetAttribute(attribute, subject.device_handle))):
        # Such a device may well copy between any two addresses of the process.
        return "INVALID_VALUE"
    target, source = subject.pageable(4096), subject.pinned(4096)
    return subject.code(subject.cu.cuMemcpyHtoD(target, source, 4096))


@row("fresh", "stale")
def sync_pageable_copy_and_a_non_blocking_stream(subject: Subject) -> str:
    """A synchronous pageable copy is not ordered with a non-blocking stream."""
    nbytes = 1_146_880
    stream, first, second = subject.stream(), subject.device(nbytes), subject.device(nbytes)
    source, seen = subject.pageable(nbytes), subject.pinned(nbytes)
    for attempt in range(1, 201):
        fill = attempt % 250 + 1
        ctypes.memset(source, fill, nbytes)
        subject.ok(subject.cu.cuMemcpyHtoD(first, source, nbytes))
        subject.ok(subject.cu.cuMemcpyDtoDAsync(second, first, nbytes, stream))
        subject.ok(subject.cu.cuMemcpyDtoHAsync(seen, second, nbytes, stream))
        subject.ok(subject.cu.cuStreamSynchronize(stream))
        data = ctypes.string_at(seen, nbytes)
        subject.ok(subject.cu.cuCtxSynchronize())
        if data.count(bytes([fill])) != nbytes:
            return "stale"
    return "fresh"


@row("ordered")
def fill_then_copy_in_one_stream(subject: Subject) -> str:
    """Work of one stream runs in the order in which it was queued."""
    nbytes = 64 * _KIB
    stream, target, source = (
        subject.stream(),
        subject.device(nbytes),
        subject.pinned(nbytes, _LATE),
    )
    with subject.held(stream):
        subject.ok(subject.cu.cuMemsetD8Async(target, _EARLY, nbytes, stream))
        subject.ok(subject.cu.cuMemcpyHtoDAsync(target, source, nbytes, stream))
    subject.ok(subject.cu.cuStreamSynchronize(stream))
    return "ordered" if subject.first_byte(target, nbytes) == _LATE else "swapped"
