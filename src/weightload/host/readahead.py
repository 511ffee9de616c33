"""Reading the next layers into the page cache while the current ones upload.

Bounded twice: never more than so many layers beyond the one that is being brought, and
never more than so many bytes. Zero layers is nothing at all: no thread, no read. The
pages are read, not advised, because the kernel clips read-ahead advice to the device's
own small window.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal, Self

from weightload.errors import ReadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weightload.checkpoint.folder import Shard
    from weightload.host.system import System
    from weightload.layers import Interval

_PIECE_BYTES = 1 << 20


class ReadAhead:
    """A thread that stays a bounded distance ahead of the upload; a context manager.

    Args:
        system: the operating system's seam.
        shards: the shards that intervals count.
        intervals: the layers, in loading order.
        layers: how many layers beyond the current one may be read.
        bytes_max: how many bytes beyond the current layer may be read.
    """

    def __init__(
        self,
        system: System,
        shards: Sequence[Shard],
        intervals: Sequence[Interval],
        layers: int,
        bytes_max: int,
    ) -> None:
        self._system = system
        self._shards = shards
        self._intervals = intervals
        self._layers = layers
        self._bytes_max = bytes_max
        self._moved = threading.Condition()
        self._current = 0
        self._stopped = False
        self._error: ReadError | None = None
        self.read_bytes = 0
        self._thread = threading.Thread(target=self._run, name="weightload-read-ahead")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop and join the thread; its error is raised unless another one is on its way."""
        with self._moved:
            self._stopped = True
            self._moved.notify()
        self._thread.join()
        if self._error is not None and kind is None:
            raise self._error

    def advance(self, shard: Shard, offset: int) -> None:
        """Say that the upload has come to this byte of this shard."""
        with self._moved:
            while self._current + 1 < len(self._intervals):
                following = self._intervals[self._current + 1]
                ours = self._shards.index(shard)
                if (following.shard, following.start) > (ours, offset):
                    break
                self._current += 1
            self._moved.notify()

    def _run(self) -> None:
        try:
            scratch = memoryview(bytearray(_PIECE_BYTES))
            # The upload reads the first layer itself.
            for number in range(1, len(self._intervals)):
                if not self._read_layer(number, scratch):
                    return
        except ReadError as error:
            self._error = error

    def _read_layer(self, number: int, scratch: memoryview) -> bool:
        """Read one layer piece by piece; False when the load is over."""
        interval = self._intervals[number]
        position = interval.start
        while position < interval.end:
            nbytes = min(_PIECE_BYTES, interval.end - position)
            answer = self._wait_for_room(number, position + nbytes)
            if answer != "read":
                return answer == "skip"
            self._read(interval, position, scratch[:nbytes])
            position += nbytes
        return True

    def _wait_for_room(self, number: int, end: int) -> Literal["read", "skip", "stop"]:
        """Wait until reading the layer up to `end` keeps both bounds."""
        with self._moved:
            while not self._stopped:
                if number <= self._current:
                    # The upload has come to this layer and reads the rest of it itself.
                    return "skip"
                between = self._intervals[self._current + 1 : number]
                ahead = end - self._intervals[number].start
                ahead += sum(layer.end - layer.start for layer in between)
                if number <= self._current + self._layers and ahead <= self._bytes_max:
                    return "read"
                self._moved.wait()
        return "stop"

    def _read(self, interval: Interval, position: int, target: memoryview) -> None:
        shard = self._shards[interval.shard]
        try:
            got = self._system.read(shard.descriptor, target, position)
        except OSError as error:
            raise ReadError(
                f"{shard.name} could not be read ahead at byte {position}: {error.strerror}; "
                f"check the disk."
            ) from error
        self.read_bytes += got
