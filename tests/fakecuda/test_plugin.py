"""The fixture `fake_cuda` fails a test on any hazard or leak, and says how to see it again."""

import pytest

pytest_plugins = ["pytester"]

_START = """
import ctypes
import pytest

def start(cu):
    cu.cuInit(0)
    cu.cuCtxSetCurrent(cu.cuDevicePrimaryCtxRetain(0)[1])
"""


def _run(pytester: pytest.Pytester, body: str) -> pytest.RunResult:
    pytester.makeconftest('pytest_plugins = ["fakecuda.pytest_plugin"]')
    pytester.makepyfile(_START + body)
    # Its own small run: the outer run's options and plugins are not the subject.
    return pytester.runpytest_inprocess("-p", "no:cacheprovider")


def test_a_clean_test_passes(pytester: pytest.Pytester) -> None:
    """A test that gives everything back passes."""
    result = _run(
        pytester,
        """
def test_it(fake_cuda):
    start(fake_cuda)
    fake_cuda.cuMemFree(fake_cuda.cuMemAlloc(16)[1])
    fake_cuda.cuDevicePrimaryCtxRelease(0)
""",
    )
    result.assert_outcomes(passed=1)


def test_a_shared_buffer_fails(pytester: pytest.Pytester) -> None:
    """Two slots that share one pinned buffer fail the test, with a way to run it again."""
    result = _run(
        pytester,
        """
def test_it(fake_cuda):
    cu = fake_cuda
    start(cu)
    stream, buffer = cu.cuStreamCreate(1)[1], cu.cuMemHostAlloc(64, 0)[1]
    weights = cu.cuMemAlloc(128)[1]
    for number, slot in enumerate([buffer, buffer]):
        ctypes.memset(slot, number + 1, 64)
        cu.cuMemcpyHtoDAsync(weights + 64 * number, slot, 64, stream)
    cu.cuStreamSynchronize(stream)
    cu.cuStreamDestroy(stream)
    cu.cuMemFree(weights)
    cu.cuMemFreeHost(buffer)
    cu.cuDevicePrimaryCtxRelease(0)
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*PIN-REUSE-BEFORE-COPY*", "*to run it again: FakeCuda('h200', seed='0', *"]
    )


def test_a_leak_fails(pytester: pytest.Pytester) -> None:
    """A test that leaves memory behind does not pass."""
    result = _run(
        pytester,
        """
def test_it(fake_cuda):
    start(fake_cuda)
    fake_cuda.cuMemAlloc(16)
    fake_cuda.cuDevicePrimaryCtxRelease(0)
""",
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*LEAK-AT-CLOSE*16 bytes of device0*"])


def test_the_marker_makes_the_fake(pytester: pytest.Pytester) -> None:
    """The marker's arguments are FakeCuda's."""
    result = _run(
        pytester,
        """
@pytest.mark.fake_cuda(profile="gb10", devices=2)
def test_it(fake_cuda):
    fake_cuda.cuInit(0)
    assert fake_cuda.cuDeviceGetCount()[1] == 2
    assert fake_cuda.cuDeviceGetName(64, 0)[1] == b"NVIDIA GB10"
""",
    )
    result.assert_outcomes(passed=1)


def test_the_first_error_stays(pytester: pytest.Pytester) -> None:
    """A test that fails by itself fails by its own error."""
    result = _run(
        pytester,
        """
def test_it(fake_cuda):
    assert 1 == 2
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert 1 == 2*"])
