"""One league from end to end: plan, measure, stand, report."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loadproof.errors import ArmError
from loadproof.judge.standing import stand
from loadproof.measure.cache_state import Wanted
from loadproof.measure.device import require_device
from loadproof.measure.environment import describe_environment
from loadproof.measure.ground_truth import (
    file_manifest,
    require_weights,
    shard_paths,
    tensor_places,
)
from loadproof.measure.league import run_league
from loadproof.measure.legs import Setting
from loadproof.measure.messages import Result
from loadproof.plan.arms import named_loader
from loadproof.plan.policy import load_policy
from loadproof.report.consistency import device_class
from loadproof.report.files import require_writable, write_run
from loadproof.report.league import (
    RECORD_TYPE,
    LeagueRecord,
    encode_league,
    render_league,
    render_league_page,
)
from loadproof.report.privacy import private_here, require_public_names

if TYPE_CHECKING:
    from collections.abc import Callable

RECORD_NAME = "league.json"
TABLE_NAME = "league.md"
PAGE_NAME = "league.html"
WRITTEN = (RECORD_NAME, TABLE_NAME, PAGE_NAME)


class LeagueJob(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked for.

    Attributes:
        loaders: Names in ``loadproof.loaders``, each with its options after a question mark.
        checkpoint: Folder or file of safetensors.
        device: ``fake``, ``fake:<profile>`` or ``cuda:<ordinal>``.
        out: Folder for the record and the pages.
        policy: Name of the policy, or the path of one.
        blocks: Mirrored blocks; None takes the policy's.
        seed: Of the order; None draws one.
        cache: The page-cache state that every leg starts from.
    """

    loaders: tuple[str, ...]
    checkpoint: Path
    device: str
    out: Path
    policy: str
    blocks: int | None = None
    seed: int | None = None
    cache: Wanted = "warm"


def compare(job: LeagueJob, progress: Callable[[str, int, int], None]) -> LeagueRecord:
    """Run a league and write its record, its table and its page.

    Raises:
        LoadproofError: Something is not as it has to be; nothing was written then.
    """
    policy = load_policy(job.policy)
    if len(set(job.loaders)) != len(job.loaders) or not job.loaders:
        raise ArmError("Name each loader once, such as --loaders weightload,safetensors.")
    installed = {spoken: named_loader(spoken) for spoken in job.loaders}
    places = tensor_places(job.checkpoint)
    require_weights(job.checkpoint, places)
    require_public_names(job.checkpoint, places)
    require_device(job.device)
    require_writable(job.out, WRITTEN)
    progress("hashing the checkpoint", 0, 0)
    setting = Setting(
        policy=policy,
        blocks=policy.blocks if job.blocks is None else job.blocks,
        seed=secrets.randbits(32) if job.seed is None else job.seed,
        device=job.device,
        checkpoint=job.checkpoint.resolve(),
        shards=tuple(shard_paths(job.checkpoint)),
        truth=file_manifest(places),
        cache=job.cache,
    )
    league = run_league(setting, installed, progress)
    device = next(
        (each.outcome.device for each in league.legs if isinstance(each.outcome, Result)), None
    )
    kept = (policy.name, *(each.name for each in places))
    record = private_here(job.checkpoint, job.out, kept=kept).cleared(
        LeagueRecord(
            type_=RECORD_TYPE,
            device_class=device_class(device),
            policy=policy,
            blocks=setting.blocks,
            seed=setting.seed,
            cache=setting.cache,
            device=device,
            environment=describe_environment(),
            checkpoint_bytes=setting.truth.nbytes(),
            tensors=len(setting.truth.tensors),
            standings=stand(league, setting.blocks, policy.confidence),
            entries=tuple(league.entries),
            legs=tuple(league.legs),
        )
    )
    files = {
        RECORD_NAME: encode_league(record),
        TABLE_NAME: render_league(record).encode(),
        PAGE_NAME: render_league_page(record).encode(),
    }
    write_run(job.out, files, WRITTEN)
    return record
