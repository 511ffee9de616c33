"""The legs of a league: several loaders on one checkpoint, in mirrored random blocks.

A league ranks; it qualifies nothing, so it has no planted delay and no margin.  It keeps what
makes a comparison fair: fresh processes, random order, the same preamble, and weights that are
read back and compared before anybody's time is taken.  A loader that cannot load is listed
with its reason, and the others run on.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import msgspec

from loadproof.measure.digest import Difference, differences
from loadproof.measure.legs import Leg, LegRunner, Setting
from loadproof.measure.messages import Failure, Result
from loadproof.plan.arms import Arm
from loadproof.plan.schedule import mirrored_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from loadproof.plan.arms import InstalledArm


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One loader in a league.

    Attributes:
        name: As it was asked for.
        arm: Its code and options.
        differences: Tensors that are not the files'.
        poisoned_bytes: How many bytes lie where a pattern was before its hash leg.
        failure: Why it was not timed, or not to the end; None when it was.
    """

    name: str
    arm: Arm
    differences: tuple[Difference, ...]
    poisoned_bytes: int | None
    failure: str | None


class League(msgspec.Struct, kw_only=True):
    """What was seen.

    Attributes:
        entries: The loaders, in the order in which they were named.
        legs: Every leg, in the order in which they ran.
    """

    entries: list[Entry] = []
    legs: list[Leg] = []


def run_league(
    setting: Setting,
    installed: Mapping[str, InstalledArm],
    progress: Callable[[str, int, int], None],
) -> League:
    """Hash every loader's weights once, then time those that can load.

    Args:
        setting: What is the same for every leg.
        installed: The loaders by the names that were asked for.
        progress: Told before each leg: what it is, its number from 0, and how many there are.
    """
    with closing(LegRunner(setting)) as runner:
        return _run(setting, installed, progress, runner)


def _run(
    setting: Setting,
    installed: Mapping[str, InstalledArm],
    progress: Callable[[str, int, int], None],
    runner: LegRunner,
) -> League:
    league = League()
    total = len(installed) * (1 + 2 * setting.blocks)
    for name, each in installed.items():
        progress(f"hash {name}", len(league.legs), total)
        turned = runner.run("hash", name, each)
        league.legs.append(turned.leg)
        league.entries.append(_entry(setting, name, each, turned.leg, turned.result))
    able = [each.name for each in league.entries if each.failure is None]
    for turn in mirrored_blocks(able, setting.blocks, setting.seed) if able else ():
        progress(f"time {turn.arm}", len(league.legs), total)
        place = (turn.block, turn.half)
        leg = runner.run("time", turn.arm, installed[turn.arm], place=place).leg
        league.legs.append(leg)
    league.entries = [_with_failures(each, league.legs) for each in league.entries]
    return league


def _entry(
    setting: Setting, name: str, installed: InstalledArm, leg: Leg, result: Result | None
) -> Entry:
    wrong: tuple[Difference, ...] = ()
    if result is not None and result.manifest is not None:
        wrong = differences(setting.truth, result.manifest, result.mismatches)
    failure = leg.outcome.sentence if isinstance(leg.outcome, Failure) else None
    return Entry(
        name=name,
        arm=installed.arm,
        differences=wrong,
        poisoned_bytes=result.poisoned_bytes if result else None,
        failure=failure,
    )


def _with_failures(entry: Entry, legs: Sequence[Leg]) -> Entry:
    failed = next(
        (
            leg.outcome.sentence
            for leg in legs
            if leg.arm == entry.name and isinstance(leg.outcome, Failure)
        ),
        None,
    )
    return msgspec.structs.replace(entry, failure=failed)
