"""Host-to-device copies of one load, all on one stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightload.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightload.device.driver import Driver
    from weightload.plan import Span


class Copies:
    """The stream, and what is known of the copies on it.

    Attributes:
        call: the driver's seam.
        stream: a stream of our own, which torch's streams do not wait for.
        unfinished: the stream's end could not be awaited, so that a copy may still run and
            neither end of it may be freed.
    """

    def __init__(self, driver: Driver, stream: int) -> None:
        self.call = driver.call
        self.stream = stream
        self.unfinished = False

    def queue(self, span: Span, source: int, addresses: Sequence[int]) -> None:
        """Queue a span's copies.

        Args:
            span: what to copy.
            source: host address of the span's first byte.
            addresses: device address of each tensor's first byte.

        Raises:
            DriverError: a copy could not be queued.
        """
        for piece in span.slices:
            self.call(
                "cuMemcpyHtoDAsync",
                addresses[piece.tensor] + piece.tensor_offset,
                source + piece.slot_offset,
                piece.nbytes,
                self.stream,
            )

    def finish(self) -> None:
        """Wait for every copy on the stream.

        Raises:
            DriverError: they cannot be awaited; `unfinished` says so from now on.
        """
        try:
            self.call("cuStreamSynchronize", self.stream)
        except DriverError:
            self.unfinished = True
            raise
