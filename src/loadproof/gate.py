"""Is this the machine that was asked for? Wrong hardware is an error, never a skip.

A skipped hardware test looks like a pass in a summary. So whoever asks for `gb10`
or `cuda` on another machine is told what was found there instead.
"""

from __future__ import annotations

import sys
from typing import Literal, get_args

import weightload
from loadproof.errors import LoadproofError

DeviceClass = Literal["gb10", "cuda"]

_WANTED = {
    "gb10": "an NVIDIA GB10 (compute capability 12.1, integrated, host page tables)",
    "cuda": "a CUDA GPU",
}


class GateError(LoadproofError):
    """The machine is not of the class that was asked for."""


def describe(profile: weightload.DeviceProfile) -> str:
    """A device in words, from its attributes."""
    major, minor = profile.capability
    memory = "integrated" if profile.integrated else "discrete"
    tables = "with" if profile.host_page_tables else "without"
    return (
        f"{profile.name} (compute capability {major}.{minor}, {memory}, {tables} host page tables)"
    )


def require(device_class: DeviceClass) -> weightload.DeviceProfile:
    """The profile of device 0, if it is of the class asked for.

    Raises:
        GateError: it is not, or there is none; the sentence names what was found.
    """
    wanted = f"{device_class} was asked for and needs {_WANTED[device_class]}"
    try:
        profile = weightload.device_profile(0)
    except weightload.WeightloadError as error:
        raise GateError(f"{wanted}; found no CUDA device here: {error}") from error
    if device_class == "gb10" and not profile.is_gb10:
        raise GateError(f"{wanted}; found {describe(profile)}.")
    return profile


def main() -> None:
    """`python -m loadproof.gate gb10|cuda`: print the device, or say what is there instead."""
    known = get_args(DeviceClass)
    if len(sys.argv) != 2 or sys.argv[1] not in known:
        sys.exit(f"usage: python -m loadproof.gate {'|'.join(known)}")
    try:
        profile = require(sys.argv[1])  # type: ignore[arg-type] # checked just above
    except GateError as error:
        sys.exit(str(error))
    sys.stdout.write(f"{describe(profile)}\n")


if __name__ == "__main__":
    main()
