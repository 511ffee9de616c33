"""Result codes that know whether anybody looked at them.

The driver tells of a failure only in the value that a call returns. A program that
drops it cannot be caught by what it does next, which may look perfectly normal; so
the fake's error answers note the first comparison, and complain when they are
thrown away without one.
"""

from collections.abc import Callable
from typing import Any

from fakecuda.enums import CUresult


class Answer(int):
    """An error code of the fake: equal to the `CUresult` of its value.

    Args:
        code: The code.
        dropped: Called when nobody looked at it.
    """

    _looked: bool
    _code: CUresult
    _dropped: Callable[[], None]

    def __new__(cls, code: CUresult, dropped: Callable[[], None]) -> "Answer":  # noqa: PYI034
        """Make an answer that nobody has looked at yet."""
        self = super().__new__(cls, code)
        self._code, self._dropped, self._looked = code, dropped, False
        return self

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """`isinstance(answer, CUresult)` holds, as it does for the real binding's."""
        return CUresult

    def _look(self) -> CUresult:
        self._looked = True
        return self._code

    @property
    def name(self) -> str:
        """The code's name."""
        return self._look().name

    @property
    def value(self) -> int:
        """The code's number."""
        return self._look().value

    def __eq__(self, other: object) -> bool:
        return int(self._look()) == other

    def __ne__(self, other: object) -> bool:
        return int(self._look()) != other

    def __hash__(self) -> int:
        return hash(self._look())

    def __bool__(self) -> bool:
        return bool(self._look())

    def __int__(self) -> int:
        return int(self._look())

    def __index__(self) -> int:
        return int(self._look())

    def __repr__(self) -> str:
        return repr(self._look())

    def __str__(self) -> str:
        return str(self._look())

    def __format__(self, spec: str) -> str:
        return format(self._look(), spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return CUresult, (int(self._look()),)

    def __del__(self) -> None:
        if not self._looked:
            self._dropped()
