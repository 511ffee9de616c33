"""One suite for the fake and for real drivers: each row one fact of the contract.

A row is a small program against a driver and ends in an outcome, a short text. The
same body runs on the fake and on a GPU; only how a stream is held differs. What a
GPU answers is right; a fake or a contract that says otherwise is to be mended.
"""

from fakecuda.conformance import contexts, copies, memory, streams
from fakecuda.conformance.row import ROWS, Row
from fakecuda.conformance.subject import FakeSubject, RealSubject, Subject
from fakecuda.conformance.when import when_rows_ran

__all__ = [
    "ROWS",
    "FakeSubject",
    "RealSubject",
    "Row",
    "Subject",
    "contexts",
    "copies",
    "memory",
    "streams",
    "when_rows_ran",
]
