"""What a row of the conformance suite is, and the list of all of them."""

from collections.abc import Callable
from dataclasses import dataclass

from fakecuda.conformance.subject import Subject

Body = Callable[[Subject], str]


@dataclass(frozen=True)
class Row:
    """One fact of the driver's contract.

    Attributes:
        name: Its stable name.
        fact: The fact in a sentence.
        allowed: The outcomes that the contract allows.
        body: The program that finds the outcome.
        alone: It runs in a process of its own on a real driver, because it needs an
            untouched driver or may harm the process.
        one_sided: Why it does not run on a real driver; empty if it does.
    """

    name: str
    fact: str
    allowed: tuple[str, ...]
    body: Body
    alone: bool
    one_sided: str


ROWS: dict[str, Row] = {}
"""Every row by name, in the order of the contract."""


def row(*allowed: str, alone: bool = False, one_sided: str = "") -> Callable[[Body], Body]:
    """Make a row of a function; its name and docstring are the row's.

    Args:
        allowed: The outcomes that the contract allows; the first is the usual one.
        alone: Whether it needs a process of its own on a real driver.
        one_sided: Why it cannot run on a real driver.
    """

    def add(body: Body) -> Body:
        name = body.__name__.replace("_", "-")
        if name in ROWS:
            raise ValueError(f"two rows are named {name}")
        fact = (body.__doc__ or "").strip().rstrip(".")
        ROWS[name] = Row(name, fact, allowed, body, alone, one_sided)
        return body

    return add
