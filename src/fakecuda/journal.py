"""The journal: every call and every piece of work that ran, in order.

Entries are cheap tuples while the program runs and become text when asked for. The
text names handles and addresses by what created them (`stream1`, `pinned0+0x40`),
because the numbers differ from run to run and from driver to driver; so two runs of
one schedule give equal text, and a fake's run can be compared with a real one's.
"""

import difflib
import json
import threading
from collections.abc import Iterable
from typing import Any, Protocol

from fakecuda.enums import CUresult
from fakecuda.hazards import Site
from fakecuda.names import Names
from fakecuda.surface import SURFACE

_POLLS = frozenset({"cuEventQuery", "cuStreamQuery"})


class Ran(Protocol):
    """What the journal needs to know of an operation."""

    kind: str
    call: int


class Journal:
    """What happened, in order."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, ...]] = []

    def called(
        self, number: int, name: str, args: tuple[Any, ...], result: tuple[Any, ...], site: Site
    ) -> None:
        """Write down a call."""
        self._entries.append((number, threading.get_ident(), name, args, result, site))

    def ran(self, op: Ran, start: int, nbytes: int) -> None:
        """Write down a piece of work that the device did."""
        self._entries.append((op.call, op.kind, start, nbytes))

    def records(self) -> list[dict[str, Any]]:
        """The entries with symbolic names, in order.

        Returns:
            For a call `n`, `thread`, `call`, `args`, `result`, `values` and `at`; for work
            that ran `n`, `ran`, the number of the call `of` that queued it, and `bytes`
            as `[start, end)`.
        """
        names = Names()
        threads: dict[int, int] = {}
        records: list[dict[str, Any]] = []
        for position, entry in enumerate(tuple(self._entries)):
            if len(entry) == 4:
                call, kind, start, nbytes = entry
                span = [start, start + nbytes]
                records.append({"n": position, "ran": kind, "of": call, "bytes": span})
                continue
            number, thread, name, args, result, site = entry
            row = SURFACE[name]
            code = int(result[0])
            given = zip(row.parameters, args, strict=True)
            shown = {label: names.show(kind, value) for (label, kind), value in given}
            if not code:
                names.learn(name, args, result[1:])
            values = zip(row.results, result[1:], strict=True)
            records.append(
                {
                    "n": position,
                    "call": name,
                    "number": number,
                    "thread": threads.setdefault(thread, len(threads)),
                    "args": shown,
                    "result": CUresult(code).name,
                    "values": [names.show(kind, value) for kind, value in values],
                    "at": f"{site[0][0].co_filename.rsplit('/', 1)[-1]}:{site[0][1]}"
                    if site
                    else "",
                }
            )
        return records

    def lines(self) -> Iterable[str]:
        """The entries as JSON, one a line."""
        return (json.dumps(record) for record in self.records())

    def calls(self) -> list[str]:
        """The calls alone, thread by thread, as `call(args) -> result values`.

        Queries that answered "not ready" are left out: how often a program asks is a
        matter of speed and not of what it does.
        """
        by_thread: dict[int, list[str]] = {}
        for record in self.records():
            if "call" not in record:
                continue
            if record["call"] in _POLLS and record["result"] == "CUDA_ERROR_NOT_READY":
                continue
            args = ", ".join(str(value) for value in record["args"].values())
            values = " ".join(str(value) for value in record["values"])
            text = f"{record['call']}({args}) -> {record['result']} {values}".rstrip()
            by_thread.setdefault(record["thread"], []).append(text)
        return [f"{thread}: {text}" for thread, texts in by_thread.items() for text in texts]


def compare(left: Journal, right: Journal) -> list[str]:
    """The calls in which two runs of one program differ.

    Args:
        left: One run, on a fake or on a real driver.
        right: The other.

    Returns:
        Lines of a unified diff; none if the runs made the same calls.
    """
    return list(
        difflib.unified_diff(left.calls(), right.calls(), "left", "right", lineterm="", n=1)
    )
