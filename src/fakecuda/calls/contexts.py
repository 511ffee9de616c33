"""Start, errors, devices and contexts."""

from fakecuda.calls.machine import Context, Machine, Refused, entry
from fakecuda.enums import CUdevice_attribute, CUresult
from fakecuda.hazards import Site
from fakecuda.work import Event, Op, Stream

_DRIVER_VERSION = 13000


class ContextCalls(Machine):
    """Calls that set the scene."""

    @entry
    def cuInit(self, flags: int) -> None:
        if flags:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        self._started = True

    @entry
    def cuDriverGetVersion(self) -> int:
        return _DRIVER_VERSION

    @entry
    def cuGetErrorName(self, error: int) -> bytes:
        return _known(error).name.encode()

    @entry
    def cuGetErrorString(self, error: int) -> bytes:
        words = _known(error).name.removeprefix("CUDA_ERROR_").removeprefix("CUDA_")
        return words.replace("_", " ").lower().encode()

    @entry
    def cuDeviceGetCount(self) -> int:
        return self._device_count

    @entry
    def cuDeviceGet(self, ordinal: int) -> int:
        return self._device(ordinal)

    @entry
    def cuDeviceGetName(self, length: int, device: int) -> bytes:
        self._device(device)
        return self.profile.name.encode()[: max(length - 1, 0)]

    @entry
    def cuDeviceGetAttribute(self, attribute: int, device: int) -> int:
        self._device(device)
        try:
            known = CUdevice_attribute(attribute)
        except ValueError:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE) from None
        return self.profile.value_of(known)

    @entry
    def cuDeviceTotalMem(self, device: int) -> int:
        self._device(device)
        return self._accounts.total_bytes

    @entry
    def cuDevicePrimaryCtxRetain(self, device: int) -> int:
        ordinal = self._device(device)
        alive = (known for known in self._contexts.values() if known.users)
        context = next((known for known in alive if known.device == ordinal), None)
        if context is None:
            self._newest_handle += 0x40
            context = Context(self._newest_handle, ordinal, self._here.site)
            context.legacy = self._new_stream(0, context, 0, blocking=True)
            self._contexts[context.handle] = context
        context.users += 1
        return context.handle

    @entry
    def cuDevicePrimaryCtxRelease(self, device: int) -> None:
        ordinal = self._device(device)
        for context in self._contexts.values():
            if context.device == ordinal and context.users:
                context.users -= 1
                if not context.users:
                    self._destroy_context(context)
                return
        raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)

    @entry
    def cuDevicePrimaryCtxGetState(self, device: int) -> tuple[int, int]:
        ordinal = self._device(device)
        active = any(c.device == ordinal and c.users for c in self._contexts.values())
        return 0, int(active)

    @entry
    def cuCtxGetCurrent(self) -> int:
        stack = self._here.contexts
        return stack[-1].handle if stack else 0

    @entry
    def cuCtxSetCurrent(self, handle: int) -> None:
        stack = self._here.contexts
        if handle == 0:
            del stack[-1:]
            return
        stack[-1:] = [self._known_context(handle)]

    @entry
    def cuCtxPushCurrent(self, handle: int) -> None:
        context = self._known_context(handle)
        self._here.contexts.append(context)

    @entry
    def cuCtxPopCurrent(self) -> int:
        stack = self._here.contexts
        if not stack:
            raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        return stack.pop().handle

    @entry
    def cuCtxGetDevice(self) -> int:
        return self._context().device

    @entry
    def cuCtxSynchronize(self) -> None:
        context = self._context()
        self._engine.await_all(
            [stream.last for stream in self._order.streams if stream.context is context]
        )

    def _device(self, ordinal: int) -> int:
        if not 0 <= ordinal < self._device_count:
            raise Refused(CUresult.CUDA_ERROR_INVALID_DEVICE)
        return ordinal

    def _known_context(self, handle: int) -> Context:
        context = self._contexts.get(handle)
        if context is None:
            raise Refused(CUresult.CUDA_ERROR_INVALID_CONTEXT)
        if not context.users:
            self._report("USE-AFTER-DESTROY", None, detail="the context was released")
            raise Refused(CUresult.CUDA_ERROR_CONTEXT_IS_DESTROYED)
        return context

    def _destroy_context(self, context: Context) -> None:
        """Everything that still lives in it goes, and each of them is a leak."""
        self._report_leaks(context, None)
        for block in self._memory.live():
            if block.context is context:
                self._memory.release(block, in_use=bool(self._engine.touching(block)))
        self._order.streams[:] = [s for s in self._order.streams if s.context is not context]
        for handle, stream in tuple(self._streams.items()):
            if stream.context is context:
                self._bury(handle, self._streams.pop(handle))
        for handle, event in tuple(self._events.items()):
            if event.context is context:
                self._bury(handle, self._events.pop(handle))

    def _bury(self, handle: int, thing: Stream | Event) -> None:
        """Remember a destroyed handle; its value may come back for something else."""
        thing.destroyed_at = self._here.site
        self._destroyed[handle] = thing
        self._spare_handles.append(handle)

    def _report_leaks(self, context: Context, site: Site | None) -> None:
        """Report what is left in a context although it is about to go."""
        if context.lost is not None:
            # Nothing could be awaited or given back any more.
            return
        pending = self._pending_in(context)
        # After a failure, memory under work that could not be awaited is rightly kept,
        # and so are the streams and events that belong to it.
        doubtful = pending if self.faults.delivered else []
        if not doubtful:
            for op in pending:
                self._report("NEVER-AWAITED", op.site, detail=f"a {op.kind}")
        touched = {id(access.block) for op in doubtful for access in op.accesses}
        for block in self._memory.live():
            if block.context is context and not block.excused and id(block) not in touched:
                detail = f"{block.nbytes} bytes of {block.name}"
                self._report("LEAK-AT-CLOSE", site, (), block, detail=detail)
        for word, things in (("stream", self._streams), ("event", self._events)):
            for thing in things.values():
                if thing.context is context and not thing.excused and not doubtful:
                    self._report("LEAK-AT-CLOSE", site, thing.site, detail=f"a {word}")

    def _pending_in(self, context: Context) -> list[Op]:
        """Work on memory whose end the host ought to have awaited and has not."""
        return [
            op
            for stream in self._order.streams
            if stream.context is context
            for op in stream.outstanding
            if op.must_be_awaited and op.accesses
        ]


def _known(error: int) -> CUresult:
    try:
        return CUresult(error)
    except ValueError:
        raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE) from None
