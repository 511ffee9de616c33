"""Device, pinned and registered memory, and facts about addresses."""

from typing import Any

from fakecuda.calls.machine import Machine, Refused, entry
from fakecuda.enums import CUmemorytype, CUpointer_attribute, CUresult
from fakecuda.memory import Block

_WRITE_COMBINED = 4
_HOST_FLAGS = 7
_REGISTER_READ_ONLY = 8
_REGISTER_FLAGS = 15


class MemoryCalls(Machine):
    """Calls that get, give back and describe memory."""

    @entry
    def cuMemGetInfo(self) -> tuple[int, int]:
        return self._accounts.free_bytes, self._accounts.total_bytes

    @entry
    def cuMemAlloc(self, nbytes: int) -> int:
        if nbytes <= 0:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        _refuse(self._accounts.refuse_device(nbytes))
        recycle = self._memory.can_recycle(nbytes) and bool(self._choose("recycle", 2))
        context, site = self._context(), self._here.site
        return self._memory.new_device(nbytes, context, site, recycle=recycle).address

    @entry
    def cuMemFree(self, address: int) -> None:
        if address:
            self._free(address, "device")

    @entry
    def cuMemHostAlloc(self, nbytes: int, flags: int) -> int:
        if flags & ~_HOST_FLAGS or nbytes < 0:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        if nbytes == 0:
            return 0
        _refuse(self._accounts.refuse_pinned(nbytes))
        # By the documentation the device may know write-combined memory by an address of
        # its own; an H200 knows it by the host's.
        aliased = bool(flags & _WRITE_COMBINED) and not self._choose("write-combined", 2)
        block = self._memory.new_pinned(
            nbytes, flags, self._context(), self._here.site, aliased=aliased
        )
        return block.address

    @entry
    def cuMemFreeHost(self, address: int) -> None:
        if address:
            self._free(address, "pinned")

    @entry
    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> None:
        if flags & ~_REGISTER_FLAGS or nbytes <= 0 or not address:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        if not self.profile.attribute("HOST_REGISTER_SUPPORTED") or (
            flags & _REGISTER_READ_ONLY
            and not self.profile.attribute("READ_ONLY_HOST_REGISTER_SUPPORTED")
        ):
            raise Refused(CUresult.CUDA_ERROR_NOT_SUPPORTED)
        other = self._memory.overlapping(address, nbytes)
        if other is not None and other.kind == "registered":
            raise Refused(CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        if other is not None:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        _refuse(self._accounts.refuse_pinned(nbytes))
        self._memory.register(address, nbytes, flags, self._context(), self._here.site)

    @entry
    def cuMemHostUnregister(self, address: int) -> None:
        block = self._memory.find(address)
        if block is None or block.kind != "registered":
            raise Refused(CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
        if block.address != address:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        self._release(block)

    @entry
    def cuMemHostGetDevicePointer(self, address: int, flags: int) -> int:
        block = self._host_block(address)
        if flags:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        return block.device_address + address - block.address

    @entry
    def cuMemHostGetFlags(self, address: int) -> int:
        return self._host_block(address).flags

    @entry
    def cuMemGetAddressRange(self, address: int) -> tuple[int, int]:
        block = self._memory.find(address)
        if block is None:
            raise Refused(CUresult.CUDA_ERROR_NOT_FOUND)
        return block.device_address, block.nbytes

    @entry
    def cuPointerGetAttribute(self, attribute: int, address: int) -> Any:
        block = self._memory.find(address)
        if block is None:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        on_device = block.kind == "device"
        facts = {
            "CONTEXT": block.context.handle,
            "MEMORY_TYPE": CUmemorytype.CU_MEMORYTYPE_DEVICE
            if on_device
            else CUmemorytype.CU_MEMORYTYPE_HOST,
            "DEVICE_POINTER": block.device_address + address - block.address,
            "HOST_POINTER": None if on_device else address,
            "BUFFER_ID": 1 + 2 * block.number + on_device,
            "IS_MANAGED": False,
            "DEVICE_ORDINAL": block.context.device,
            "RANGE_START_ADDR": block.device_address,
            "RANGE_SIZE": block.nbytes,
            "MAPPED": True,
        }
        try:
            name = CUpointer_attribute(attribute).name.removeprefix("CU_POINTER_ATTRIBUTE_")
        except ValueError:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE) from None
        if facts[name] is None:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        return facts[name]

    def _host_block(self, address: int) -> Block:
        block = self._memory.find(address)
        if block is None or block.kind == "device":
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        return block

    def _free(self, address: int, kind: str) -> None:
        block = self._memory.find(address)
        if block is None or block.kind != kind or block.address != address:
            freed = self._memory.find_freed(address)
            detail = f"{freed.name} was freed already" if freed else "no such allocation"
            self._report("BAD-FREE", None, block=block or freed, detail=detail)
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE)
        self._must_be_alive(block.context)
        self._release(block)

    def _release(self, block: Block) -> None:
        pending = self._engine.touching(block)
        in_doubt = [op for op in pending if op.must_be_awaited]
        if in_doubt:
            self._report("FREE-WHILE-PENDING", None, in_doubt[0].site, block, detail=block.name)
        if pending and (not in_doubt or self._choose("free-waits", 2)):
            self._engine.await_all(pending)
        for op in pending:
            self._watch.memory_goes(op)
            if block.kind == "registered" and not op.done:
                self._engine.memory_goes(op)
        if not self._memory.guards_intact(block):
            self._report("GUARD-OVERWRITTEN", None, (), block, detail=block.name)
        self._memory.release(block, in_use=bool(pending))


def _refuse(code: CUresult | None) -> None:
    if code is not None:
        raise Refused(code)
