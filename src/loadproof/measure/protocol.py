"""The protocol of a loader that is a program: one JSON object a line, in any language.

    harness  hello     which device; the loader imports, makes its context, and allocates nothing
    loader   ready     who it is
    harness  load      the checkpoint, told only now: the clock runs from here
    loader   loaded    where every tensor is: the clock stops when this line has been read
    harness  release   the bytes were looked at; free them
    loader   bye       and end with status 0

The harness writes to the program's standard input and reads its standard output; standard error
is free.  ``error`` may stand in the place of any answer.  An unknown field is refused: nothing
that a loader says is passed over.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec

from loadproof.measure.ground_truth import DTYPE_BITS
from loadproof.measure.messages import LoaderIdentity

VERSION = 1
# What a loader without a GPU is told as its device.
SHARED_MEMORY = "shared-memory"

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Hello(msgspec.Struct, frozen=True, tag="hello", kw_only=True):
    """The harness begins.

    Attributes:
        protocol: The version that is spoken.
        device: ``cuda:<ordinal>``, or ``shared-memory`` where there is no GPU.
    """

    protocol: int = VERSION
    device: str


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True, forbid_unknown_fields=True):
    """The loader has brought up all that is not the load: its imports and its context.

    Attributes:
        protocol: The version that it speaks.
        loader: Who it is, for the receipt.
    """

    protocol: int
    loader: LoaderIdentity


class Load(msgspec.Struct, frozen=True, tag="load", kw_only=True):
    """The harness asks for the load; its clock runs.

    Attributes:
        checkpoint: Folder or file of safetensors.
        options: What the project's file and the command line give the loader.
        deadline_s: After this the leg is killed; it began a little before.
    """

    checkpoint: str
    options: dict[str, Any]
    deadline_s: float


class SharedMemory(
    msgspec.Struct,
    frozen=True,
    tag_field="kind",
    tag="shared-memory",
    kw_only=True,
    forbid_unknown_fields=True,
):
    """A stretch of shared memory that stands for a device's.

    Attributes:
        path: A file in ``/dev/shm``, or a memfd as ``/proc/<pid>/fd/<number>``; the harness maps
            it to read and to write.
        nbytes: Its length.
    """

    path: str
    nbytes: _Count


class CudaIpc(
    msgspec.Struct,
    frozen=True,
    tag_field="kind",
    tag="cuda-ipc",
    kw_only=True,
    forbid_unknown_fields=True,
):
    """One allocation of device memory.

    Attributes:
        handle: The 64 bytes of cuIpcGetMemHandle, in base64; the memory has to come from
            cuMemAlloc or cudaMalloc.
        nbytes: Length of the allocation, from its own first byte.
    """

    handle: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    nbytes: _Count


Memory = SharedMemory | CudaIpc


class PlacedTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor, contiguous.

    Attributes:
        name: As in the files.
        dtype: By the name that safetensors gives it, such as ``BF16``.
        shape: Elements along each axis.
        nbytes: Length in bytes.
        memory: Which entry of ``memory`` it lies in, from 0.
        offset: Its first byte there.
    """

    name: str
    dtype: str
    shape: tuple[_Count, ...]
    nbytes: _Count
    memory: _Count
    offset: _Count


class Loaded(msgspec.Struct, frozen=True, tag="loaded", kw_only=True, forbid_unknown_fields=True):
    """The loader has every byte where it belongs, and nothing is under way any more.

    Attributes:
        memory: The memory that the tensors lie in; it stays until ``release``.
        tensors: All of them.
        route_bytes: Bytes by the name of the way they took, for coverage; may be left out.
    """

    memory: tuple[Memory, ...]
    tensors: tuple[PlacedTensor, ...]
    route_bytes: dict[str, _Count] = {}


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The harness has seen all it wants to see."""


class Bye(msgspec.Struct, frozen=True, tag="bye", forbid_unknown_fields=True):
    """The memory is given back; the process ends with status 0."""


class Error(msgspec.Struct, frozen=True, tag="error", forbid_unknown_fields=True):
    """The loader cannot do it.

    Attributes:
        message: Why, in one sentence.
    """

    message: str


Asked = Hello | Load | Release
Answer = Ready | Loaded | Bye | Error


def misplaced(loaded: Loaded) -> str | None:
    """Say what is wrong with where a loader says its tensors are, if anything is."""
    seen = set()
    for each in loaded.tensors:
        bits = DTYPE_BITS.get(each.dtype)
        if each.name in seen:
            return f"tensor {each.name!r} is there twice"
        if bits is None:
            return f"tensor {each.name!r} has no dtype of safetensors: {each.dtype!r}"
        if bits * math.prod(each.shape) != 8 * each.nbytes:
            return f"tensor {each.name!r} has not the length of its dtype and shape"
        if each.memory >= len(loaded.memory):
            return f"tensor {each.name!r} lies in memory {each.memory}, which is not there"
        if each.offset + each.nbytes > loaded.memory[each.memory].nbytes:
            return f"tensor {each.name!r} reaches past the end of its memory"
        seen.add(each.name)
    return None


def json_schema() -> dict[str, Any]:
    """Return the JSON Schemas of all messages: what the harness says, and what a loader may."""
    (asked, answer), definitions = msgspec.json.schema_components(
        (Asked, Answer), ref_template="#/$defs/{name}"
    )
    return {"harness": asked, "loader": answer, "$defs": definitions}
