"""Hazards: what the fake found wrong, each under an id that never changes.

A hazard is a rule of the driver's contract that the program broke, whether or not
the bytes came out right this time. Tests name the id they expect; a reader gets
both call sites, the allocation's, the byte range and the schedule to replay.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType, FrameType

Site = tuple[tuple[CodeType, int], ...]
"""The callers of a driver call, innermost first, as code objects and lines."""

_SITE_DEPTH = 4

HAZARDS: dict[str, str] = {
    "PIN-REUSE-BEFORE-COPY": "the host changed a copy's source before it knew the copy was done",
    "FREE-WHILE-PENDING": "memory was freed under work whose end nobody had awaited",
    "READ-BEFORE-DONE": "a read is not ordered after the write that it needs",
    "WRITE-BEFORE-DONE": "a write is not ordered after earlier work on the same bytes",
    "READ-UNWRITTEN": "a copy reads bytes that nothing ever wrote",
    "OOB-SOURCE": "a copy reads outside of every live allocation",
    "OOB-DESTINATION": "a copy or fill writes outside of every live allocation",
    "COPY-DIRECTION": "device memory stands where the call's name says host memory",
    "OVERLAPPING-COPY": "a copy's source and target overlap",
    "USE-AFTER-FREE": "freed memory was used",
    "USE-AFTER-DESTROY": "a destroyed stream, event or context was used",
    "BAD-FREE": "a free names no live allocation of its kind",
    "GUARD-OVERWRITTEN": "the host wrote beside a pinned allocation",
    "NO-CONTEXT": "a call was made on a thread without a current context",
    "UNCHECKED-ERROR": "a call failed and nobody looked at its result",
    "NEVER-AWAITED": "copies were started and their end was never awaited",
    "LEAK-AT-CLOSE": "a resource was never given back",
}
"""Every hazard id and what it means."""


@dataclass(frozen=True)
class Hazard:
    """One broken rule.

    Attributes:
        id: A key of `HAZARDS`.
        detail: What happened, with symbolic names of memory and handles.
        site: Where the call was made that broke the rule.
        other_site: Where the other work was started, if two are involved.
        allocation_site: Where the memory came from, if memory is involved.
        call: The number of the driver call during which it was noticed.
        schedule: The choices so far; `Replay` takes them.
    """

    id: str
    detail: str
    site: str
    other_site: str
    allocation_site: str
    call: int
    schedule: str

    def __str__(self) -> str:
        """One line for a person."""
        text = f"{self.id}: {HAZARDS[self.id]}: {self.detail}"
        for label, site in (
            ("at", self.site),
            ("other call at", self.other_site),
            ("allocated at", self.allocation_site),
        ):
            if site:
                text += f"; {label} {site}"
        return f"{text}; call {self.call}, schedule {self.schedule or 'late'!r}"


class HazardError(AssertionError):
    """The program broke rules of the driver's contract.

    Attributes:
        hazards: All of them, in the order they were found.
    """

    def __init__(self, hazards: Sequence[Hazard]) -> None:
        self.hazards = tuple(hazards)
        count = len(self.hazards)
        noun = "hazard" if count == 1 else "hazards"
        super().__init__("\n".join([f"{count} {noun}:", *map(str, self.hazards)]))


def caller_site() -> Site:
    """The callers of a driver call; to be called by the entry point itself."""
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - the cheapest way to a line number
    site: list[tuple[CodeType, int]] = []
    while frame is not None and len(site) < _SITE_DEPTH:
        site.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(site)


def render_site(site: Site) -> str:
    """Write a call site as `function (file:line) < caller (file:line)`."""
    return " < ".join(
        f"{code.co_name} ({code.co_filename.rsplit('/', 1)[-1]}:{line})" for code, line in site
    )
