"""What a load hands out: the tensors by name, and what is known of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self, SupportsIndex

from weightload.errors import CopyError

if TYPE_CHECKING:
    from contextlib import ExitStack

    from weightload.report import LoadReport


class Loaded(Mapping[str, Any]):
    """The tensors of one load, by name.

    On a GPU the values are torch tensors on that device. With a driver given by the
    caller they are `DeviceTensor`, whose memory `close` frees.

    Attributes:
        report: what happened, in numbers.
        manifest: digest of each tensor's bytes, by name; empty without `verify`.
    """

    def __init__(
        self,
        tensors: dict[str, Any],
        report: LoadReport,
        manifest: dict[str, str],
        closing: ExitStack,
    ) -> None:
        self._tensors = tensors
        self.report = report
        self.manifest = manifest
        self._closing = closing

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - torch.Tensor or DeviceTensor
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __enter__(self) -> Self:
        return self

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        """Refuse to be copied or pickled.

        Raises:
            CopyError: always.
        """
        raise CopyError(
            "a load owns memory on a device and cannot be copied or pickled; copy the tensors "
            "that are needed, or load again where they are needed."
        )

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the tensors; a second call does nothing.

        torch tensors that the caller kept stay valid; `DeviceTensor` memory is freed.
        """
        self._tensors = {}
        self._closing.close()
