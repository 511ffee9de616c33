"""One source for every "may" of the CUDA documentation.

Whenever the driver may do one of several things, the fake asks its choice source
for a number. Answer 0 is always the behaviour that is hardest on the caller (work
runs as late as it can), so the plain source is deterministic and strict. The
answers of a run, written down, replay it exactly: schedules are data.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class Choices(Protocol):
    """Anything that answers choices."""

    def pick(self, kind: str, options: int) -> int:
        """Choose one of `options` ways to go on, `0 <= answer < options`."""
        ...


class Late:
    """Always the first answer: nothing runs before something forces it."""

    def pick(self, kind: str, options: int) -> int:  # noqa: ARG002 - the protocol's shape
        """Answer 0."""
        return 0


class Seeded:
    """Seeded random answers with swarm weights.

    Each kind of choice draws, once a run, how eager it is: never, rarely, often or
    nearly always away from answer 0. Runs then differ in kind and not only in
    detail, which finds more than one uniform mixture does.

    Args:
        seed: Any text; a commit hash will do.
    """

    WEIGHTS = (0.0, 0.1, 0.5, 0.95)

    def __init__(self, seed: str | int) -> None:
        self._random = random.Random(str(seed))  # noqa: S311 - schedules are no secret
        self._seed = str(seed)
        self._weights: dict[str, float] = {}

    def pick(self, kind: str, options: int) -> int:
        """Answer 0, or by the weight of its kind one of the others."""
        weight = self._weights.get(kind)
        if weight is None:
            # Drawn from the kind's own stream, so that a new kind elsewhere does not shift it.
            weight = random.Random(f"{self._seed}/{kind}").choice(self.WEIGHTS)  # noqa: S311
            self._weights[kind] = weight
        if self._random.random() >= weight:
            return 0
        return self._random.randrange(1, options)


class AsSeen:
    """What one device was seen to do, and the first answer where nothing is known.

    Args:
        seen: By kind of choice, the answer that was seen; a profile has such a table.
    """

    def __init__(self, seen: Mapping[str, int]) -> None:
        self._seen = seen

    def pick(self, kind: str, options: int) -> int:
        """Answer as seen."""
        answer = self._seen.get(kind, 0)
        return answer if answer < options else 0


class Replay:
    """The answers of an earlier run, then 0 for ever.

    Args:
        trail: What `Trail.text` printed.

    Raises:
        ValueError: The text is no trail.
    """

    def __init__(self, trail: str) -> None:
        self._answers = parse_trail(trail)
        self._next = 0

    def pick(self, kind: str, options: int) -> int:
        """Answer as the earlier run did."""
        if self._next >= len(self._answers):
            return 0
        answer = self._answers[self._next]
        self._next += 1
        if answer >= options:
            raise ValueError(
                f"the trail does not fit this program: choice {self._next} ({kind}) has "
                f"{options} options and the trail says {answer}"
            )
        return answer


class Drawn:
    """Answers drawn by Hypothesis, so that a failing schedule shrinks.

    Args:
        draw: A function that draws an integer between 0 and its argument, both included.
    """

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw

    def pick(self, kind: str, options: int) -> int:  # noqa: ARG002 - the protocol's shape
        """Answer what was drawn."""
        return self._draw(options - 1)


class Trail:
    """A choice source that writes down what another one answers.

    Args:
        source: Who answers.
    """

    def __init__(self, source: Choices) -> None:
        self._source = source
        self.answers: list[int] = []
        self.options: list[int] = []

    def pick(self, kind: str, options: int) -> int:
        """Ask the source and remember the answer."""
        answer = self._source.pick(kind, options)
        self.answers.append(answer)
        self.options.append(options)
        return answer

    @property
    def text(self) -> str:
        """The answers so far, in the form that `Replay` reads."""
        return format_trail(self.answers)


def format_trail(answers: list[int]) -> str:
    """Write answers as text: one base-36 digit each, runs of zeros as `(count)`."""
    out: list[str] = []
    zeros = 0
    for answer in answers:
        if answer == 0:
            zeros += 1
            continue
        out.append(f"({zeros})" if zeros > 3 else "0" * zeros)
        zeros = 0
        out.append(_DIGITS[answer])
    # Trailing zeros are what a replay answers anyway.
    return "".join(out)


def parse_trail(text: str) -> list[int]:
    """Read what `format_trail` wrote.

    Raises:
        ValueError: The text holds anything else.
    """
    answers: list[int] = []
    rest = text
    while rest:
        if rest[0] == "(":
            count, closing, rest = rest[1:].partition(")")
            if not closing or not count.isdigit():
                raise ValueError(f"not a schedule: {text!r}")
            answers.extend([0] * int(count))
            continue
        if rest[0] not in _DIGITS:
            raise ValueError(f"not a schedule: {text!r}")
        answers.append(_DIGITS.index(rest[0]))
        rest = rest[1:]
    return answers


class _Prefix:
    """Given answers first, then 0."""

    def __init__(self, answers: list[int]) -> None:
        self._answers = answers
        self._next = 0

    def pick(self, kind: str, options: int) -> int:  # noqa: ARG002 - the protocol's shape
        answer = self._answers[self._next] if self._next < len(self._answers) else 0
        self._next += 1
        return answer


def every_schedule(limit: int | None = None) -> Iterator[Trail]:
    """Walk through all schedules of a deterministic program, depth first.

    Give each yielded source to a fresh fake, run the program to its end, and go on:

        for choices in every_schedule():
            with FakeCuda(choices=choices) as cu: ...

    Args:
        limit: Refuse to go beyond so many schedules; `None` walks them all.

    Yields:
        One source for each schedule.

    Raises:
        RuntimeError: There are more than `limit` schedules.
    """
    answers: list[int] = []
    count = 0
    while True:
        if count == limit:
            raise RuntimeError(f"more than {limit} schedules; make the model smaller")
        trail = Trail(_Prefix(answers))
        yield trail
        count += 1
        answers, options = trail.answers[:], trail.options
        while answers and answers[-1] + 1 >= options[len(answers) - 1]:
            answers.pop()
        if not answers:
            return
        answers[-1] += 1
