"""Memory: real bytes behind device addresses that the host cannot touch.

Device memory lives in ordinary host memory, but its addresses are numbers that no
process maps, so a host access faults as it does on a GPU. Pinned memory is real
and its address is its own. Fresh memory of either kind holds a seeded pattern,
never zeros: a byte that nobody wrote shows.
"""

import ctypes
import mmap
import random
from bisect import bisect_left, bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from fakecuda.hazards import Site

# Non-canonical on x86-64, above every user address on aarch64 (bits 56-63 are avoided:
# aarch64 ignores them).
DEVICE_BASE = 0x000A_0000_0000_0000
"""The lowest device address of the fake."""

_DEVICE_GAP = 4096
_GUARD_BYTES = 64
_TILE_BYTES = 1 << 16
_MAP_FROM_BYTES = 1 << 20
# Freed pinned memory stays mapped up to so many bytes: a late host access meets the
# pattern instead of the allocator's structures.
_QUARANTINE_BYTES = 64 << 20

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp = _libc.memcmp
move = ctypes.memmove
"""Copy `(target, source, nbytes)` between real addresses; the GIL is free meanwhile."""


def backing(nbytes: int) -> tuple[object, int]:
    """Get zeroed memory.

    Returns:
        The object that keeps it alive, and its real address.
    """
    if nbytes >= _MAP_FROM_BYTES:
        mapping = mmap.mmap(-1, nbytes)
        # Huge pages make first touch several times cheaper.
        mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping, ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    array = bytearray(max(nbytes, 1))
    return array, ctypes.addressof(ctypes.c_char.from_buffer(array))


def same(first: int, second: int, nbytes: int) -> bool:
    """Whether two real ranges hold the same bytes."""
    return not _memcmp(first, second, nbytes)


def differing(first: int, second: int, nbytes: int) -> tuple[int, int]:
    """The range `[start, end)` in which two unequal real ranges differ."""
    left, right = ctypes.string_at(first, nbytes), ctypes.string_at(second, nbytes)
    unequal = [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b]
    return unequal[0], unequal[-1] + 1


@lru_cache(maxsize=8)
def _pattern(seed: str) -> tuple[object, int]:
    """The poison pattern in real memory, a guard longer so that it can be compared."""
    data = random.Random(f"poison/{seed}").randbytes(_TILE_BYTES)  # noqa: S311 - a pattern
    data += data[:_GUARD_BYTES]
    keeper, address = backing(len(data))
    move(address, data, len(data))
    return keeper, address


@dataclass(slots=True, eq=False)
class Block:
    """One allocation or registration.

    Attributes:
        kind: `device`, `pinned` or `registered`.
        number: The how-manieth of its kind; names it in reports.
        address: What the caller knows it by.
        device_address: What the device knows it by; may differ for write-combined memory.
        base: The real address of its first byte.
        keeper: What keeps its bytes alive.
        device_writers: How much work, not known to be done, writes into it.
        excused: True when a failed call left it in doubt: then it is no leak.
        settled: False once it is freed under work that may still write it.
        written: Sorted disjoint `[start, end)` of the device bytes that work writes.
    """

    kind: str
    number: int
    nbytes: int
    context: Any
    site: Site
    address: int = 0
    device_address: int = 0
    base: int = 0
    flags: int = 0
    keeper: object = None
    device_writers: int = 0
    excused: bool = False
    settled: bool = True
    written: list[tuple[int, int]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """A name that is the same in every run."""
        return f"{self.kind}{self.number}"

    def mark_written(self, start: int, end: int) -> None:
        """Remember that work writes these bytes."""
        spans = self.written
        low = bisect_left(spans, (start, -1))
        if low and spans[low - 1][1] >= start:
            low -= 1
        high = low
        while high < len(spans) and spans[high][0] <= end:
            start, end = min(start, spans[high][0]), max(end, spans[high][1])
            high += 1
        spans[low:high] = [(start, end)]

    def is_written(self, start: int, end: int) -> bool:
        """Whether work has been enqueued that writes all these bytes."""
        at = bisect_right(self.written, (start, 1 << 64)) - 1
        return start == end or (at >= 0 and self.written[at][1] >= end)


class Memory:
    """All allocations of one fake, by address.

    Args:
        seed: Of the poison pattern.
        device_granule: Device addresses are multiples of this many bytes.
        misalign: Make device addresses miss twice the granule, and pinned ones a page.
    """

    def __init__(self, seed: str, device_granule: int, *, misalign: bool) -> None:
        self._pattern_keeper, self._pattern = _pattern(seed)
        self._granule = device_granule
        self._misalign = misalign
        self._next_device = DEVICE_BASE
        self._recycled: dict[int, list[int]] = {}
        self._starts: list[int] = []
        self._blocks: dict[int, Block] = {}
        self._aliases: dict[int, Block] = {}
        self._freed: dict[int, Block] = {}
        self._quarantined: deque[Block] = deque()
        self._quarantined_bytes = 0
        self._counts: dict[str, int] = {}
        self.device_bytes = 0
        self.pinned_bytes = 0

    def live(self) -> list[Block]:
        """Every live block, in the order of its address."""
        return [self._blocks[start] for start in self._starts]

    def can_recycle(self, nbytes: int) -> bool:
        """Whether a device address of this size has been freed."""
        return bool(self._recycled.get(nbytes))

    def new_device(self, nbytes: int, context: object, site: Site, *, recycle: bool) -> Block:
        """Allocate device memory of exactly `nbytes` bytes, filled with the pattern."""
        block = self._new("device", nbytes, context, site)
        block.keeper, block.base = backing(nbytes)
        block.address = (
            self._recycled[nbytes].pop() if recycle else self._fresh_device_address(nbytes)
        )
        block.device_address = block.address
        self.poison(block.base, nbytes)
        self.device_bytes += nbytes
        return self._insert(block)

    def new_pinned(
        self, nbytes: int, flags: int, context: object, site: Site, *, aliased: bool
    ) -> Block:
        """Allocate pinned memory with guard bytes on both sides."""
        block = self._new("pinned", nbytes, context, site)
        room = nbytes + 2 * _GUARD_BYTES + 8192
        block.keeper, start = backing(room)
        # Real pinned allocations of an H200 lie at 512 modulo 4096, small ones and large.
        page = (start + _GUARD_BYTES + 4095) & ~4095
        block.base = block.address = page + 512 if self._misalign else page
        block.flags = flags
        self.poison(block.base - _GUARD_BYTES, nbytes + 2 * _GUARD_BYTES)
        block.device_address = block.address
        if aliased:
            block.device_address = self._fresh_device_address(nbytes)
            self._aliases[block.device_address] = block
        self.pinned_bytes += nbytes
        return self._insert(block)

    def register(
        self, address: int, nbytes: int, flags: int, context: object, site: Site
    ) -> Block:
        """Treat the caller's own memory as pinned."""
        block = self._new("registered", nbytes, context, site)
        block.base = block.address = block.device_address = address
        block.flags = flags
        self.pinned_bytes += nbytes
        return self._insert(block)

    def overlapping(self, address: int, nbytes: int) -> Block | None:
        """The first live block that shares a byte with this range."""
        at = bisect_right(self._starts, address) - 1
        for start in self._starts[max(at, 0) : at + 2]:
            block = self._blocks[start]
            if start < address + nbytes and address < start + block.nbytes:
                return block
        return None

    def find(self, address: int) -> Block | None:
        """The live block that holds this address."""
        at = bisect_right(self._starts, address) - 1
        if at >= 0:
            block = self._blocks[self._starts[at]]
            if address < block.address + block.nbytes:
                return block
        for alias, block in self._aliases.items():
            if alias <= address < alias + block.nbytes:
                return block
        return None

    def find_freed(self, address: int) -> Block | None:
        """The block that held this address until it was freed."""
        for block in reversed(self._freed.values()):
            if block.address <= address < block.address + max(block.nbytes, 1):
                return block
        return None

    def find_quarantined(self, address: int) -> Block | None:
        """The freed pinned block that still keeps this address from others."""
        for block in self._quarantined:
            if block.address <= address < block.address + block.nbytes:
                return block
        return None

    def is_untouched(self, block: Block, address: int, nbytes: int) -> bool:
        """Whether a range of a live pinned block still holds the pattern it came with."""
        at = (address - block.base + _GUARD_BYTES) % _TILE_BYTES
        # The tile is followed by one guard's length of its own start.
        return same(address, self._pattern + at, nbytes)

    def release(self, block: Block, *, in_use: bool) -> None:
        """Take a block out; work that is `in_use` of it keeps its bytes alive.

        Whoever still reads it, host or device, reads the pattern.
        """
        if block.kind == "pinned" or (block.kind == "device" and in_use):
            self.poison(block.base, block.nbytes)
        del self._blocks[block.address]
        self._starts.remove(block.address)
        self._freed[block.address] = block
        if block.kind == "device":
            block.keeper = None
            self.device_bytes -= block.nbytes
            self._recycled.setdefault(block.nbytes, []).append(block.address)
        else:
            self.pinned_bytes -= block.nbytes
            self._aliases.pop(block.device_address, None)
            if block.kind == "pinned":
                block.settled = not in_use
                self._quarantine(block)

    def guards_intact(self, block: Block) -> bool:
        """Whether nobody wrote beside a pinned block."""
        if block.kind != "pinned":
            return True
        start, last = block.base - _GUARD_BYTES, block.nbytes + _GUARD_BYTES
        return all(
            same(start + offset, self._pattern + offset % _TILE_BYTES, _GUARD_BYTES)
            for offset in (0, last)
        )

    def poison(self, base: int, nbytes: int) -> None:
        """Fill a real range with the seeded pattern."""
        for offset in range(0, nbytes, _TILE_BYTES):
            move(base + offset, self._pattern, min(_TILE_BYTES, nbytes - offset))

    def _new(self, kind: str, nbytes: int, context: object, site: Site) -> Block:
        number = self._counts.get(kind, 0)
        self._counts[kind] = number + 1
        return Block(kind, number, nbytes, context, site)

    def written_after_free(self) -> list[Block]:
        """Freed pinned blocks, as far as they are still kept, that the host wrote to."""
        return [
            block for block in self._quarantined if block.settled and not self._is_poisoned(block)
        ]

    def _is_poisoned(self, block: Block) -> bool:
        return all(
            same(block.base + at, self._pattern, min(_TILE_BYTES, block.nbytes - at))
            for at in range(0, block.nbytes, _TILE_BYTES)
        )

    def _quarantine(self, block: Block) -> None:
        self._quarantined.append(block)
        self._quarantined_bytes += block.nbytes
        while self._quarantined_bytes > _QUARANTINE_BYTES:
            oldest = self._quarantined.popleft()
            self._quarantined_bytes -= oldest.nbytes
            oldest.keeper = None

    def _insert(self, block: Block) -> Block:
        self._freed.pop(block.address, None)
        insort(self._starts, block.address)
        self._blocks[block.address] = block
        return block

    def _fresh_device_address(self, nbytes: int) -> int:
        address = self._next_device
        if self._misalign:
            # At the granule but not at twice the granule.
            address += self._granule
        step = 2 * self._granule
        self._next_device = -(-(address + nbytes + _DEVICE_GAP) // step) * step
        return address
