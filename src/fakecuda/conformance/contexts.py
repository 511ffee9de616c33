"""Rows about starting, devices, contexts and error names."""

from typing import Any

from fakecuda.conformance.row import row
from fakecuda.conformance.subject import Subject


@row("NOT_INITIALIZED", alone=True)
def call_before_init(subject: Subject) -> str:
    """A call before cuInit is refused."""
    return subject.code(subject.cu.cuDeviceGetCount())


@row("INVALID_VALUE", alone=True)
def init_with_flags(subject: Subject) -> str:
    """CuInit knows no flags."""
    return subject.code(subject.cu.cuInit(1))


@row("SUCCESS")
def init_again(subject: Subject) -> str:
    """CuInit may be repeated."""
    return subject.code(subject.cu.cuInit(0))


@row("INVALID_DEVICE")
def device_99(subject: Subject) -> str:
    """An ordinal beyond the last device is refused."""
    return subject.code(subject.cu.cuDeviceGet(99))


@row("INVALID_CONTEXT")
def alloc_without_context(subject: Subject) -> str:
    """A thread without a current context cannot allocate."""
    return subject.code(subject.on_new_thread(lambda: subject.cu.cuMemAlloc(256)))


@row("INVALID_CONTEXT")
def alloc_after_retain_only(subject: Subject) -> str:
    """Retaining the primary context does not make it current."""

    def body() -> tuple[Any, ...]:
        subject.ok(subject.cu.cuDevicePrimaryCtxRetain(subject.device_handle))
        result: tuple[Any, ...] = subject.cu.cuMemAlloc(256)
        subject.ok(subject.cu.cuDevicePrimaryCtxRelease(subject.device_handle))
        return result

    return subject.code(subject.on_new_thread(body))


@row("same")
def retain_twice(subject: Subject) -> str:
    """Retaining again gives the same context."""
    again = int(subject.ok(subject.cu.cuDevicePrimaryCtxRetain(subject.device_handle)))
    subject.ok(subject.cu.cuDevicePrimaryCtxRelease(subject.device_handle))
    return "same" if again == subject.context else "another"


@row("INVALID_CONTEXT", alone=True)
def release_unretained(subject: Subject) -> str:
    """Releasing a primary context that nobody retained is refused."""
    subject.ok(subject.cu.cuInit(0))
    return subject.code(subject.cu.cuDevicePrimaryCtxRelease(0))


@row("CONTEXT_IS_DESTROYED", "INVALID_CONTEXT", alone=True)
def alloc_after_last_release(subject: Subject) -> str:
    """The last release destroys the context, also where it is current."""
    subject.start()
    subject.ok(subject.cu.cuDevicePrimaryCtxRelease(subject.device_handle))
    return subject.code(subject.cu.cuMemAlloc(256))


@row("inactive", alone=True)
def state_after_last_release(subject: Subject) -> str:
    """After the last release the primary context is not active."""
    subject.start()
    subject.ok(subject.cu.cuDevicePrimaryCtxRelease(subject.device_handle))
    _, active = subject.ok(subject.cu.cuDevicePrimaryCtxGetState(subject.device_handle))
    return "active" if int(active) else "inactive"


@row("active")
def state_while_retained(subject: Subject) -> str:
    """A retained primary context is active."""
    _, active = subject.ok(subject.cu.cuDevicePrimaryCtxGetState(subject.device_handle))
    return "active" if int(active) else "inactive"


@row("none")
def current_context_is_per_thread(subject: Subject) -> str:
    """What one thread made current is not current on another."""
    handle = subject.ok(subject.on_new_thread(subject.cu.cuCtxGetCurrent))
    return "none" if int(handle or 0) == 0 else "inherited"


@row("INVALID_CONTEXT")
def alloc_after_set_null(subject: Subject) -> str:
    """Setting the null context leaves none."""
    subject.ok(subject.cu.cuCtxSetCurrent(0))
    outcome = subject.code(subject.cu.cuMemAlloc(256))
    subject.ok(subject.cu.cuCtxSetCurrent(subject.context))
    return outcome


@row("restored")
def push_and_pop(subject: Subject) -> str:
    """Popping brings back what was current before the push."""
    subject.ok(subject.cu.cuCtxPushCurrent(subject.context))
    subject.ok(subject.cu.cuCtxPopCurrent())
    current = int(subject.ok(subject.cu.cuCtxGetCurrent()))
    return "restored" if current == subject.context else "lost"


@row("INVALID_CONTEXT")
def pop_from_nothing(subject: Subject) -> str:
    """A thread without a context has none to pop."""
    return subject.code(subject.on_new_thread(subject.cu.cuCtxPopCurrent))


@row("0")
def device_of_context(subject: Subject) -> str:
    """The context knows its device."""
    return str(int(subject.ok(subject.cu.cuCtxGetDevice())))


@row("SUCCESS")
def query_event_without_context(subject: Subject) -> str:
    """An event can be asked from a thread without a current context."""
    event = subject.event()
    return subject.code(subject.on_new_thread(lambda: subject.cu.cuEventQuery(event)))


@row("SUCCESS")
def free_without_context(subject: Subject) -> str:
    """Device memory can be freed from a thread without a current context."""
    address = int(subject.ok(subject.cu.cuMemAlloc(256)))
    outcome = subject.code(subject.on_new_thread(lambda: subject.cu.cuMemFree(address)))
    if outcome != "SUCCESS":
        subject.ok(subject.cu.cuMemFree(address))
    return outcome


@row("SUCCESS")
def free_host_without_context(subject: Subject) -> str:
    """Pinned memory can be freed from a thread without a current context."""
    address = int(subject.ok(subject.cu.cuMemHostAlloc(256, 0)))
    outcome = subject.code(subject.on_new_thread(lambda: subject.cu.cuMemFreeHost(address)))
    if outcome != "SUCCESS":
        subject.ok(subject.cu.cuMemFreeHost(address))
    return outcome


@row("CUDA_ERROR_OUT_OF_MEMORY")
def name_of_an_error(subject: Subject) -> str:
    """Error codes have names."""
    code = subject.cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    name: bytes = subject.ok(subject.cu.cuGetErrorName(code))
    return name.decode()


@row("not empty")
def sentence_of_an_error(subject: Subject) -> str:
    """Error codes have sentences."""
    code = subject.cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    return "not empty" if subject.ok(subject.cu.cuGetErrorString(code)) else "empty"


@row("13 or later")
def driver_version(subject: Subject) -> str:
    """The driver speaks CUDA 13."""
    version = int(subject.ok(subject.cu.cuDriverGetVersion()))
    return "13 or later" if version >= 13000 else str(version)


@row("every call fails, four succeed", one_sided="a lost context needs a reset of the process")
def calls_after_a_sticky_error(subject: Subject) -> str:
    """After a device-side assert every call fails but those that need no healthy context."""
    cu, stream, event = subject.cu, subject.stream(), subject.event()
    memory, host = subject.device(256), subject.pinned(256)
    cu.faults.fail("cuStreamSynchronize", cu.CUresult.CUDA_ERROR_ASSERT)
    subject.code(cu.cuStreamSynchronize(stream))
    lost = [
        cu.cuMemAlloc(256),
        cu.cuMemHostAlloc(256, 0),
        cu.cuMemFree(memory),
        cu.cuMemFreeHost(host),
        cu.cuMemcpyHtoDAsync(memory, host, 256, stream),
        cu.cuEventRecord(event, stream),
        cu.cuEventQuery(event),
        cu.cuEventDestroy(event),
        cu.cuStreamSynchronize(stream),
        cu.cuStreamDestroy(stream),
        cu.cuCtxSynchronize(),
        cu.cuMemGetInfo(),
    ]
    attribute = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED
    healthy = [
        cu.cuCtxGetCurrent(),
        cu.cuDeviceGetAttribute(attribute, subject.device_handle),
        cu.cuGetErrorName(cu.CUresult.CUDA_ERROR_ASSERT),
        cu.cuDevicePrimaryCtxRelease(subject.device_handle),
    ]
    all_lost = all(subject.code(result) == "ASSERT" for result in lost)
    all_healthy = all(subject.code(result) == "SUCCESS" for result in healthy)
    return "every call fails, four succeed" if all_lost and all_healthy else "otherwise"
