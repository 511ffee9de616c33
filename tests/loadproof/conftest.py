"""Checkpoints and loaders that are small enough for a leg to take a fraction of a second."""

from __future__ import annotations

import textwrap
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from fixtures.checkpoints import Tensor, write_checkpoint
from loadproof.measure.messages import Request
from loadproof.measure.template import Template
from loadproof.plan.identity import package_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path


TENSORS = (
    Tensor("embed", "BF16", (64, 32)),
    Tensor("bias", "F32", (7,)),
    Tensor("scale", "F32", ()),
    Tensor("empty", "F16", (0, 4)),
    Tensor("head", "I64", (33, 5)),
)


def _small_checkpoint(folder: Path) -> Path:
    write_checkpoint(folder, [TENSORS], seed=11)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with five tensors of random bytes, one of them empty and one a scalar."""
    return _small_checkpoint(tmp_path / "checkpoint")


@pytest.fixture(scope="module")
def kept_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same folder, for trials that several tests look at."""
    return _small_checkpoint(tmp_path_factory.mktemp("kept") / "checkpoint")


class Lent:
    """A template that whoever borrows it cannot end."""

    def __init__(self, template: Template) -> None:
        self.fork = template.fork

    def close(self) -> None:
        """Do nothing: others fork from it too."""


@pytest.fixture(scope="module")
def kept_templates() -> Iterator[None]:
    """Let all legs of a module be forked from the same processes.

    Starting one takes longer than a small leg, and with transformers longer than a small trial.
    Whoever asks for other modules or another environment gets another process, as ever.
    """
    kept: dict[object, Template] = {}

    def lend(modules: Sequence[str], environment: Mapping[str, str] | None = None) -> Lent:
        asked = (tuple(modules), frozenset((environment or {}).items()))
        if asked not in kept:
            kept[asked] = closing.enter_context(Template(modules, environment))
        return Lent(kept[asked])

    with ExitStack() as closing, pytest.MonkeyPatch.context() as patch:
        # They have what the harness gives them, and not what the tests gave themselves.
        patch.delenv("OMP_WAIT_POLICY")
        patch.setattr("loadproof.measure.legs.Template", lend)
        patch.setattr("fixtures.legs.Template", lend)
        yield


@pytest.fixture
def stub(tmp_path: Path, checkpoint: Path) -> Callable[..., Request]:
    """Make a request for a leg whose loader is the given source of ``stubloader``."""

    def make(source: str, **changes: object) -> Request:
        package = tmp_path / "site" / "stubloader"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(textwrap.dedent(source))
        values: dict[str, object] = {
            "kind": "time",
            "site": str(package.parent),
            "entry": "stubloader:load",
            "digest": package_digest(package),
            "checkpoint": str(checkpoint),
            "device": "fake",
        }
        return Request(**(values | changes))  # type: ignore[arg-type] # a test's shorthand

    return make
