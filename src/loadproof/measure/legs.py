"""Running legs one after the other under one setting, each recorded with its surroundings.

Every leg gets the same preamble: memory is waited for, the page cache is prepared and proven.
A leg is never dropped and never run again; what it saw, or why it saw nothing, is its record.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from loadproof.measure import cache_state
from loadproof.measure.cache_state import CacheState, Wanted
from loadproof.measure.conditions import Conditions, ConditionsWatch, available_bytes
from loadproof.measure.digest import Difference, Manifest
from loadproof.measure.leg import run_leg
from loadproof.measure.memory import MemoryPeaks
from loadproof.measure.messages import Failure, Plant, Request, Result, Serving, Truth
from loadproof.measure.template import SERVER_ENVIRONMENT, SERVER_MODULE, Template
from loadproof.plan.policy import Policy

if TYPE_CHECKING:
    from loadproof.plan.arms import InstalledArm

Purpose = Literal["hash", "control", "serve", "serve-control", "time"]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same for every leg.

    Attributes:
        policy: The rules.
        blocks: Mirrored blocks to run.
        seed: Where the order of the legs and the controls come from.
        device: ``fake``, ``fake:<profile>`` or ``cuda:<ordinal>``.
        checkpoint: What is loaded.
        shards: Its files.
        truth: What is in them, by an independent reader.
        cache: The page-cache state that every leg starts from.
        options: Keyword arguments for every arm's loader.
    """

    policy: Policy
    blocks: int
    seed: int
    device: str
    checkpoint: Path
    shards: tuple[Path, ...]
    truth: Manifest
    cache: Wanted = "warm"
    options: dict[str, Any] = {}


class Leg(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One leg's record.

    Attributes:
        purpose: Hashing, a control, serving, the control of serving, or timing.
        arm: Which arm, by its letter or (in a league) its name; ``reference`` where
            transformers loaded what the arms' served output is compared with.
        block: Which mirrored block; None outside the schedule.
        half: 0 or 1 within the block; None outside the schedule.
        cache: The page cache just before it, as far as its reads afterwards bear that out.
        memory: Peaks seen from outside.
        conditions: What else went on.
        outcome: What it saw, or why it saw nothing.
    """

    purpose: Purpose
    arm: str
    block: int | None
    half: int | None
    cache: CacheState
    memory: MemoryPeaks
    conditions: Conditions
    outcome: Result | Failure


class WeightsCheck(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The device's bytes of one hash leg, against the files'.

    Attributes:
        arm: Whose loader put them there.
        manifest: Hex SHA-256 over all tensors' digests.
        differences: Every tensor that is not the files'.
        hazards: What the fake device found wrong meanwhile.
        poisoned_bytes: How many bytes lie where a pattern was before the load.
    """

    arm: str
    manifest: str
    differences: tuple[Difference, ...]
    hazards: tuple[str, ...]
    poisoned_bytes: int | None = None


class NotRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that a reader may miss, and why it was not done."""

    what: str
    why: str


class Turned(NamedTuple):
    """One leg that ran.

    Attributes:
        leg: Its record, without the digests of every tensor.
        result: What it saw, digests included; None when it saw nothing.
        said: What its process wrote to standard error.
    """

    leg: Leg
    result: Result | None
    said: str


class LegRunner:
    """Runs legs under one setting, until it is closed."""

    def __init__(self, setting: Setting) -> None:
        """Prepare.

        Raises:
            LegError: The process that legs are forked from could not start.
        """
        self._setting = setting
        kind, _, ordinal = setting.device.partition(":")
        self._ordinal = int(ordinal) if kind == "cuda" and ordinal.isdigit() else None
        # On the fake device no leg needs torch.
        self._template = Template(["torch"] if kind == "cuda" else [])
        self._serving: Template | None = None
        self._base_available = available_bytes()

    def close(self) -> None:
        """End what legs are forked from."""
        self._end_serving()
        self._template.close()

    def _template_for(self, purpose: Purpose) -> Template:
        """What a leg is forked from; transformers is imported once, for serve legs alone."""
        if purpose == "time":
            # Its memory is given back before anything is timed.
            self._end_serving()
        if purpose not in {"serve", "serve-control"}:
            return self._template
        if self._serving is None:
            self._serving = Template([SERVER_MODULE], SERVER_ENVIRONMENT)
        return self._serving

    def _end_serving(self) -> None:
        if self._serving is not None:
            self._serving.close()
            self._serving = None

    def run(
        self,
        purpose: Purpose,
        arm: str,
        installed: InstalledArm,
        *,
        place: tuple[int, int] | None = None,
        delay_fraction: float = 0.0,
        plant: Plant | None = None,
        checkpoint: Path | None = None,
        serving: Serving | None = None,
    ) -> Turned:
        """Prepare, run and record one leg.

        Args:
            purpose: Hashing, a control, serving or timing.
            arm: What the record calls it.
            installed: The code to run.
            place: Block and half, in a schedule.
            delay_fraction: A delay to plant inside the timed part.
            plant: A fault to plant on the device.
            checkpoint: What to load instead of the setting's checkpoint: an altered copy.
            serving: How to serve what was loaded; only for serve legs.
        """
        setting = self._setting
        timing = purpose == "time"
        cache: Wanted = "cold" if serving is not None and serving.cold else setting.cache
        hashing = not timing and serving is None
        watch = ConditionsWatch(setting.policy, self._ordinal, self._base_available)
        request = Request(
            kind="time" if timing else "hash" if hashing else "serve",
            site=installed.site,
            entry=installed.arm.entry or "",
            command=installed.command(),
            digest=installed.arm.digest,
            checkpoint=str(checkpoint or setting.checkpoint),
            device=setting.device,
            delay_fraction=delay_fraction,
            plant=plant,
            truth=Truth(str(setting.checkpoint), setting.truth) if hashing else None,
            audit=setting.truth if timing else None,
            audit_bytes=setting.policy.audit_bytes,
            serving=serving,
            options={**setting.options, **installed.arm.options},
            deadline_s=setting.policy.leg_timeout_s,
        )
        prepared = cache_state.prepare(setting.shards, cache)
        names = tuple(path.name for path in setting.shards) if hashing else ()
        ended = run_leg(request, self._template_for(purpose), setting.policy.leg_timeout_s, names)
        result = ended.outcome if isinstance(ended.outcome, Result) else None
        read_bytes = result.read_bytes if result else None
        # Curves of every leg would be most of a receipt; the first block's are shown.
        shown = timing and place is not None and place[0] == 0
        memory = ended.memory if shown else msgspec.structs.replace(ended.memory, curve=())
        # The digests are kept once, as differences from the truth.
        kept = ended.outcome if result is None else msgspec.structs.replace(result, manifest=None)
        leg = Leg(
            purpose=purpose,
            arm=arm,
            block=None if place is None else place[0],
            half=None if place is None else place[1],
            cache=cache_state.reprove(prepared, cache, read_bytes),
            memory=memory,
            conditions=watch.stop(),
            outcome=kept,
        )
        return Turned(leg, result, "" if result else ended.said)
