"""Device profiles state every fact, and tell integrated memory from shared page tables."""

import pytest

from fakecuda import FakeCuda, load_profile
from fakecuda.enums import CUdevice_attribute
from tests.fakecuda.programs import ok


def test_the_h200_states_every_attribute() -> None:
    """Each attribute of the enumeration has a value that the driver call returns."""
    with FakeCuda("h200") as cu:
        ok(cu.cuInit(0))
        for attribute in CUdevice_attribute:
            value = ok(cu.cuDeviceGetAttribute(attribute, 0))
            assert load_profile("h200").attributes[attribute] == value


@pytest.mark.parametrize("name", ["gb10", "gh200"])
def test_what_a_profile_does_not_state_is_not_invented(name: str) -> None:
    """Asking for a fact that nobody has published is an error that names it."""
    with FakeCuda(name) as cu:
        ok(cu.cuInit(0))
        attribute = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_PITCH
        with pytest.raises(LookupError, match="does not state CU_DEVICE_ATTRIBUTE_MAX_PITCH"):
            cu.cuDeviceGetAttribute(attribute, 0)


@pytest.mark.parametrize(
    ("name", "facts"), [("gb10", (12, 1, 1, 1)), ("gh200", (9, 0, 0, 1)), ("h200", (9, 0, 0, 0))]
)
def test_integrated_and_page_tables_are_two_facts(name: str, facts: tuple[int, ...]) -> None:
    """A GB10 has both, a GH200 shares page tables only, an H200 neither."""
    profile = load_profile(name)
    names = (
        "COMPUTE_CAPABILITY_MAJOR",
        "COMPUTE_CAPABILITY_MINOR",
        "INTEGRATED",
        "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES",
    )
    assert facts == tuple(profile.attribute(key) for key in names)
    assert (profile.shares_memory, profile.reads_pageable) == (bool(facts[2]), bool(facts[3]))


def test_an_unknown_profile_is_named() -> None:
    """Asking for a device that has no profile says which there are."""
    with pytest.raises(ValueError, match=r"no device profile 'h100'; there are gb10, gh200, h200"):
        FakeCuda("h100")


def test_a_wild_attribute_is_refused() -> None:
    """An attribute number that the enumeration lacks is an invalid value."""
    with FakeCuda() as cu:
        ok(cu.cuInit(0))
        code = cu.cuDeviceGetAttribute(10_000, 0)[0]
        assert code == cu.CUresult.CUDA_ERROR_INVALID_VALUE
