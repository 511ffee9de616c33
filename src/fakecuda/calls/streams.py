"""Streams, events, and what may be put into a stream beside copies."""

import ctypes
from collections.abc import Callable

from fakecuda.calls.contexts import ContextCalls
from fakecuda.calls.machine import Refused, entry
from fakecuda.enums import CUresult, CUstreamWaitValue_flags
from fakecuda.memory import Block
from fakecuda.work import Access, Event, Op, Stream

_NON_BLOCKING = 1
_EVENT_FLAGS = 7
_DISABLE_TIMING = 2
# A query says "not ready" at most so often before it lets the work run.
_REFUSALS_MAX = 2


class StreamCalls(ContextCalls):
    """Calls that make, order and await work."""

    @entry
    def cuStreamCreate(self, flags: int) -> int:
        if flags & ~_NON_BLOCKING:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        handle = self._new_handle()
        stream = self._new_stream(
            handle, self._context(), flags, blocking=not flags & _NON_BLOCKING
        )
        self._streams[handle] = stream
        return handle

    @entry
    def cuStreamDestroy(self, handle: int) -> None:
        stream = self._streams.pop(handle, None)
        if stream is None:
            raise self._unknown_handle(handle, "stream")
        self._bury(handle, stream)
        self._order.drop_if_drained(stream)

    @entry
    def cuStreamSynchronize(self, handle: int) -> None:
        self._engine.await_all([self._stream(handle).last])

    @entry
    def cuStreamQuery(self, handle: int) -> None:
        stream = self._stream(handle)
        self._query(stream, stream.last)

    @entry
    def cuStreamGetFlags(self, handle: int) -> int:
        return self._stream(handle).flags

    @entry
    def cuStreamWaitEvent(self, handle: int, event_handle: int, flags: int) -> None:
        stream, event = self._stream(handle), self._event(event_handle)
        if flags & ~1:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        if event.capture is not None:
            op = Op("wait", self._here.call, self._here.site)
            self._engine.queue(stream, op, (event.capture,))

    @entry
    def cuStreamWaitValue32(self, handle: int, address: int, value: int, flags: int) -> None:
        stream = self._stream(handle)
        block, real = self._word(address)
        if flags & ~(3 | CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_FLUSH):
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        compare = _COMPARISONS[CUstreamWaitValue_flags(flags & 3)]
        word = ctypes.c_uint32.from_address(real)
        op = Op("wait-value", self._here.call, self._here.site)
        op.keepers = (block.keeper,)
        op.ready = lambda: compare(word.value, value & 0xFFFFFFFF)
        self._engine.queue(stream, op)

    @entry
    def cuStreamWriteValue32(self, handle: int, address: int, value: int, flags: int) -> None:
        stream = self._stream(handle)
        if flags & ~1:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        block, real = self._word(address)
        word = ctypes.c_uint32.from_address(real)
        op = Op("write-value", self._here.call, self._here.site)
        op.accesses = (Access(block, address, 4, writes=True),)
        op.keepers = (block.keeper,)
        op.action = lambda: setattr(word, "value", value & 0xFFFFFFFF)
        if block.kind == "device":
            block.mark_written(address - block.address, address - block.address + 4)
        self._engine.queue(stream, op)

    @entry
    def cuLaunchHostFunc(self, handle: int, function: int, user_data: int) -> None:
        stream = self._stream(handle)
        if not function:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        op = Op("call", self._here.call, self._here.site)
        op.action = lambda: self._call_host(function, user_data)
        self._engine.queue(stream, op)

    @entry
    def cuEventCreate(self, flags: int) -> int:
        if flags & ~_EVENT_FLAGS:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        handle = self._new_handle()
        self._events[handle] = Event(handle, self._context(), flags, self._here.site)
        return handle

    @entry
    def cuEventDestroy(self, handle: int) -> None:
        self._bury(handle, self._event(handle))
        del self._events[handle]

    @entry
    def cuEventRecord(self, event_handle: int, handle: int) -> None:
        event, stream = self._event(event_handle), self._stream(handle)
        if event.context is not stream.context:
            raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
        op = Op("record", self._here.call, self._here.site)
        self._engine.queue(stream, op)
        event.capture, event.refusals = op, 0

    @entry
    def cuEventQuery(self, handle: int) -> None:
        event = self._event(handle)
        self._must_be_alive(event.context)
        self._query(event, event.capture)

    @entry
    def cuEventSynchronize(self, handle: int) -> None:
        self._engine.await_all([self._event(handle).capture])

    @entry
    def cuEventElapsedTime(self, start_handle: int, end_handle: int) -> float:
        start, end = self._event(start_handle), self._event(end_handle)
        if start.capture is None or end.capture is None:
            raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
        if (start.flags | end.flags) & _DISABLE_TIMING:
            raise Refused(CUresult.CUDA_ERROR_INVALID_HANDLE)
        if not (start.capture.done and end.capture.done):
            raise Refused(CUresult.CUDA_ERROR_NOT_READY)
        return end.capture.ended_ms - start.capture.ended_ms

    def _query(self, asked: Stream | Event, op: Op | None) -> None:
        """Answer a query: "not ready" while the schedule wants it, but not for ever."""
        if op is None or op.done:
            self._engine.host_knows(op)
            return
        if asked.refusals < _REFUSALS_MAX and not self._choose("query", 2):
            asked.refusals += 1
            raise Refused(CUresult.CUDA_ERROR_NOT_READY)
        if not self._engine.try_to_finish(op):
            raise Refused(CUresult.CUDA_ERROR_NOT_READY)
        asked.refusals = 0
        self._engine.host_knows(op)

    def _word(self, address: int) -> tuple[Block, int]:
        """The real address behind a 32-bit word that the device may use."""
        block = self._memory.find(address)
        if block is None or address % 4:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        start = block.address if address >= block.address else block.device_address
        return block, block.base + address - start

    def _call_host(self, function: int, user_data: int) -> None:
        """Call the host with the lock released; it must not call the driver."""
        self._here.in_callback = True
        self._mutex.release()
        try:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)(user_data)
        finally:
            self._mutex.acquire()
            self._here.in_callback = False


def _signed_distance(word: int, value: int) -> int:
    distance = (word - value) & 0xFFFFFFFF
    return distance - (1 << 32) if distance >> 31 else distance


_COMPARISONS: dict[CUstreamWaitValue_flags, Callable[[int, int], bool]] = {
    CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ: lambda word, value: (
        _signed_distance(word, value) >= 0
    ),
    CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ: lambda word, value: word == value,
    CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_AND: lambda word, value: bool(word & value),
    CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_NOR: lambda word, value: bool(
        ~(word | value) & 0xFFFFFFFF
    ),
}
