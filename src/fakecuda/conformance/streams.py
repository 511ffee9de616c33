"""Rows about streams, events, and what they order."""

import ctypes
import threading
from typing import Any

from fakecuda.conformance.row import row
from fakecuda.conformance.subject import NO_TIMING, NON_BLOCKING, Subject

_BYTES = 4096
_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@row("INVALID_VALUE")
def create_stream_with_unknown_flags(subject: Subject) -> str:
    """Stream flag 2 does not exist."""
    return subject.code(subject.cu.cuStreamCreate(2))


@row("INVALID_VALUE")
def create_event_with_unknown_flags(subject: Subject) -> str:
    """Event flag 16 does not exist."""
    return subject.code(subject.cu.cuEventCreate(16))


@row("1, 0")
def stream_flags(subject: Subject) -> str:
    """A stream knows the flags it was made with."""
    flags = (
        int(subject.ok(subject.cu.cuStreamGetFlags(subject.stream(f)))) for f in (NON_BLOCKING, 0)
    )
    return ", ".join(map(str, flags))


@row("SUCCESS, NOT_READY, SUCCESS")
def query_stream(subject: Subject) -> str:
    """A query tells an idle stream, a held one, and one that has been awaited."""
    stream, target, source = subject.stream(), subject.device(_BYTES), subject.pinned(_BYTES)
    outcomes = [subject.code(subject.cu.cuStreamQuery(stream))]
    with subject.held(stream):
        subject.ok(subject.cu.cuMemcpyHtoDAsync(target, source, _BYTES, stream))
        outcomes.append(subject.code(subject.cu.cuStreamQuery(stream)))
    subject.ok(subject.cu.cuStreamSynchronize(stream))
    outcomes.append(subject.code(subject.cu.cuStreamQuery(stream)))
    return ", ".join(outcomes)


@row("NOT_READY, SUCCESS")
def query_event(subject: Subject) -> str:
    """A query tells an event behind held work from one that has been awaited."""
    stream, event = subject.stream(), subject.event()
    with subject.held(stream):
        subject.ok(subject.cu.cuEventRecord(event, stream))
        first = subject.code(subject.cu.cuEventQuery(event))
    subject.ok(subject.cu.cuEventSynchronize(event))
    return f"{first}, {subject.code(subject.cu.cuEventQuery(event))}"


@row("SUCCESS, SUCCESS, SUCCESS")
def event_never_recorded(subject: Subject) -> str:
    """An event that was never recorded counts as done."""
    stream, event = subject.stream(), subject.event()
    results = (
        subject.cu.cuEventQuery(event),
        subject.cu.cuEventSynchronize(event),
        subject.cu.cuStreamWaitEvent(stream, event, 0),
    )
    return ", ".join(subject.code(result) for result in results)


@row("INVALID_HANDLE")
def elapsed_time_unrecorded(subject: Subject) -> str:
    """There is no time between events that were never recorded."""
    return subject.code(subject.cu.cuEventElapsedTime(subject.event(0), subject.event(0)))


@row("INVALID_HANDLE")
def elapsed_time_without_timing(subject: Subject) -> str:
    """There is no time between events made without timing."""
    stream, first, second = subject.stream(), subject.event(NO_TIMING), subject.event(NO_TIMING)
    for event in (first, second):
        subject.ok(subject.cu.cuEventRecord(event, stream))
    subject.ok(subject.cu.cuStreamSynchronize(stream))
    return subject.code(subject.cu.cuEventElapsedTime(first, second))


@row("NOT_READY")
def elapsed_time_pending(subject: Subject) -> str:
    """There is no time yet while the later event is pending."""
    stream, first, second = subject.stream(), subject.event(0), subject.event(0)
    subject.ok(subject.cu.cuEventRecord(first, stream))
    subject.ok(subject.cu.cuStreamSynchronize(stream))
    with subject.held(stream):
        subject.ok(subject.cu.cuEventRecord(second, stream))
        outcome = subject.code(subject.cu.cuEventElapsedTime(first, second))
    subject.ok(subject.cu.cuStreamSynchronize(stream))
    return outcome


@row("not negative")
def elapsed_time(subject: Subject) -> str:
    """Time between two recorded events does not run backwards."""
    stream, first, second = subject.stream(), subject.event(0), subject.event(0)
    target, source = subject.device(_BYTES), subject.pinned(_BYTES)
    subject.ok(subject.cu.cuEventRecord(first, stream))
    subject.ok(subject.cu.cuMemcpyHtoDAsync(target, source, _BYTES, stream))
    subject.ok(subject.cu.cuEventRecord(second, stream))
    subject.ok(subject.cu.cuStreamSynchronize(stream))
    time_ms = float(subject.ok(subject.cu.cuEventElapsedTime(first, second)))
    return "not negative" if time_ms >= 0 else "negative"


@row("INVALID_HANDLE, INVALID_HANDLE")
def null_event(subject: Subject) -> str:
    """The null event can neither be recorded nor waited for."""
    stream = subject.stream()
    results = (subject.cu.cuEventRecord(0, stream), subject.cu.cuStreamWaitEvent(stream, 0, 0))
    return ", ".join(subject.code(result) for result in results)


@row("INVALID_HANDLE, INVALID_HANDLE", alone=True)
def query_null_event(subject: Subject) -> str:
    """The null event can neither be asked nor awaited."""
    subject.start()
    results = (subject.cu.cuEventQuery(0), subject.cu.cuEventSynchronize(0))
    return ", ".join(subject.code(result) for result in results)


@row("INVALID_HANDLE", alone=True)
def destroy_the_null_stream(subject: Subject) -> str:
    """The null stream cannot be destroyed."""
    subject.start()
    return subject.code(subject.cu.cuStreamDestroy(0))


@row("NOT_READY")
def wait_keeps_the_old_capture(subject: Subject) -> str:
    """Recording an event again does not move a wait that was issued before."""
    first, second, event = subject.stream(), subject.stream(), subject.event()
    with subject.held(first):
        subject.ok(subject.cu.cuEventRecord(event, first))
        subject.ok(subject.cu.cuStreamWaitEvent(second, event, 0))
        subject.ok(subject.cu.cuEventRecord(event, second))
        outcome = subject.code(subject.cu.cuStreamQuery(second))
    subject.ok(subject.cu.cuStreamSynchronize(second))
    return outcome


@row("SUCCESS")
def record_again_overwrites(subject: Subject) -> str:
    """An event stands for its last record only."""
    first, second, event = subject.stream(), subject.stream(), subject.event()
    with subject.held(first):
        subject.ok(subject.cu.cuEventRecord(event, first))
        subject.ok(subject.cu.cuEventRecord(event, second))
        subject.ok(subject.cu.cuStreamSynchronize(second))
        outcome = subject.code(subject.cu.cuEventQuery(event))
    subject.ok(subject.cu.cuStreamSynchronize(first))
    return outcome


@row("NOT_READY, then done")
def wait_for_an_event(subject: Subject) -> str:
    """A stream that waits for an event goes on when the event's stream does."""
    first, second, event = subject.stream(), subject.stream(), subject.event()
    with subject.held(first):
        subject.ok(subject.cu.cuEventRecord(event, first))
        subject.ok(subject.cu.cuStreamWaitEvent(second, event, 0))
        outcome = subject.code(subject.cu.cuStreamQuery(second))
    subject.ok(subject.cu.cuStreamSynchronize(second))
    return f"{outcome}, then done"


@row("SUCCESS, and the event's work ran")
def destroy_pending_event(subject: Subject) -> str:
    """Destroying a pending event returns at once and does not stop the work."""
    stream, target, source = subject.stream(), subject.device(_BYTES), subject.pinned(_BYTES, 9)
    event = int(subject.ok(subject.cu.cuEventCreate(NO_TIMING)))
    with subject.held(stream):
        subject.ok(subject.cu.cuMemcpyHtoDAsync(target, source, _BYTES, stream))
        subject.ok(subject.cu.cuEventRecord(event, stream))
        outcome = subject.code(subject.cu.cuEventDestroy(event))
    subject.ok(subject.cu.cuStreamSynchronize(stream))
    ran = subject.first_byte(target, _BYTES) == 9
    return f"{outcome}, and the event's work {'ran' if ran else 'was lost'}"


@row("SUCCESS, and the work ran")
def destroy_stream_with_pending_work(subject: Subject) -> str:
    """Destroying a stream returns at once and its work still runs."""
    target, source = subject.device(_BYTES), subject.pinned(_BYTES, 9)
    stream = int(subject.ok(subject.cu.cuStreamCreate(NON_BLOCKING)))
    with subject.held(stream):
        subject.ok(subject.cu.cuMemcpyHtoDAsync(target, source, _BYTES, stream))
        outcome = subject.code(subject.cu.cuStreamDestroy(stream))
    subject.ok(subject.cu.cuCtxSynchronize())
    ran = subject.first_byte(target, _BYTES) == 9
    return f"{outcome}, and the work {'ran' if ran else 'was lost'}"


@row("INVALID_HANDLE", one_sided="a destroyed handle crashes the process on an H200")
def use_destroyed_stream(subject: Subject) -> str:
    """A destroyed stream is refused and reported."""
    stream = int(subject.ok(subject.cu.cuStreamCreate(NON_BLOCKING)))
    subject.ok(subject.cu.cuStreamDestroy(stream))
    return subject.code(subject.cu.cuStreamQuery(stream))


@row("INVALID_HANDLE", one_sided="a destroyed handle crashes the process on an H200")
def use_destroyed_event(subject: Subject) -> str:
    """A destroyed event is refused and reported."""
    event = int(subject.ok(subject.cu.cuEventCreate(NO_TIMING)))
    subject.ok(subject.cu.cuEventDestroy(event))
    return subject.code(subject.cu.cuEventQuery(event))


@row("blocks, blocks, blocks")
def waits_behind_a_held_stream(subject: Subject) -> str:
    """Synchronising a held stream, an event in it, or the context waits."""
    stream, event = subject.stream(), subject.event()

    def await_event() -> tuple[Any, ...]:
        subject.ok(subject.cu.cuEventRecord(event, stream))
        result: tuple[Any, ...] = subject.cu.cuEventSynchronize(event)
        return result

    return ", ".join(
        [
            subject.waits(stream, lambda: subject.cu.cuStreamSynchronize(stream)),
            subject.waits(stream, await_event),
            subject.waits(stream, subject.cu.cuCtxSynchronize),
        ]
    )


@row("returns")
def synchronise_beside_a_held_stream(subject: Subject) -> str:
    """Synchronising a stream does not wait for another one."""
    stream, other = subject.stream(), subject.stream()
    return subject.waits(stream, lambda: subject.cu.cuStreamSynchronize(other))


@row("NOT_READY, SUCCESS")
def blocking_streams_follow_the_null_stream(subject: Subject) -> str:
    """Work of a blocking stream waits for the null stream, of a non-blocking one not."""
    blocking, free = subject.stream(0), subject.stream(NON_BLOCKING)
    target, other, source = subject.device(_BYTES), subject.device(_BYTES), subject.pinned(_BYTES)
    with subject.held(0):
        subject.ok(subject.cu.cuMemcpyHtoDAsync(target, source, _BYTES, 0))
        subject.ok(subject.cu.cuMemcpyHtoDAsync(target, source, _BYTES, blocking))
        outcome = subject.code(subject.cu.cuStreamQuery(blocking))
        subject.ok(subject.cu.cuMemcpyHtoDAsync(other, source, _BYTES, free))
        subject.ok(subject.cu.cuStreamSynchronize(free))
        beside = subject.code(subject.cu.cuStreamQuery(free))
    subject.ok(subject.cu.cuCtxSynchronize())
    return f"{outcome}, {beside}"


@row("not yet, then called")
def host_function_runs_in_order(subject: Subject) -> str:
    """A host function runs when the work before it is done."""
    stream, called = subject.stream(), threading.Event()
    function = _HostFunction(lambda _: called.set())
    address = ctypes.cast(function, ctypes.c_void_p).value
    with subject.held(stream):
        subject.ok(subject.cu.cuLaunchHostFunc(stream, address, 0))
        early = called.wait(0.2)
    subject.ok(subject.cu.cuStreamSynchronize(stream))
    return f"{'early' if early else 'not yet'}, then {'called' if called.is_set() else 'lost'}"


@row("NOT_PERMITTED", alone=True)
def host_function_calls_the_driver(subject: Subject) -> str:
    """A host function must not call the driver."""
    subject.start()
    outcomes: list[str] = []
    stream = subject.stream()
    function = _HostFunction(lambda _: outcomes.append(subject.code(subject.cu.cuMemGetInfo())))
    address = ctypes.cast(function, ctypes.c_void_p).value
    subject.ok(subject.cu.cuLaunchHostFunc(stream, address, 0))
    subject.ok(subject.cu.cuStreamSynchronize(stream))
    return outcomes[0]


@row("0, then 5")
def write_a_value(subject: Subject) -> str:
    """A value is written when the stream comes to it."""
    stream, word = subject.stream(), subject.pinned(4)
    seen = ctypes.c_uint32.from_address(word)
    with subject.held(stream):
        subject.ok(subject.cu.cuStreamWriteValue32(stream, word, 5, 0))
        early = seen.value
    subject.ok(subject.cu.cuStreamSynchronize(stream))
    return f"{early}, then {seen.value}"


@row("NOT_READY, then done")
def wait_for_a_value(subject: Subject) -> str:
    """A stream that waits for a value goes on when the host writes it."""
    stream, word = subject.stream(), subject.pinned(4)
    seen = ctypes.c_uint32.from_address(word)
    subject.ok(subject.cu.cuStreamWaitValue32(stream, word, 3, 1))
    outcome = subject.code(subject.cu.cuStreamQuery(stream))
    seen.value = 3
    subject.ok(subject.cu.cuStreamSynchronize(stream))
    return f"{outcome}, then done"


@row("INVALID_VALUE", alone=True)
def wait_for_a_value_nowhere(subject: Subject) -> str:
    """A stream cannot wait for a value in memory that the device does not know."""
    subject.start()
    stream, word = subject.stream(), subject.pageable(64)
    return subject.code(subject.cu.cuStreamWaitValue32(stream, word & ~3, 1, 0))
