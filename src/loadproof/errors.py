"""Every error a person can meet here: one sentence, and the exit status it ends with.

The command line prints the sentence and exits with the status; it never prints a traceback
for these.  Anything else that escapes is a defect of ours and does show one.
"""

from __future__ import annotations

from typing import ClassVar


class LoadproofError(Exception):
    """Base of the errors below; ``str(error)`` is one sentence that says what to do.

    Attributes:
        exit_status: What the command line ends with (see ``loadproof.cli``).
    """

    exit_status: ClassVar[int] = 2


class PolicyError(LoadproofError):
    """A policy is unknown, malformed or asks for something that cannot be."""


class CheckpointError(LoadproofError):
    """The checkpoint cannot be used: missing, incomplete, truncated or not safetensors."""


class ArmError(LoadproofError):
    """An arm cannot be made: an unknown revision, a dirty checkout, a failed installation."""


class DeviceError(LoadproofError):
    """The device that was asked for is not here, or is not what it was asked to be."""


class OutputError(LoadproofError):
    """What a run would leave cannot be written where it was asked for; found before the run."""


class ServingError(LoadproofError):
    """A model cannot be served: no config, no such class, kernels or code that are not here."""


class LegError(LoadproofError):
    """A leg did not end with a result: it raised, was killed, or spoke no sense."""

    exit_status = 3


class ReceiptError(LoadproofError):
    """A receipt cannot be written, read or believed."""

    exit_status = 3
