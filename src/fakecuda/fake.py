"""FakeCuda: the fake driver as its user sees it."""

from types import TracebackType
from typing import Self

from fakecuda import enums
from fakecuda.calls.copies import CopyCalls
from fakecuda.calls.memory import MemoryCalls
from fakecuda.calls.streams import StreamCalls
from fakecuda.choices import Choices, Late
from fakecuda.hazards import Hazard, HazardError, caller_site
from fakecuda.limits import Limits
from fakecuda.profile import Profile, load_profile
from fakecuda.source_text import as_code
from fakecuda.surface import SURFACE
from fakecuda.work import Op, Stream


class FakeCuda(StreamCalls, MemoryCalls, CopyCalls):
    """A CUDA driver without a GPU, with the names and tuples of `cuda.bindings.driver`.

    Use it as a context manager; leaving it checks for hazards and leaks.

    Args:
        profile: `gb10`, `gh200`, `h200`, or a `Profile`.
        choices: Who decides every "may"; the default is as late as can be.
        seed: Of the pattern in memory that nobody wrote.
        limits: What memory there is, if less than the profile says.
        devices: How many equal devices there are.
        stuck_after_s: How long a call may wait on held work before it raises
            `StuckError`.
    """

    CUresult = enums.CUresult
    CUdevice_attribute = enums.CUdevice_attribute
    CUpointer_attribute = enums.CUpointer_attribute
    CUmemorytype = enums.CUmemorytype
    CUstream_flags = enums.CUstream_flags
    CUevent_flags = enums.CUevent_flags
    CUevent_record_flags = enums.CUevent_record_flags
    CUevent_wait_flags = enums.CUevent_wait_flags
    CUstreamWaitValue_flags = enums.CUstreamWaitValue_flags
    CUstreamWriteValue_flags = enums.CUstreamWriteValue_flags
    CUctx_flags = enums.CUctx_flags
    CU_MEMHOSTALLOC_PORTABLE = 1
    CU_MEMHOSTALLOC_DEVICEMAP = 2
    CU_MEMHOSTALLOC_WRITECOMBINED = 4
    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_DEVICEMAP = 2
    CU_MEMHOSTREGISTER_IOMEMORY = 4
    CU_MEMHOSTREGISTER_READ_ONLY = 8
    CU_STREAM_LEGACY = 1
    CU_STREAM_PER_THREAD = 2

    def __init__(
        self,
        profile: str | Profile = "h200",
        *,
        choices: Choices | None = None,
        seed: str = "0",
        limits: Limits | None = None,
        devices: int = 1,
        stuck_after_s: float = 30.0,
    ) -> None:
        facts = load_profile(profile) if isinstance(profile, str) else profile
        super().__init__(
            facts, choices or Late(), seed, limits or Limits(), devices, stuck_after_s
        )
        made_with = [as_code(profile), f"seed={seed!r}"]
        if limits is not None:
            made_with.append(f"limits={as_code(limits)}")
        if devices != 1:
            made_with.append(f"devices={devices}")
        self._made_with = ", ".join(made_with)
        self._gates: dict[int, list[Op]] = {}

    @property
    def hazards(self) -> tuple[Hazard, ...]:
        """What was found wrong so far."""
        return tuple(self._hazards)

    @property
    def available_bytes(self) -> int:
        """What allocations can still get; on a shared pool more than `cuMemGetInfo` says."""
        return self._accounts.available_bytes

    @property
    def schedule(self) -> str:
        """The choices so far; `Replay` takes them."""
        return self._trail.text

    @property
    def replay(self) -> str:
        """How to make a fake that takes the same schedule again."""
        return f"FakeCuda({self._made_with}, choices=Replay({self.schedule!r}))"

    def hold(self, stream: int) -> None:
        """Keep a stream's later work from running until `release`.

        Work that is in the stream already is not held: on a GPU the same is done by
        letting the stream wait for a value.
        """
        with self._lock:
            self._here.site = caller_site()
            gate = Op("hold", self._here.call, self._here.site)
            gate.ready = lambda: gate not in self._gates.get(stream, ())
            self._gates.setdefault(stream, []).append(gate)
            self._engine.queue(self._stream_to_hold(stream), gate)

    def release(self, stream: int) -> None:
        """Let a held stream go on.

        Raises:
            ValueError: It is not held.
        """
        with self._lock:
            if not self._gates.pop(stream, None):
                raise ValueError("this stream is not held")
            self._lock.notify_all()

    def close(self, *, check: bool = True) -> None:
        """End the driver: look for leaks and work that nobody awaited.

        Args:
            check: Raise if there is any hazard; they stay in `hazards` either way.

        Raises:
            HazardError: The program broke rules of the driver's contract.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._last_look()
        if check and self._hazards:
            raise HazardError(self._hazards)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # An error on its way out is the first error: hazards do not hide it.
        self.close(check=error is None)

    def _stream_to_hold(self, handle: int) -> Stream:
        """The stream, also from a thread that has no context of its own."""
        if handle in self._streams:
            return self._streams[handle]
        alive = [context for context in self._contexts.values() if context.users]
        if not alive:
            raise ValueError("there is no such stream")
        return alive[0].legacy

    def _last_look(self) -> None:
        """Find what was left behind."""
        self._here.site = ()
        for stream in self._order.streams:
            for op in stream.outstanding:
                self._watch.memory_goes(op)
        for block in self._memory.live():
            if not self._memory.guards_intact(block):
                self._report("GUARD-OVERWRITTEN", (), (), block, detail=block.name)
        for block in self._memory.written_after_free():
            detail = f"the host wrote to {block.name} after it was freed"
            self._report("USE-AFTER-FREE", (), (), block, detail=detail)
        for context in self._contexts.values():
            if not context.users:
                continue
            self._report_leaks(context, ())
            if not context.excused:
                detail = f"a context, retained {context.users} more than released"
                self._report("LEAK-AT-CLOSE", (), context.site, detail=detail)


_missing = [name for name in SURFACE if not hasattr(FakeCuda, name)]
if _missing:  # pragma: no cover - a fault of this package itself
    raise TypeError(f"the surface table names calls that the fake lacks: {_missing}")
