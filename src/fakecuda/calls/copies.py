"""Copies and fills, at once or in stream order."""

from fakecuda.calls.machine import Machine, Refused, entry
from fakecuda.enums import CUresult
from fakecuda.memory import DEVICE_BASE, Block
from fakecuda.work import Access, Op, Stream

# The driver stages so much of an asynchronous pageable copy before it returns; seen on
# an H200: 1 MiB returned under a held stream, 8 MiB blocked.
_STAGED_MAX_BYTES = 1 << 20
# So many bytes of the pattern do not come about by chance.
_TELLING_BYTES = 12


class CopyCalls(Machine):
    """Calls that move bytes."""

    @entry
    def cuMemcpy(self, target: int, source: int, nbytes: int) -> None:
        self._copy(None, target, source, nbytes, "??")

    @entry
    def cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._copy(self._stream(stream), target, source, nbytes, "??")

    @entry
    def cuMemcpyHtoD(self, target: int, source: int, nbytes: int) -> None:
        self._copy(None, target, source, nbytes, "hd")

    @entry
    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._copy(self._stream(stream), target, source, nbytes, "hd")

    @entry
    def cuMemcpyDtoH(self, target: int, source: int, nbytes: int) -> None:
        self._copy(None, target, source, nbytes, "dh")

    @entry
    def cuMemcpyDtoHAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._copy(self._stream(stream), target, source, nbytes, "dh")

    @entry
    def cuMemcpyDtoD(self, target: int, source: int, nbytes: int) -> None:
        self._copy(None, target, source, nbytes, "dd")

    @entry
    def cuMemcpyDtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._copy(self._stream(stream), target, source, nbytes, "dd")

    @entry
    def cuMemsetD8(self, target: int, value: int, nbytes: int) -> None:
        self._fill(None, target, value, nbytes)

    @entry
    def cuMemsetD8Async(self, target: int, value: int, nbytes: int, stream: int) -> None:
        self._fill(self._stream(stream), target, value, nbytes)

    def _copy(
        self, stream: Stream | None, target: int, source: int, nbytes: int, sides: str
    ) -> None:
        """Queue one copy; no stream means the synchronous call on the legacy stream."""
        if nbytes == 0:
            return
        read, from_address = self._end(source, nbytes, sides[0], "OOB-SOURCE")
        written, to_address = self._end(target, nbytes, sides[1], "OOB-DESTINATION")
        op = Op("copy", self._here.call, self._here.site, nbytes)
        op.accesses = (
            Access(read, from_address, nbytes, writes=False),
            Access(written, to_address, nbytes, writes=True),
        )
        op.source, op.target = _real(read, from_address), _real(written, to_address)
        op.keepers = (read and read.keeper, written and written.keeper)
        if read is not None and read.kind == "device":
            self._needs_written(read, from_address, nbytes)
        if written is not None:
            self._mark_written(written, to_address, nbytes)
        op.must_be_awaited = stream is not None
        if read is None:
            waits = self._take_pageable(op, synchronous=stream is None)
        else:
            ends = {read.kind, written.kind if written is not None else "pageable"}
            waits = stream is None and ends != {"device"}
            if read.kind != "device" and not read.device_writers:
                self._host_must_have_written(read, from_address, nbytes)
                if not waits:
                    self._engine.watch_source(op)
            if written is read and op.accesses[0].overlaps(op.accesses[1]):
                self._report("OVERLAPPING-COPY", None, (), read, from_address, to_address + nbytes)
        if (
            written is not None
            and written.kind != "device"
            and not (waits or written.device_writers)
        ):
            self._engine.watch_target(op)
        self._engine.queue(stream or self._context().legacy, op)
        if waits or written is None:
            self._engine.await_all([op])

    def _host_must_have_written(self, block: Block, address: int, nbytes: int) -> None:
        """Report pinned bytes at either end of a source that still hold the pattern."""
        if block.kind != "pinned" or nbytes < _TELLING_BYTES:
            return
        for start in (address, address + nbytes - _TELLING_BYTES):
            if self._memory.is_untouched(block, start, _TELLING_BYTES):
                end = start + _TELLING_BYTES
                self._report("READ-UNWRITTEN", None, (), block, start, end)

    def _take_pageable(self, op: Op, *, synchronous: bool) -> bool:
        """Treat a pageable source as this device does; answer whether the call waits."""
        if not synchronous and op.nbytes > _STAGED_MAX_BYTES and not self.profile.reads_pageable:
            return True
        if not synchronous and self.profile.reads_pageable and not self._choose("stages", 2):
            # The device follows the host's page tables and reads when it runs.
            op.pageable_source = True
            self._engine.watch_source(op)
            return False
        self._engine.stage(op)
        # The staged bytes may still be on their way when a synchronous call returns: a
        # stream that does not wait for them has read stale ones on an H200.
        op.lingers = synchronous and not self._choose("pageable-lands", 2)
        return synchronous and not op.lingers

    def _fill(self, stream: Stream | None, target: int, value: int, nbytes: int) -> None:
        if not 0 <= value < 256:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        if nbytes == 0:
            return
        written, address = self._end(target, nbytes, "d", "OOB-DESTINATION")
        op = Op("fill", self._here.call, self._here.site, nbytes)
        op.accesses = (Access(written, address, nbytes, writes=True),)
        op.target, op.value = _real(written, address), value
        op.keepers = (written and written.keeper,)
        op.must_be_awaited = stream is not None
        if written is not None:
            self._mark_written(written, address, nbytes)
        self._engine.queue(stream or self._context().legacy, op)
        if stream is None and written is not None and written.kind != "device":
            self._engine.await_all([op])

    def _end(self, address: int, nbytes: int, side: str, hazard: str) -> tuple[Block | None, int]:
        """Find one end of a copy: its block, None if pageable, and its address there."""
        block = self._memory.find(address)
        if block is not None:
            if not block.address <= address < block.address + block.nbytes:
                address += block.address - block.device_address
            if address + nbytes > block.address + block.nbytes:
                self._report(hazard, None, (), block, address, address + nbytes)
                raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
            if side == "h" and block.kind == "device":
                # The driver goes by the addresses and copies (seen on an H200).
                self._report("COPY-DIRECTION", None, (), block, address, address + nbytes)
            return block, address
        kept = self._memory.find_quarantined(address)
        if (
            kept is not None
            or side == "d"
            or address >= DEVICE_BASE
            or self._memory.overlapping(address, nbytes)
        ):
            freed = kept or self._memory.find_freed(address)
            if freed is not None:
                self._report("USE-AFTER-FREE", None, (), freed, address, address + nbytes)
            else:
                self._report(hazard, None, detail=f"{nbytes} bytes at an unknown address")
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        return None, address

    def _needs_written(self, block: Block, address: int, nbytes: int) -> None:
        start = address - block.address
        if not block.is_written(start, start + nbytes):
            self._report("READ-UNWRITTEN", None, (), block, address, address + nbytes)

    def _mark_written(self, block: Block, address: int, nbytes: int) -> None:
        if block.kind == "device":
            start = address - block.address
            block.mark_written(start, start + nbytes)


def _real(block: Block | None, address: int) -> int:
    return address if block is None else block.base + address - block.address
