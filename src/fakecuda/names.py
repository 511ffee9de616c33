"""Names for handles and addresses that are the same in every run.

A name says what made the thing and the how-manieth it is: `stream0`, `device2`,
`pinned1+0x200`. Knowledge comes from the calls alone, so a journal of the real
driver is named in the same way.
"""

from bisect import bisect_right, insort
from typing import Any

_HANDLES = frozenset({"stream", "event", "context"})
_ADDRESSES = frozenset({"device_ptr", "host_ptr", "ptr"})
_DEFAULT_STREAMS = {0: "legacy", 1: "legacy", 2: "per-thread"}
_MAKES_MEMORY = {"cuMemAlloc": "device", "cuMemHostAlloc": "pinned"}
_ENDS_MEMORY = frozenset({"cuMemFree", "cuMemFreeHost", "cuMemHostUnregister"})
_MAKES_HANDLE = {"cuStreamCreate": "stream", "cuEventCreate": "event"}


class Names:
    """Learns from calls and names what they speak of."""

    def __init__(self) -> None:
        self._handles: dict[int, str] = {}
        self._starts: list[int] = []
        self._ranges: dict[int, tuple[int, str]] = {}
        self._counts: dict[str, int] = {}

    def learn(self, call: str, args: tuple[int, ...], values: tuple[Any, ...]) -> None:
        """Take note of what a successful call made or ended."""
        if call in _MAKES_MEMORY:
            self._add_range(int(values[0]), args[0], self._next(_MAKES_MEMORY[call]))
        elif call == "cuMemHostRegister":
            self._add_range(args[0], args[1], self._next("registered"))
        elif call == "cuMemHostGetDevicePointer" and int(values[0]) != args[0]:
            owner = self._ranges.get(args[0])
            if owner is not None:
                self._add_range(int(values[0]), owner[0], owner[1])
        elif call in _ENDS_MEMORY and args[0] in self._ranges:
            del self._ranges[args[0]]
            self._starts.remove(args[0])
        elif call in _MAKES_HANDLE:
            self._handles[int(values[0])] = self._next(_MAKES_HANDLE[call])
        elif call == "cuDevicePrimaryCtxRetain":
            handle = int(values[0])
            if handle not in self._handles:
                self._handles[handle] = self._next("context")

    def show(self, kind: str, value: Any) -> Any:
        """Write a parameter or result of this kind as JSON can hold it."""
        if value is None or isinstance(value, float):
            return value
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        number = int(value)
        if kind in _HANDLES:
            return self._handle(kind, number)
        if kind in _ADDRESSES:
            return self._address(number)
        if kind == "any":
            return self._handles.get(number) or self._address(number)
        return kind if kind == "function" else number

    def _handle(self, kind: str, number: int) -> str | int:
        if kind == "stream" and number in _DEFAULT_STREAMS:
            return _DEFAULT_STREAMS[number]
        return self._handles.get(number, f"unknown {kind}") if number else 0

    def _address(self, value: int) -> str | int:
        at = bisect_right(self._starts, value) - 1
        if at >= 0:
            start = self._starts[at]
            nbytes, name = self._ranges[start]
            if value < start + nbytes:
                return name if value == start else f"{name}+{value - start:#x}"
        # Small numbers are null or facts; a large one is an address nobody allocated here.
        return value if value < 4096 else "elsewhere"

    def _add_range(self, start: int, nbytes: int, name: str) -> None:
        if start:
            if start not in self._ranges:
                insort(self._starts, start)
            self._ranges[start] = (nbytes, name)

    def _next(self, kind: str) -> str:
        count = self._counts.get(kind, 0)
        self._counts[kind] = count + 1
        return f"{kind}{count}"
