"""The load-ready exchange: no rank goes on before every rank has said that it is ready.

It runs over a `torch.distributed` store, not over a collective: a store can say which
rank is missing, and a rank that fails can say why, where a collective would only time
out on all the others.
"""

from __future__ import annotations

import time
from typing import Protocol

from weightload.errors import RankError

_POLL_S = 0.01
_READY = b"ready"


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used."""

    def set(self, key: str, value: str) -> None:
        """Publish a value."""

    def get(self, key: str) -> bytes:
        """Read a value that is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""


class LoadReady:
    """One exchange among ranks; call it when this rank has placed its weights.

    Args:
        store: shared by all ranks, for example a `torch.distributed.TCPStore`.
        rank: this rank, from 0.
        world_size: how many ranks there are.
        name: of the exchange; one for each model that is loaded, the same on all ranks.
        timeout_s: how long to wait for the slowest rank.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, *, name: str, timeout_s: float = 600.0
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._name = name
        self._timeout_s = timeout_s

    def __call__(self) -> None:
        """Say that this rank is ready, and wait for all others.

        Raises:
            RankError: a rank failed, or was not ready in time; all such ranks are named.
        """
        self._store.set(self._key(self._rank), _READY.decode())
        deadline = time.monotonic() + self._timeout_s
        missing = set(range(self._world_size)) - {self._rank}
        while missing:
            arrived = {rank for rank in missing if self._store.check([self._key(rank)])}
            for rank in sorted(arrived):
                said = self._store.get(self._key(rank))
                if said != _READY:
                    raise RankError(
                        f"rank {rank} failed in the exchange {self._name!r}: "
                        f"{said.decode(errors='replace')}"
                    )
            missing -= arrived
            if missing and time.monotonic() > deadline:
                names = ", ".join(str(rank) for rank in sorted(missing))
                raise RankError(
                    f"rank {names} was not ready in the exchange {self._name!r} after "
                    f"{self._timeout_s:g} s; look at its log."
                )
            if missing:
                time.sleep(_POLL_S)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed, and why."""
        self._store.set(self._key(self._rank), f"{type(error).__name__}: {error}")

    def _key(self, rank: int) -> str:
        return f"weightload/{self._name}/{rank}"
