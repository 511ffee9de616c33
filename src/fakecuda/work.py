"""What the device is given to do: operations, the streams they queue in, events.

These are plain records. `engine` runs them, `order` knows what is ordered after
what, `watch` sees whether the host keeps its hands off their sources.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fakecuda.enums import CUresult
from fakecuda.hazards import Site
from fakecuda.memory import Block


class Access(NamedTuple):
    """One range that an operation touches.

    Attributes:
        block: The allocation, None for pageable host memory.
        address: Where it starts, in the block's own addresses.
        nbytes: How long it is.
        writes: Whether it is written, else it is read.
    """

    block: Block | None
    address: int
    nbytes: int
    writes: bool

    def overlaps(self, other: "Access") -> bool:
        """Whether both touch a common byte of one block."""
        return (
            self.block is other.block
            and self.address < other.address + other.nbytes
            and other.address < self.address + self.nbytes
        )


class Kept(NamedTuple):
    """A copy of bytes at a real address, and what keeps it alive."""

    keeper: object
    address: int


@dataclass(slots=True, eq=False)
class Op:
    """One operation in a stream.

    Attributes:
        kind: `copy`, `fill`, `record`, `wait`, `wait-value`, `write-value`, `call` or `hold`.
        call: The number of the driver call that queued it.
        source: Real address to read from.
        target: Real address to write to.
        value: The byte of a fill.
        offset: How many bytes have run.
        piece: How many bytes run at a time.
        accesses: What it touches; a copy's source comes first.
        keepers: Objects that keep its memory alive, freed or not.
        must_be_awaited: False for synchronous calls that may return before their bytes
            have landed: their caller has nothing to await.
        pageable_source: The source is read, late, from memory that nobody pinned.
        lingers: It stays under way until something needs it, however eager the device is.
        source_kept: The source's bytes as they were when it was queued, if watched.
        source_moves_on: Later work writes the source, so its bytes count until this runs.
        target_kept: What a pinned target holds, if watched.
        ready: Answers whether it may run, for a wait on a memory value.
        action: What it does, for kinds that move no bytes.
        failure: What it fails with when it runs.
        began_in_call: During which driver call its first piece ran.
        clock: By stream number, up to which sequence work is ordered before it.
    """

    kind: str
    call: int
    site: Site
    nbytes: int = 0
    source: int = 0
    target: int = 0
    value: int = 0
    offset: int = 0
    piece: int = 0
    accesses: tuple[Access, ...] = ()
    keepers: tuple[object, ...] = ()
    must_be_awaited: bool = True
    pageable_source: bool = False
    lingers: bool = False
    source_kept: "Kept | None" = None
    source_moves_on: bool = False
    target_kept: "Kept | None" = None
    ready: Callable[[], bool] | None = None
    action: Callable[[], None] | None = None
    failure: CUresult | None = None
    running: bool = False
    done: bool = False
    began_in_call: int = 0
    ended_ms: float = 0.0
    stream: "Stream" = field(init=False)
    sequence: int = 0
    clock: dict[int, int] = field(default_factory=dict)
    waits_for: "tuple[Op, ...]" = ()


@dataclass(slots=True, eq=False)
class Stream:
    """A queue of operations.

    Attributes:
        number: The how-manieth stream of the fake; its place in clocks.
        context: The context it belongs to.
        blocking: Whether the legacy default stream waits for it, and it for that one.
        refusals: How often in a row a query has answered "not ready".
        queue: What has not ended, oldest first.
        outstanding: What the host does not know to have ended, oldest first.
        last: The newest operation, ended or not.
        excused: True when a failed call left it in doubt: then it is no leak.
    """

    number: int
    handle: int
    context: Any
    flags: int
    site: Site
    blocking: bool
    refusals: int = 0
    sequence: int = 0
    queue: deque[Op] = field(default_factory=deque)
    outstanding: deque[Op] = field(default_factory=deque)
    last: Op | None = None
    destroyed_at: Site | None = None
    excused: bool = False


@dataclass(slots=True, eq=False)
class Event:
    """A mark in a stream.

    Attributes:
        context: The context it belongs to.
        capture: The record operation it stands for; None before the first record.
        refusals: How often in a row a query has answered "not ready".
        excused: True when a failed call left it in doubt: then it is no leak.
    """

    handle: int
    context: Any
    flags: int
    site: Site
    capture: Op | None = None
    refusals: int = 0
    destroyed_at: Site | None = None
    excused: bool = False
