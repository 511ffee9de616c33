"""Quick calls: the real library's when it is there, and its errors are the driver's."""

from __future__ import annotations

import pytest

import weightload
from fakecuda import FakeCuda
from weightload.device.driver import Driver
from weightload.device.quick import quick_calls


def test_without_the_library_there_are_none() -> None:
    """A machine without the driver library still imports and uses the fake."""
    assert quick_calls("libcuda-that-is-not-here.so") == {}


def test_a_quick_call_goes_to_its_function_and_reports_its_code() -> None:
    """A code other than success is the same error as from any call."""
    calls: list[tuple[int, ...]] = []

    def record(*arguments: int) -> int:
        calls.append(arguments)
        return 400 * (len(calls) - 1)

    driver = Driver(FakeCuda(), {"cuEventRecord": record})
    driver.quick("cuEventRecord")(1, 2)
    with pytest.raises(weightload.DriverError, match="CUDA_ERROR_INVALID_HANDLE") as caught:
        driver.quick("cuEventRecord")(3, 4)
    assert calls == [(1, 2), (3, 4)]
    assert caught.value.call == "cuEventRecord"


@pytest.mark.parametrize(("code", "waits"), [(0, 0), (600, 1), (400, 1)])
def test_only_an_event_that_has_not_run_is_waited_for(code: int, waits: int) -> None:
    """Asking first saves the wait; anything but success is left to the wait to tell."""
    fake = FakeCuda()
    fake.cuInit(0)
    _, context = fake.cuDevicePrimaryCtxRetain(0)
    fake.cuCtxSetCurrent(context)
    _, event = fake.cuEventCreate(2)
    Driver(fake, {"cuEventQuery": lambda _event: code}).await_event(int(event))
    made = [record["call"] for record in fake.journal.records()]
    assert made.count("cuEventSynchronize") == waits


def test_what_has_no_quick_form_is_called_as_always() -> None:
    """The fake and a recorder see every call."""
    fake = FakeCuda()
    Driver(fake).quick("cuInit")(0)
    assert [record["call"] for record in fake.journal.records()] == ["cuInit"]
