"""Driver calls that return at once, made without letting go of Python's lock.

The binding releases the lock around every call. For a call that takes two
microseconds that is a loss: the thread then queues for the lock again, and in a
virtual machine each hand-over between processors costs many times the call itself.
Only calls that cannot block belong here; a copy belongs here only from pinned memory.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Entry points by the symbol that the driver library exports (cuda.h maps the names).
_SYMBOLS: dict[str, tuple[str, tuple[type, ...]]] = {
    "cuMemcpyHtoDAsync": (
        "cuMemcpyHtoDAsync_v2",
        (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
    ),
    "cuEventRecord": ("cuEventRecord", (ctypes.c_void_p, ctypes.c_void_p)),
    "cuEventQuery": ("cuEventQuery", (ctypes.c_void_p,)),
}


@cache
def quick_calls(library: str = "libcuda.so.1") -> Mapping[str, Callable[..., int]]:
    """Quick entry points by name, each returning the result code; none without the library.

    Looked up once in a process: that takes a third of a millisecond.
    """
    try:
        driver = ctypes.PyDLL(library)
    except OSError:
        return {}
    calls = {}
    for name, (symbol, parameters) in _SYMBOLS.items():
        function = driver[symbol]
        function.argtypes = parameters
        function.restype = ctypes.c_int
        calls[name] = function
    return calls
