"""Failures on demand: any call, the n-th time, once or for ever, now or later.

A fault is planned before the program runs. Whether an error is sticky is not an
option: it is a property of the code, as on a real device.
"""

from dataclasses import dataclass

from fakecuda.enums import CUresult
from fakecuda.surface import SURFACE, Gate

STICKY = frozenset({226, 700, 702, 710, *range(714, 720), 721, 911})
"""Result codes after which a context is lost for good."""


@dataclass(slots=True)
class Fault:
    """One planned failure or delay.

    Attributes:
        call: An entry point's name, or `*` for any call that can fail.
        nth: Which such call it hits, from 1.
        error: What the call answers with; None only delays it.
        persistent: It hits every later such call too.
        deferred: The call succeeds, its work fails when it runs, and the error comes
            out of a later call.
        delay_s: How long the call takes first.
        seen: How many such calls there have been.
    """

    call: str
    nth: int
    error: CUresult | None
    persistent: bool = False
    deferred: bool = False
    delay_s: float = 0.0
    seen: int = 0

    def hits(self, name: str) -> bool:
        """Count a call, and answer whether the fault strikes it."""
        if self.call not in {"*", name}:
            return False
        self.seen += 1
        return self.seen == self.nth or (self.persistent and self.seen > self.nth)


class Faults:
    """The planned faults of one fake.

    Attributes:
        delivered: How many errors of planned faults have reached the program.
    """

    def __init__(self) -> None:
        self.delivered = 0
        self._planned: list[Fault] = []

    def fail(
        self,
        call: str,
        error: CUresult = CUresult.CUDA_ERROR_UNKNOWN,
        *,
        nth: int = 1,
        persistent: bool = False,
        deferred: bool = False,
    ) -> None:
        """Make the n-th such call fail.

        Args:
            call: An entry point's name, or `*` for any call that can fail.
            error: What it answers with.
            nth: Which one, counted from the start of the program.
            persistent: All later ones fail too.
            deferred: Its work fails, and a later call says so.

        Raises:
            ValueError: There is no such call, or it queues no work that could fail later.
        """
        self._check(call, nth)
        if deferred and (call == "*" or not SURFACE[call].enqueues):
            raise ValueError(f"{call} queues no work, so it cannot fail later")
        self._planned.append(Fault(call, nth, error, persistent, deferred))

    def delay(self, call: str, seconds: float, *, nth: int = 1, persistent: bool = False) -> None:
        """Make the n-th such call take long.

        Raises:
            ValueError: There is no such call.
        """
        self._check(call, nth)
        self._planned.append(Fault(call, nth, None, persistent, delay_s=seconds))

    def strike(self, name: str, gate: Gate) -> list[Fault]:
        """The faults that hit this call."""
        if not self._planned or gate is Gate.OPEN:
            return []
        return [fault for fault in self._planned if fault.hits(name)]

    @staticmethod
    def _check(call: str, nth: int) -> None:
        if call != "*" and call not in SURFACE:
            raise ValueError(f"there is no driver call named {call}")
        if nth < 1:
            raise ValueError("calls are counted from 1")
