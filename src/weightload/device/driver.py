"""The seam: CUDA driver calls that raise instead of returning codes.

`Driver` wraps `cuda.bindings.driver` or anything of the same shape, such as a
`fakecuda.FakeCuda`. Only ints cross it: the binding would release a buffer
object when an asynchronous call returns, long before the copy has run.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from weightload.device.quick import quick_calls
from weightload.errors import DeviceError, DriverError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Every entry point that the loader calls, in the order of a load.
ENTRY_POINTS = (
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuMemHostRegister",
    "cuMemHostAlloc",
    "cuMemAlloc",
    "cuStreamCreate",
    "cuEventCreate",
    "cuMemcpyHtoDAsync",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamWaitEvent",
    "cuStreamSynchronize",
    "cuEventDestroy",
    "cuStreamDestroy",
    "cuMemHostUnregister",
    "cuMemFreeHost",
    "cuMemcpyDtoH",
    "cuMemFree",
    "cuDevicePrimaryCtxRelease",
    "cuGetErrorName",
)

STREAM_NON_BLOCKING = 1
EVENT_DISABLE_TIMING = 2
# Usable from every context, as slots are filled and settled by many threads.
HOST_ALLOC_PORTABLE = 1
HOST_REGISTER_READ_ONLY = 8


class Driver:
    """Entry points by name; each returns its values or raises.

    Args:
        cu: `cuda.bindings.driver`, or an object with the same names and tuples.
        quick: entry points for `quick`, by name.

    Raises:
        UsageError: `cu` has no entry points.
    """

    def __init__(
        self,
        cu: Any,  # noqa: ANN401 - the binding publishes no types
        quick: Mapping[str, Callable[..., int]] | None = None,
    ) -> None:
        if not callable(getattr(cu, "cuInit", None)):
            raise UsageError(
                f"driver is {cu!r}, and has to be an object of cuda.bindings.driver's shape, "
                f"such as a FakeCuda."
            )
        self.cu = cu
        self._quick = quick or {}
        self._query = self._quick.get("cuEventQuery")

    def call(self, name: str, *arguments: int) -> Any:  # noqa: ANN401 - see above
        """Call one entry point.

        Args:
            name: one of `ENTRY_POINTS`.
            arguments: ints and the binding's enumerations only.

        Returns:
            None, the one value, or a tuple of values, as the entry point has it.

        Raises:
            DriverError: the result was not CUDA_SUCCESS.
            DeviceError: there is no driver library.
        """
        try:
            result, *values = getattr(self.cu, name)(*arguments)
        except RuntimeError as error:
            # The binding says so by exception when libcuda cannot be found.
            raise DeviceError(
                "no NVIDIA driver is installed here; install one, or use the fake device."
            ) from error
        if int(result):
            raise DriverError(name, int(result), self._name_of(result))
        return _unpacked(values)

    def quick(self, name: str) -> Callable[..., None]:
        """An entry point that returns at once and gives no value; see `device.quick`.

        Returns:
            A function of ints, which raises DriverError if the result is not CUDA_SUCCESS.
        """
        function = self._quick.get(name)
        if function is None:
            return partial(self.call, name)

        def checked(*arguments: int) -> None:
            code = function(*arguments)
            if code:
                raise DriverError(name, code, self._name_of(self.cu.CUresult(code)))

        return checked

    def await_event(self, event: int) -> None:
        """Wait for an event; Python's lock is let go of only when there is something to wait for.

        Raises:
            DriverError: the wait failed.
        """
        query = self._query
        # Whatever is not success, an error too, is what waiting will find as well.
        if query is None or query(event):
            self.call("cuEventSynchronize", event)

    def _name_of(self, result: Any) -> str:  # noqa: ANN401 - an enumeration of the binding's
        status, name = self.cu.cuGetErrorName(result)
        if int(status) or name is None:
            return "an unknown error"
        return name.decode() if isinstance(name, bytes) else str(name)


def _unpacked(values: Sequence[Any]) -> Any:  # noqa: ANN401 - see Driver.call
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def real_driver() -> Driver:
    """The machine's own driver.

    Raises:
        DeviceError: cuda-bindings is not installed here.
    """
    try:
        from cuda.bindings import driver as cu  # noqa: PLC0415 - absent where there is no wheel
    except ImportError as error:
        raise DeviceError(
            "cuda-bindings is not installed, so no real GPU can be used; install it, "
            "or use the fake device."
        ) from error
    return Driver(cu, quick_calls())
