"""The rules of a trial, fixed before the first leg and named by digest in the receipt.

A policy is a small TOML file.  It lives in ``qualification/policies`` of the repository and
travels inside the wheel as ``loadproof/policies``, so that an installed harness and a checkout
judge by the same rules.  The digest is taken over the values, not over the file's spelling.
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from loadproof.errors import PolicyError

# With fewer blocks the exact signed-rank test cannot reach 5 % at all (2 / 2**5 = 6.25 %).
BLOCKS_MIN = 6
# Above this the exact sign-flip test (2**(blocks / 2) sums a side) stops being instant.
BLOCKS_MAX = 32

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Fraction = Annotated[float, msgspec.Meta(gt=0, lt=1)]


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The margins and counts of one kind of trial.

    Attributes:
        name: How a receipt calls it; equals the file's stem.
        margin_log_ratio: The smallest change of load time that matters, as the absolute
            natural logarithm of a ratio of times (0.02 is about 2 %).
        blocks: Mirrored blocks in a trial; each runs every arm twice.
        confidence: Two-sided confidence of every interval.
        planted_delay_fraction: Arm S's delay, as a fraction of that load's own time.
        hash_legs: Fresh processes per arm whose device bytes are read back and hashed.
        audit_bytes: How many bytes a timing leg reads back after its clock has stopped, from
            tensors drawn at random; whole tensors, so a little more.
        coverage_min: Smallest fraction of the bytes that must take the changed route.
        leg_timeout_s: A leg that takes longer is killed and counts as failed.
        memory_missing_bytes_max: A leg is marked when it began with MemAvailable further below
            its base line than this.
        memory_wait_s: How long a leg waits for memory to come back before it begins anyway.
        swapped_bytes_max: A leg is marked when more than this was swapped meanwhile.
        temperature_c_max: A leg is marked when the GPU was hotter.
        clock_mhz_min: A leg is marked when the GPU's clock never reached this.
        other_gpu_processes_max: A leg is marked when more processes of others were on the GPU.
    """

    name: str
    margin_log_ratio: _Positive
    blocks: Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_MAX)]
    confidence: _Fraction
    planted_delay_fraction: _Positive
    hash_legs: Annotated[int, msgspec.Meta(ge=1)]
    audit_bytes: Annotated[int, msgspec.Meta(ge=1)]
    coverage_min: Annotated[float, msgspec.Meta(ge=0, le=1)]
    leg_timeout_s: _Positive
    memory_missing_bytes_max: Annotated[int, msgspec.Meta(ge=0)]
    memory_wait_s: Annotated[float, msgspec.Meta(ge=0)]
    swapped_bytes_max: Annotated[int, msgspec.Meta(ge=0)]
    temperature_c_max: _Positive
    clock_mhz_min: Annotated[int, msgspec.Meta(ge=0)]
    other_gpu_processes_max: Annotated[int, msgspec.Meta(ge=0)]

    def digest(self) -> str:
        """Return ``sha256:<hex>`` over the policy's values, in the order of the fields."""
        return "sha256:" + hashlib.sha256(msgspec.json.encode(self)).hexdigest()


def policy_folder() -> Path:
    """Return the folder that holds the policies: inside the package, or in the checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "policies"
    return installed if installed.is_dir() else package.parents[1] / "qualification" / "policies"


def load_policy(name: str) -> Policy:
    """Read a policy by name, or by path when ``name`` ends in ``.toml``.

    Raises:
        PolicyError: There is no such policy, or it does not match the schema.
    """
    folder = policy_folder()
    path = Path(name) if name.endswith(".toml") else folder / f"{name}.toml"
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        known = ", ".join(sorted(each.stem for each in folder.glob("*.toml"))) or "none"
        raise PolicyError(f"There is no policy {name!r}; the known ones are: {known}.") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PolicyError(f"Policy {name!r} cannot be read: {error}.") from error
    try:
        return msgspec.convert({"name": path.stem, **values}, Policy)
    except msgspec.ValidationError as error:
        raise PolicyError(f"Policy {name!r} is not valid: {error}.") from error
