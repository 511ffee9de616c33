"""Other people's loaders as arms, each asked for in the way its own documentation shows."""

from __future__ import annotations

from loadproof.loaders.peers import LOADERS, PEERS, Peer

__all__ = ["LOADERS", "PEERS", "Peer"]
