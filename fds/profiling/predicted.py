"""The memory of a step on one rank, by formula: what `describe` says, put together to a peak."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from fds import _html, loss as losses
from fds.collectives.planned import planned
from fds.errors import FdsError, checked_call, is_a
from fds.optim import Optimizer
from fds.profiling.peaks import leaves_of
from fds.state import State
from fds.step import Step, Transform, compose
from fds.step.composition import Composition
from fds.step.describe import describe

_STATE = ("params", "opt", "buffers", "slots")


@attrs.frozen
class MemoryEstimate:
    """Bytes that a rank holds; all but `dry_run` are without activations and temporaries of the loss.

    Attributes:
        state: part -> bytes of the state between steps, wherever they live.
        elsewhere: place ("host", "disk /nvme") -> bytes of the state that live there; empty where all is on the device.
        step: what a step needs beside it -> bytes: `next state`, into which a step writes that does not donate;
            `returned`, gradients that autograd has returned and that are not summed yet; `gradients`, `buckets`,
            `whole` and the others as in `Step.describe`.
        sent: station -> bytes that the rank sends in a step.
        dry_run: bytes on the device at the peak of a call, activations and batch included, found by running it without
            arithmetic and without touching memory; None where there is no batch, or a step cannot be run so.
        no_dry_run: why it cannot: on a GPU, or what the dry run raised; empty where there is no batch.
    """

    state: Mapping[str, int]
    elsewhere: Mapping[str, int]
    step: Mapping[str, int]
    sent: Mapping[str, int]
    dry_run: int | None = None
    no_dry_run: str = ""

    @property
    def between(self) -> int:
        """Bytes on the device between steps, of the state alone."""
        return sum(self.state.values()) - sum(self.elsewhere.values())

    @property
    def peak(self) -> int:
        """Bytes on the device at the peak of a step, without activations."""
        return self.between + sum(self.step.values())

    def __str__(self) -> str:
        return "\n".join(f"{name:<12} {n:>20,} bytes {words}".rstrip() for name, n, words in self._rows())

    def _repr_html_(self) -> str:
        rows = [(name, f"{n:,}", "bytes", words) for name, n, words in self._rows()]
        return _html.box("Memory of a rank", _html.table(rows, right=(1,)))

    def _rows(self) -> list[tuple[str, int, str]]:
        rows = [(name, n, "of the state") for name, n in self.state.items() if n]
        rows += [(name, n, "of the state") for name, n in self.elsewhere.items()]
        rows += [("between", self.between, "on the device between steps")]
        rows += [(name, n, "in a step") for name, n in self.step.items() if n]
        rows += [("peak", self.peak, "on the device in a step, without activations")]
        if self.dry_run is not None:
            rows += [("dry run", self.dry_run, "on the device in a step, with activations")]
        return rows + [(name, n, "sent a step") for name, n in self.sent.items()]


def predicted(step: Step, state: State, dry_run: int | None = None, no_dry_run: str = "") -> MemoryEstimate:
    """Return what a rank holds in a step with such a state, of `meta` tensors too; the others are the record's."""
    told = describe(step, state, None)
    held = {part: told.num_bytes[part] for part in _STATE}
    elsewhere = {where: n for where, n in told.places.items() if where != "device"}
    within = {name: n for name, n in told.num_bytes.items() if name not in _STATE and name != "graphs"}
    if not step.place.donate:
        within = {
            "next state": sum(x.nbytes for x, written, there in leaves_of(step, state) if written and there),
            **within,
        }
    within["returned"] = _returned(step, state)
    return MemoryEstimate(held, elsewhere, within, told.sent, dry_run, no_dry_run)


def _returned(step: Step, state: State) -> int:
    """Return the bytes of gradients that autograd has returned, and that are not summed yet.

    Where the sum has another dtype those of a whole microbatch, else one, where there is something to add it to.
    """
    structure, _ = step.structure_of(state.params)
    leaves = [structure.leaves[name] for name in structure.trained_names]
    seen = {leaf.name: step.gather.dtype_of(leaf.name, leaf.dtype) for leaf in leaves}
    sizes = {leaf.name: leaf.numel * seen[leaf.name].itemsize for leaf in leaves}
    if step.shard is None:
        cast = [
            n
            for leaf, n in zip(leaves, sizes.values(), strict=True)
            if (step.sum.dtype or seen[leaf.name]) != seen[leaf.name]
        ]
        if cast or step.split.num_microbatches == 1:
            return sum(cast)
    elif step.shard.reduces_each_microbatch:
        return 0
    return max(sizes.values(), default=0)


@checked_call
def estimate_memory(
    composition: Any, params: Any, *, mesh: Mapping[str, int] | None = None, rank: int = 0, device: Any = "cpu"
) -> MemoryEstimate:
    """Estimate what one of many ranks holds without activations, before anything is built and without running them.

    Nothing is allocated: shapes are read on `meta`. Activations, the batch and temporaries of the loss are not
    in it, which of many rows are most of what a rank holds: `fds.profile_memory` measures them, and predicts them.

    Args:
        composition: `fds.compose(...)`, or an optimizer; or a function of the mesh that returns one, as
            `lambda mesh: fds.compose(fds.shard_optimizer(mesh["dp"], stage=3), fds.adamw(1e-4))`, or
            `lambda mesh: fds.compose(*config.transforms(mesh))` of a `TrainingConfig`.
        params: `Layers`, a module, a recipe, or a tree of tensors, which may be on `meta`.
        mesh: the size of every axis, as `{"pp": 4, "dp": 16}`, beside a function of it; None for one rank.
        rank: which of them.
        device: on which it would run: on "cuda" what lives on the host is read in chunks.

    Raises `FdsError` for other values of these, `MeshError` for sizes and ranks that do not fit, and what `compose` and
    `step.structure` raise.
    """
    sizes = {"dp": 1} if mesh is None else mesh
    if not isinstance(sizes, Mapping) or not sizes:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise FdsError("not sizes of axes", where="mesh", got=repr(mesh)[:80], want='{"dp": 8}, or {"pp": 2, "dp": 4}')
    try:
        where = torch.device(device)
    except (RuntimeError, TypeError):
        raise FdsError("not a device", where="device", got=repr(device)[:80], want='"cpu" or "cuda"') from None
    loss, shapes = _read(params)
    if mesh is not None and is_a(composition, Composition | Transform | Optimizer):
        raise FdsError(
            "what is composed already has the axes that it was given",
            where="mesh",
            got=repr(mesh)[:80],
            want='a function of the mesh: lambda mesh: fds.compose(fds.shard_optimizer(mesh["dp"], stage=3), ...)',
        )
    with planned(sizes, rank) as ranks:
        made = composition
        if not is_a(made, Composition | Transform | Optimizer | Step) and isinstance(made, Callable):
            made = made(ranks)
        if not is_a(made, Composition | Transform | Optimizer):
            json_ = "of a JSON: lambda mesh: fds.compose(*config.transforms(mesh))"
            raise FdsError(
                "there is nothing to estimate the memory of",
                where="composition",
                got=repr(made)[:80],
                want="fds.compose(...), or a function of the mesh that returns one",
                hint="step.composition" if is_a(made, Step) else json_,
            )
        step = compose(made)(loss)
        state = step.structure(shapes)
        with contextlib.nullcontext() if where.type == "cpu" else torch.device(where.type, where.index or 0):
            return predicted(step, state)


def _read(params: Any) -> tuple[Any, Any]:
    """Return a loss of these parameters, which is never run, and what `step.structure` takes."""
    if is_a(params, losses.Layers):
        return params, params.init
    if is_a(params, nn.Module):
        params = {name: p.detach().to("meta") for name, p in params.named_parameters()}
    return _never_run, params


def _never_run(params: Any, batch: Any) -> Any:
    raise AssertionError("a composition is only described")
