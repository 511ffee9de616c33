"""The entry points, in one table: fake, recorder, binding check and docs share it.

A row says what a call takes and gives back in the driver's own words. The fake
refuses to be built when its methods and this table differ, a test compares the
table with `cuda.bindings.driver` where that is installed, the journal learns from
it which numbers are handles or addresses, and the documentation page is printed
from it.
"""

from dataclasses import dataclass
from enum import Enum


class Gate(Enum):
    """What must hold before a call does anything.

    `OWNER` is for calls that find the context by what they are given, and need none to
    be current (seen on an H200).
    """

    OPEN = "none"
    INITIALISED = "cuInit"
    OWNER = "cuInit, and its owner alive"
    CONTEXT = "current context"


@dataclass(frozen=True)
class EntryPoint:
    """One driver call.

    Attributes:
        name: The driver's name for it.
        parameters: `(name, kind)` in order; kinds that name a handle or an address
            (`stream`, `event`, `context`, `device_ptr`, `host_ptr`, `ptr`) are
            written symbolically in journals.
        results: Kinds of the values after the result code.
        gate: What must hold first; otherwise the call answers with an error.
        enqueues: True when it adds work to a stream.
        note: One sentence for the documentation.
    """

    name: str
    parameters: tuple[tuple[str, str], ...]
    results: tuple[str, ...]
    gate: Gate
    enqueues: bool
    note: str


def _row(
    signature: str, results: str, gate: Gate, note: str, *, enqueues: bool = False
) -> EntryPoint:
    """Parse `name(parameter:kind, ...)` into a row."""
    name, _, rest = signature.partition("(")
    pairs = [part.strip().split(":") for part in rest.rstrip(")").split(",") if part.strip()]
    parameters = tuple((pair[0], pair[1]) for pair in pairs)
    return EntryPoint(name, parameters, tuple(results.split()), gate, enqueues, note)


_OPEN, _INIT, _OWNER, _CTX = Gate.OPEN, Gate.INITIALISED, Gate.OWNER, Gate.CONTEXT

_ROWS = (
    # Start, errors and devices.
    _row("cuInit(Flags:int)", "", _OPEN, "Starts the driver; flags must be 0."),
    _row("cuDriverGetVersion()", "int", _OPEN, "The newest CUDA version it speaks."),
    _row("cuGetErrorName(error:result)", "bytes", _OPEN, "The name of a result code."),
    _row("cuGetErrorString(error:result)", "bytes", _OPEN, "A sentence for a result code."),
    _row("cuDeviceGetCount()", "int", _INIT, "How many devices there are."),
    _row("cuDeviceGet(ordinal:int)", "device", _INIT, "The device with this ordinal."),
    _row("cuDeviceGetName(length:int, dev:device)", "bytes", _INIT, "The device's name."),
    _row("cuDeviceGetAttribute(attrib:attribute, dev:device)", "int", _INIT, "A device fact."),
    _row("cuDeviceTotalMem(dev:device)", "int", _INIT, "Device memory in bytes."),
    # Contexts.
    _row("cuDevicePrimaryCtxRetain(dev:device)", "context", _INIT, "One more user of it."),
    _row("cuDevicePrimaryCtxRelease(dev:device)", "", _INIT, "One user less; the last destroys."),
    _row("cuDevicePrimaryCtxGetState(dev:device)", "int int", _INIT, "Its flags and activity."),
    _row("cuCtxGetCurrent()", "context", _INIT, "This thread's context, or null."),
    _row("cuCtxSetCurrent(ctx:context)", "", _INIT, "Makes it this thread's context."),
    _row("cuCtxPushCurrent(ctx:context)", "", _INIT, "Stacks it on this thread."),
    _row("cuCtxPopCurrent()", "context", _INIT, "Takes it off this thread."),
    _row("cuCtxGetDevice()", "device", _CTX, "The current context's device."),
    _row("cuCtxSynchronize()", "", _CTX, "Waits for all work of the context."),
    # Memory.
    _row("cuMemGetInfo()", "int int", _CTX, "Free and total device bytes."),
    _row("cuMemAlloc(bytesize:size)", "device_ptr", _CTX, "Device memory, not cleared."),
    _row("cuMemFree(dptr:device_ptr)", "", _OWNER, "Gives device memory back."),
    _row("cuMemHostAlloc(bytesize:size, Flags:int)", "host_ptr", _CTX, "Pinned host memory."),
    _row("cuMemFreeHost(p:host_ptr)", "", _OWNER, "Gives pinned host memory back."),
    _row("cuMemHostRegister(p:host_ptr, bytesize:size, Flags:int)", "", _CTX, "Pins memory."),
    _row("cuMemHostUnregister(p:host_ptr)", "", _CTX, "Undoes a registration."),
    _row(
        "cuMemHostGetDevicePointer(p:host_ptr, Flags:int)",
        "device_ptr",
        _CTX,
        "The device's address of pinned memory.",
    ),
    _row("cuMemHostGetFlags(p:host_ptr)", "int", _CTX, "The flags it was pinned with."),
    _row("cuMemGetAddressRange(dptr:device_ptr)", "device_ptr size", _CTX, "Base and size."),
    _row(
        "cuPointerGetAttribute(attribute:pointer_attribute, ptr:ptr)",
        "any",
        _CTX,
        "A fact about an address.",
    ),
    # Copies and fills that answer when they are done, as far as the driver promises.
    _row("cuMemcpy(dst:ptr, src:ptr, ByteCount:size)", "", _CTX, "Copies between any two."),
    _row(
        "cuMemcpyHtoD(dstDevice:device_ptr, srcHost:host_ptr, ByteCount:size)",
        "",
        _CTX,
        "Host to device.",
    ),
    _row(
        "cuMemcpyDtoH(dstHost:host_ptr, srcDevice:device_ptr, ByteCount:size)",
        "",
        _CTX,
        "Device to host.",
    ),
    _row(
        "cuMemcpyDtoD(dstDevice:device_ptr, srcDevice:device_ptr, ByteCount:size)",
        "",
        _CTX,
        "Device to device; may still run when it returns.",
    ),
    _row(
        "cuMemsetD8(dstDevice:device_ptr, uc:int, N:size)",
        "",
        _CTX,
        "Fills bytes; may still run when it returns.",
    ),
    # The same, as work in a stream.
    _row(
        "cuMemcpyAsync(dst:ptr, src:ptr, ByteCount:size, hStream:stream)",
        "",
        _CTX,
        "Copies between any two, in stream order.",
        enqueues=True,
    ),
    _row(
        "cuMemcpyHtoDAsync(dstDevice:device_ptr, srcHost:host_ptr, ByteCount:size, "
        "hStream:stream)",
        "",
        _CTX,
        "Host to device, in stream order; a pinned source is read when it runs.",
        enqueues=True,
    ),
    _row(
        "cuMemcpyDtoHAsync(dstHost:host_ptr, srcDevice:device_ptr, ByteCount:size, "
        "hStream:stream)",
        "",
        _CTX,
        "Device to host, in stream order; a pageable target makes it wait.",
        enqueues=True,
    ),
    _row(
        "cuMemcpyDtoDAsync(dstDevice:device_ptr, srcDevice:device_ptr, ByteCount:size, "
        "hStream:stream)",
        "",
        _CTX,
        "Device to device, in stream order.",
        enqueues=True,
    ),
    _row(
        "cuMemsetD8Async(dstDevice:device_ptr, uc:int, N:size, hStream:stream)",
        "",
        _CTX,
        "Fills bytes, in stream order.",
        enqueues=True,
    ),
    # Streams.
    _row("cuStreamCreate(Flags:int)", "stream", _CTX, "A new stream."),
    _row("cuStreamDestroy(hStream:stream)", "", _CTX, "Ends it; its work still runs."),
    _row("cuStreamSynchronize(hStream:stream)", "", _CTX, "Waits for the stream's work."),
    _row("cuStreamQuery(hStream:stream)", "", _CTX, "Whether the stream's work is done."),
    _row("cuStreamGetFlags(hStream:stream)", "int", _CTX, "The flags it was made with."),
    _row(
        "cuStreamWaitEvent(hStream:stream, hEvent:event, Flags:int)",
        "",
        _CTX,
        "Later work of the stream waits for the event's last record.",
        enqueues=True,
    ),
    _row(
        "cuStreamWaitValue32(stream:stream, addr:device_ptr, value:int, flags:int)",
        "",
        _CTX,
        "Later work waits until memory holds a value.",
        enqueues=True,
    ),
    _row(
        "cuStreamWriteValue32(stream:stream, addr:device_ptr, value:int, flags:int)",
        "",
        _CTX,
        "Writes a value in stream order.",
        enqueues=True,
    ),
    _row(
        "cuLaunchHostFunc(hStream:stream, fn:function, userData:int)",
        "",
        _CTX,
        "Calls a C function in stream order.",
        enqueues=True,
    ),
    # Events.
    _row("cuEventCreate(Flags:int)", "event", _CTX, "A new event."),
    _row("cuEventDestroy(hEvent:event)", "", _CTX, "Ends it, pending or not."),
    _row(
        "cuEventRecord(hEvent:event, hStream:stream)",
        "",
        _CTX,
        "Marks this place in the stream; overwrites an earlier mark.",
        enqueues=True,
    ),
    _row("cuEventQuery(hEvent:event)", "", _OWNER, "Whether the marked work is done."),
    _row("cuEventSynchronize(hEvent:event)", "", _CTX, "Waits for the marked work."),
    _row(
        "cuEventElapsedTime(hStart:event, hEnd:event)",
        "ms",
        _CTX,
        "Milliseconds between two marks, in the fake's own device time.",
    ),
)

SURFACE: dict[str, EntryPoint] = {row.name: row for row in _ROWS}
"""Every entry point by name."""


def markdown() -> str:
    """The documentation page of the surface.

    Returns:
        A Markdown table with one row for each entry point.
    """
    lines = ["| call | gives | needs | what it does |", "|---|---|---|---|"]
    for row in SURFACE.values():
        takes = ", ".join(name for name, _ in row.parameters)
        gives = ", ".join(row.results) or "-"
        lines.append(f"| `{row.name}({takes})` | {gives} | {row.gate.value} | {row.note} |")
    return "\n".join(lines) + "\n"
