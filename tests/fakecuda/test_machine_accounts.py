"""A state machine: memory is counted, placed and given back as the device does it.

The model is a plain list of what is allocated and a few sums; Hypothesis decides what is
asked for, beyond the limits too, and in which order it is given back.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    precondition,
    rule,
)

from fakecuda import FakeCuda, Limits, Seeded
from tests.fakecuda.programs import ok

_DEVICE, _PINNED = 20_000, 9_000
_SIZES = st.one_of(st.integers(1, 600), st.integers(600, 12_000))


@dataclass(eq=False)
class Piece:
    """Something allocated."""

    kind: str
    address: int
    nbytes: int
    keeper: Any = None


class Accounts(RuleBasedStateMachine):
    """Allocates, registers and frees on one device."""

    pieces = Bundle("pieces")

    @initialize(
        profile=st.sampled_from(("h200", "gb10")), cache=st.integers(0, _DEVICE), seed=st.text()
    )
    def start(self, profile: str, cache: int, seed: str) -> None:
        """Make a small device; on a shared pool some of it holds file pages."""
        self.shared = profile == "gb10"
        self.cache = cache if self.shared else 0
        limits = Limits(_DEVICE, _PINNED, page_cache_bytes=cache)
        self.cu = FakeCuda(profile, choices=Seeded(seed), limits=limits)
        ok(self.cu.cuInit(0))
        ok(self.cu.cuCtxSetCurrent(ok(self.cu.cuDevicePrimaryCtxRetain(0))))
        self.live: list[Piece] = []

    @rule(target=pieces, nbytes=_SIZES)
    def allocate(self, nbytes: int) -> Piece:
        """Device memory is had exactly if it fits."""
        return self._take(
            "device", nbytes, self.cu.cuMemAlloc(nbytes), fits=nbytes <= self._room()
        )

    @rule(target=pieces, nbytes=_SIZES)
    def pin(self, nbytes: int) -> Piece:
        """Pinned memory is had exactly if it fits."""
        result = self.cu.cuMemHostAlloc(nbytes, 0)
        return self._take("pinned", nbytes, result, fits=nbytes <= self._pinned_room())

    @rule(target=pieces, nbytes=_SIZES)
    def register(self, nbytes: int) -> Piece:
        """The caller's own memory counts as pinned while it is registered."""
        buffer = ctypes.create_string_buffer(nbytes)
        address = ctypes.addressof(buffer)
        code = self.cu.cuMemHostRegister(address, nbytes, 0)[0]
        fits = nbytes <= self._pinned_room()
        return self._take("registered", nbytes, (code, address), fits=fits, keeper=buffer)

    @rule(piece=consumes(pieces))
    def give_back(self, piece: Piece) -> None:
        """What is given back can be had again."""
        if piece in self.live:
            ok(self._free(piece)(piece.address))
            self.live.remove(piece)

    @rule()
    @precondition(lambda self: hasattr(self, "cu"))
    def ask(self) -> None:
        """Free and total are the model's."""
        free, total = ok(self.cu.cuMemGetInfo())
        assert (free, total) == (max(self._room() - self.cache, 0), _DEVICE)
        assert self.cu.available_bytes == self._room()

    @rule(piece=pieces, data=st.data())
    def describe(self, piece: Piece, data: st.DataObject) -> None:
        """Any address inside leads to its allocation and no other."""
        if piece in self.live:
            inside = piece.address + data.draw(st.integers(0, piece.nbytes - 1))
            assert ok(self.cu.cuMemGetAddressRange(inside)) == (piece.address, piece.nbytes)

    def teardown(self) -> None:
        """What is left is exactly what the leak reports name."""
        if not hasattr(self, "cu"):
            return
        ok(self.cu.cuDevicePrimaryCtxRelease(0))
        self.cu.close(check=False)
        leaks = sorted(int(hazard.detail.split()[0]) for hazard in self.cu.hazards)
        assert {hazard.id for hazard in self.cu.hazards} <= {"LEAK-AT-CLOSE"}
        assert leaks == sorted(piece.nbytes for piece in self.live)

    def _take(
        self, kind: str, nbytes: int, result: tuple[Any, ...], *, fits: bool, keeper: Any = None
    ) -> Piece:
        assert result[0].name == ("CUDA_SUCCESS" if fits else "CUDA_ERROR_OUT_OF_MEMORY")
        piece = Piece(kind, int(result[1] or 0), nbytes, keeper)
        if fits:
            if self.shared:
                # File pages give way.
                self.cache = min(self.cache, self._room() - nbytes)
            for other in self.live:
                assert (
                    piece.address + nbytes <= other.address
                    or other.address + other.nbytes <= piece.address
                )
            self.live.append(piece)
        return piece

    def _free(self, piece: Piece) -> Any:
        calls = {"device": "cuMemFree", "pinned": "cuMemFreeHost"}
        return getattr(self.cu, calls.get(piece.kind, "cuMemHostUnregister"))

    def _used(self, *kinds: str) -> int:
        return sum(piece.nbytes for piece in self.live if piece.kind in kinds)

    def _room(self) -> int:
        kinds = ("device", "pinned", "registered") if self.shared else ("device",)
        return _DEVICE - self._used(*kinds)

    def _pinned_room(self) -> int:
        room = _PINNED - self._used("pinned", "registered")
        return min(room, self._room()) if self.shared else room


Accounts.TestCase.settings = settings(max_examples=100, stateful_step_count=25)
TestAccounts = Accounts.TestCase
