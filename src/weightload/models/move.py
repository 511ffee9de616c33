"""`move_model`: a model that is on the CPU, moved through the ring.

A module's own `to` copies tensor by tensor from pageable memory, which on a GB10 also
faults page by page. Here each storage is brought once, however many parameters, buffers
and views share it, and every tensor object stays the one that it was: ties hold, and so
does what an optimiser refers to.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from weightload.device.profile import parse_ordinal
from weightload.errors import UsageError
from weightload.host.touch import spanned_bytes
from weightload.memory import HostMemory, load_memory
from weightload.models.check import count_copies
from weightload.models.report import ModelReport
from weightload.models.weights import read_back

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from weightload.host.system import System
    from weightload.report import LoadReport

# The largest element, so that every dtype's elements stay aligned in a piece.
_PIECE_ALIGNMENT_BYTES = 16


class _Piece(NamedTuple):
    """The part of one storage that the model's tensors span."""

    memory: HostMemory
    start: int
    tensors: tuple[torch.Tensor, ...]


def move_model(
    model: Any,  # noqa: ANN401 - any torch module; transformers' have no types
    *,
    device: str | int | torch.device = "cuda",
    progress: Callable[[int, int], None] | None = None,
    threads: int | None = None,
    driver: Any = None,  # noqa: ANN401 - the binding publishes no types
    system: System | None = None,
) -> Any:  # noqa: ANN401 - see above
    """Move a module from the CPU to a device through the ring.

    Gradients go with their parameters. What is on the device already stays; what the ring
    cannot bring (sparse, quantised and other tensors that are more than their bytes) is
    moved by the module's own `to`, and the report says so.

    Args:
        model: the module; it is changed in place.
        device: `cuda`, `cuda:1`, or the ordinal.
        progress: as for `weightload.load`.
        threads: threads that copy within memory; None chooses.
        driver: as for `weightload.load`. The bytes are then read back from that device
            into a model on the CPU.
        system: as for `weightload.load`.

    Returns:
        The module, with a `ModelReport` at its `weightload_report`; its bytes are counted
        as the route `host`.

    Raises:
        UsageError: this is no module, or a parameter or buffer has no data, being on the meta
            device or having lost it.
        WeightloadError: as for `weightload.load`; the module is then as it was.
    """
    _check_module(model)
    report = ModelReport(family=str(getattr(getattr(model, "config", None), "model_type", "")))
    where = f"cuda:{parse_ordinal(str(device))}"
    target = torch.device("cpu" if driver is not None else where)
    with report.phase("total"):
        named = dict(_tensors(model))
        _check_data(named)
        plain = {name: each for name, each in named.items() if _is_plain(each)}
        _check_storages(plain)
        pieces = _pieces(plain)
        loaded = load_memory(
            [piece.memory for piece in pieces],
            device=where,
            progress=progress,
            threads=threads,
            driver=driver,
            system=system,
        )
        with loaded:
            report.load = loaded.report
            brought: Mapping[str, torch.Tensor] = (
                dict(loaded) if driver is None else read_back(driver, where, loaded)
            )
        _note_others(report.load, named, plain, target)
        with _as_it_was(model, named.values()):
            _place(pieces, brought)
            # Empty tensors, those that are no plain bytes, and what modules do on a move.
            model.to(target)
            count_copies(model, brought, report)
            model.weightload_report = report
    return model


def _check_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{model!r} is no module of torch; give a model.")


@contextmanager
def _as_it_was(model: Any, tensors: Iterable[torch.Tensor]) -> Iterator[None]:  # noqa: ANN401 - as move_model's
    """Give a module back its own tensors if the body fails."""
    data = [(tensor, tensor.data) for tensor in tensors]
    buffers = [(module, dict(module.named_buffers(recurse=False))) for module in model.modules()]
    try:
        yield
    except BaseException:
        for tensor, before in data:
            tensor.data = before
        for module, own in buffers:
            for name, buffer in own.items():
                setattr(module, name, buffer)
        raise


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter, gradient and buffer that has a shape yet, once each."""
    shaped = ((name, each) for name, each in model.named_parameters() if _has_shape(each))
    for name, parameter in shaped:
        yield name, parameter
        if parameter.grad is not None:
            yield f"{name}.grad", parameter.grad
    yield from ((name, each) for name, each in model.named_buffers() if _has_shape(each))


def _has_shape(tensor: torch.Tensor) -> bool:
    return not is_lazy(tensor)


def _check_data(named: Mapping[str, torch.Tensor]) -> None:
    without = [name for name, tensor in named.items() if tensor.is_meta]
    if without:
        raise UsageError(
            f"{without[0]} has no data, being on the meta device"
            + (f", like {len(without) - 1} more" if len(without) > 1 else "")
            + "; load the weights first."
        )


def _check_storages(plain: Mapping[str, torch.Tensor]) -> None:
    """Check that every tensor's bytes are there: a sharded one's may have been given back."""
    for name, tensor in plain.items():
        if spanned_bytes(tensor)[1] > tensor.untyped_storage().nbytes():
            raise UsageError(
                f"{name} has lost its data, as a shard that was given back has; gather the "
                f"weights first."
            )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the CPU, has elements, and is no more than their bytes."""
    return (
        type(tensor) in {torch.Tensor, torch.nn.Parameter}
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and not tensor.is_inference()
    )


def _pieces(plain: Mapping[str, torch.Tensor]) -> list[_Piece]:
    """One piece per storage."""
    sharing: dict[int, list[str]] = {}
    for name, tensor in plain.items():
        sharing.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    pieces = []
    for base, names in sharing.items():
        tensors = tuple(plain[name] for name in names)
        spans = [spanned_bytes(tensor) for tensor in tensors]
        start = min(first for first, _ in spans)
        start -= start % _PIECE_ALIGNMENT_BYTES
        nbytes = max(end for _, end in spans) - start
        pieces.append(_Piece(HostMemory(names[0], base + start, nbytes), start, tensors))
    return pieces


def _place(pieces: Sequence[_Piece], brought: Mapping[str, torch.Tensor]) -> None:
    """Point every tensor at its bytes' new place."""
    placed = []
    for piece in pieces:
        raw = brought[piece.memory.name]
        for tensor in piece.tensors:
            first = raw.storage_offset() - piece.start
            first += tensor.storage_offset() * tensor.element_size()
            view = torch.empty(0, dtype=tensor.dtype, device=raw.device).set_(
                raw.untyped_storage(),
                first // tensor.element_size(),
                tensor.size(),
                tensor.stride(),
            )
            placed.append((tensor, view))
    for tensor, view in placed:
        tensor.data = view


def _note_others(
    report: LoadReport,
    named: Mapping[str, torch.Tensor],
    plain: Mapping[str, torch.Tensor],
    target: torch.device,
) -> None:
    report.fallbacks += [
        f"{name}: moved by the module's own `to`, not through the ring"
        for name, tensor in named.items()
        if name not in plain and tensor.numel() and tensor.device != target
    ]
