"""Device profiles: what a device is, and which of the driver's ways it goes."""

import tomllib
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files

from fakecuda.enums import CUdevice_attribute


@dataclass(frozen=True)
class Profile:
    """The facts of one device.

    Attributes:
        name: What the device calls itself.
        total_bytes: Device memory.
        host_bytes: Host memory that could be pinned.
        attributes: `CU_DEVICE_ATTRIBUTE_*` values by their enum value.
        reads_pageable: The device follows the host's page tables, so that an
            asynchronous pageable copy may read its source after the call.
        shares_memory: Host and device share one pool, page cache included.
        device_granule: Device addresses are multiples of this many bytes.
        seen: How this device was seen to decide where the documentation says "may".
        misalign: Hand out the least alignment that is promised, not what is usual.
    """

    name: str
    total_bytes: int
    host_bytes: int
    attributes: dict[int, int] = field(default_factory=dict)
    reads_pageable: bool = False
    shares_memory: bool = False
    device_granule: int = 256
    misalign: bool = True
    seen: dict[str, int] = field(default_factory=dict)

    def attribute(self, name: str) -> int:
        """The value of `CU_DEVICE_ATTRIBUTE_<name>`."""
        return self.value_of(CUdevice_attribute[f"CU_DEVICE_ATTRIBUTE_{name}"])

    def value_of(self, attribute: CUdevice_attribute) -> int:
        """The value of an attribute.

        Raises:
            LookupError: The profile does not state it; an invented answer could mislead.
        """
        if attribute not in self.attributes:
            raise LookupError(
                f"the profile of {self.name} does not state {attribute.name}; make one that "
                "does with dataclasses.replace(profile, attributes=...)"
            )
        return self.attributes[attribute]


@lru_cache
def load_profile(name: str) -> Profile:
    """Read one of the profiles that come with the package.

    Args:
        name: `gb10`, `gh200` or `h200`.

    Raises:
        ValueError: There is no such profile.
    """
    folder = files("fakecuda") / "devices"
    path = folder / f"{name}.toml"
    if not path.is_file():
        known = ", ".join(sorted(p.name.removesuffix(".toml") for p in folder.iterdir()))
        raise ValueError(f"no device profile {name!r}; there are {known}")
    facts = tomllib.loads(path.read_text())
    attributes = {
        int(CUdevice_attribute[f"CU_DEVICE_ATTRIBUTE_{key}"]): int(value)
        for key, value in facts["attributes"].items()
    }
    return Profile(
        name=facts["name"],
        total_bytes=facts["total_bytes"],
        host_bytes=facts["host_bytes"],
        attributes=attributes,
        reads_pageable=bool(
            attributes[
                CUdevice_attribute.CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES
            ]
        ),
        seen=facts.get("seen", {}),
        shares_memory=bool(attributes[CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED]),
    )
