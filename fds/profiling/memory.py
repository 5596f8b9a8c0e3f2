"""The memory of a step on one rank: by formula (`estimate_memory`), and measured (`profile_memory`)."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from fds import _html, loss as losses
from fds.collectives import Mesh
from fds.collectives.meshes import planned
from fds.collectives.traffic import counting
from fds.errors import FdsError, checked_call, is_a
from fds.optim import Optimizer
from fds.profiling.modules import PHASES
from fds.profiling.peaks import BATCH, NEXT, STATE, Exchanges, leaves_of, of_dry_run, of_second_call
from fds.profiling.planned import of_planned
from fds.state import State
from fds.step import Step, Transform, compose
from fds.step.checks.state_check import usable
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


def predict(step: Step, state: State, dry_run: int | None = None, no_dry_run: str = "") -> MemoryEstimate:
    """Return what a rank holds in a step with such a state, of `meta` tensors too; the others are the record's."""
    description = describe(step, state, None)
    between = {part: description.num_bytes[part] for part in _STATE}
    elsewhere = {where: n for where, n in description.places.items() if where != "device"}
    within = {name: n for name, n in description.num_bytes.items() if name not in _STATE and name != "graphs"}
    if not step.place.donate:
        new = sum(x.nbytes for x, written, there in leaves_of(step, state) if written and there)
        within = {"next state": new, **within}
    within["returned"] = _count_returned(step, state)
    return MemoryEstimate(between, elsewhere, within, description.sent, dry_run, no_dry_run)


def _count_returned(step: Step, state: State) -> int:
    """Return the bytes of gradients that autograd has returned, and that are not summed yet.

    Where the sum has another dtype those of a whole microbatch, else one, where there is something to add it to.
    """
    structure, _ = step.structure_of(state.params)
    leaves = [structure.leaves[name] for name in structure.trained_names]
    dtypes = [step.gather.dtype_of(leaf.name, leaf.dtype) for leaf in leaves]
    sizes = [leaf.numel * dtype.itemsize for leaf, dtype in zip(leaves, dtypes, strict=True)]
    if step.shard is None:
        cast = [n for dtype, n in zip(dtypes, sizes, strict=True) if (step.sum.dtype or dtype) != dtype]
        if cast or step.split.num_microbatches == 1:
            return sum(cast)
    elif step.shard.reduces_each_microbatch:
        return 0
    return max(sizes, default=0)


@checked_call
def estimate_memory(
    composition: Any,
    params: Any,
    *,
    mesh: Mapping[str, int] | None = None,
    rank: int = 0,
    device: Any = "cpu",
    loss: Any = None,
    batch: Any = None,
) -> MemoryEstimate:
    """Estimate what one of many ranks holds, before anything is built and without running them.

    Nothing is allocated: shapes are read on `meta`. Without a batch, activations and temporaries of the loss are not
    in it, which of many rows are most of what a rank holds. With one, `dry_run` has all: the rank runs a call without
    arithmetic, in memory that nobody touches, and the others are taken to say what it says.

    Args:
        composition: `fds.compose(...)`, or an optimizer; or a function of the mesh that returns one, as
            `lambda mesh: fds.compose(fds.shard_optimizer(mesh["dp"], stage=3), fds.adamw(1e-4))`, or
            `lambda mesh: fds.compose(*config.transforms(mesh))` of a `TrainingConfig`.
        params: `Layers`, a module, a recipe, or a tree of tensors, which may be on `meta`.
        mesh: the size of every axis, as `{"pp": 4, "dp": 16}`, beside a function of it; None for one rank.
        rank: which of them.
        device: on which it would run: on "cuda" what lives on the host is read in chunks.
        loss: what the composition is applied to, where `params` are no `Layers`; needed with a batch.
        batch: the rank's own, for a dry run, which is one of a CPU.

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
    shapes = params
    if is_a(params, losses.Layers):
        loss, shapes = params if loss is None else loss, params.init
    elif is_a(params, nn.Module):
        shapes = {name: p.detach().to("meta") for name, p in params.named_parameters()}
    if batch is not None and loss is None:
        raise FdsError("a batch needs the loss that it is for", where="loss", want="loss=, or Layers for params")
    if mesh is not None and is_a(composition, Composition | Transform | Optimizer):
        raise FdsError(
            "what is composed already has the axes that it was given",
            where="mesh",
            got=repr(mesh)[:80],
            want='a function of the mesh: lambda mesh: fds.compose(fds.shard_optimizer(mesh["dp"], stage=3), ...)',
        )

    def make(ranks: Mesh) -> Step:
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
        return compose(made)(_never_run if loss is None else loss)

    with planned(sizes, rank) as ranks:
        step = make(ranks)
        state = step.structure(shapes)
        with contextlib.nullcontext() if where.type == "cpu" else torch.device(where.type, where.index or 0):
            estimate = predict(step, state)
    if batch is None:
        return estimate
    try:
        return attrs.evolve(estimate, dry_run=of_planned(make, sizes, rank, shapes, batch))
    except Exception as error:  # what the step itself refuses a call will say
        return attrs.evolve(estimate, no_dry_run=f"{type(error).__name__}: {error}")


def _never_run(params: Any, batch: Any) -> Any:
    raise AssertionError("a composition is only described")


@attrs.frozen
class MemoryProfile:
    """What a step held on this rank at the peak of a call; `str()` of it is a table.

    Attributes:
        predicted: by formula, from shapes alone; and by a dry run, with activations.
        measured: what -> bytes of tensors on the device at the peak: "state", "next state", "batch", and what was made
            in "forward" and "recomputation" (activations), "backward" (gradients, and what they come from) and "update"
            (whole parameters, sums, and what the optimizer needs).
        modules: name of a module -> bytes at the peak that were made in it, the most first: who holds the peak.
        allocated: what torch's allocator of a GPU says of the peak; None on a CPU.
    """

    predicted: MemoryEstimate
    measured: Mapping[str, int]
    modules: Mapping[str, int]
    allocated: int | None = None

    @property
    def peak(self) -> int:
        """Bytes of tensors on the device at the peak, the batch and activations included."""
        return sum(self.measured.values())

    @property
    def activations(self) -> int:
        """Bytes at the peak that no formula predicts: the batch, and what forward and recomputations made."""
        return sum(self.measured.get(name, 0) for name in (BATCH, "forward", "recomputation"))

    def __str__(self) -> str:
        lines = [f"{name:<24} {n:>18,} bytes {words}".rstrip() for name, n, words in self._rows()]
        return "\n".join([*lines, *self._notes()])

    def _repr_html_(self) -> str:
        rows = [(name, f"{n:,}", "bytes", words) for name, n, words in self._rows()]
        return _html.box("Memory of a step", _html.table(rows, right=(1,)), *map(_html.text, self._notes()))

    def _notes(self) -> list[str]:
        why = self.predicted.no_dry_run.partition("\n")[0]
        return [f"no dry run: {why}"] if why else []

    def _rows(self) -> list[tuple[str, int, str]]:
        rows = [(name, n, "at the peak, measured") for name, n in self.measured.items() if n]
        rows += [("peak", self.peak, "measured")]
        if self.predicted.dry_run is not None:
            rows += [("peak", self.predicted.dry_run, "predicted by a dry run")]
        rows += [("without activations", self.peak - self.activations, "measured")]
        rows += [("without activations", self.predicted.peak, "predicted, of which")]
        rows += [(f"  {name}", n, "") for name, n in self.predicted.step.items() if n]
        rows += [] if self.allocated is None else [("peak", self.allocated, "by torch's allocator")]
        return rows + [(name or "outside of modules", n, "") for name, n in list(self.modules.items())[:8]]


def profile_memory(step: Step, state: State, batch: Any) -> MemoryProfile:
    """Measure what a call of the step holds at its peak on this rank, beside what formulas and a dry run predict.

    The step runs twice with copies of the state, and what it returns is dropped; the second call is measured, which
    finds the memory of the first as every later call does. What is compiled, and what CUDA graphs would replay, runs as
    it is written. On a CPU it runs after that without arithmetic, in memory that nobody touches: a dry run. Where
    ranks share the step all of them call this.

    Args:
        step: what `compose(...)(loss)` returned.
        state: of it.
        batch: as for a call.

    Raises `FdsError` for what is no step, and all that a call raises.
    """
    if not isinstance(step, Step):
        raise FdsError("only a step can be profiled", where="step", got=type(step).__name__, want="a step")
    usable(state, "profile_memory")
    device, heard = state.step.device, Exchanges()
    with counting(heard):
        peak = of_second_call(step, state, batch)
    allocated = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    expected, why_not = None, "on a GPU memory is taken without being touched"
    if device.type == "cpu":
        try:
            expected, why_not = of_dry_run(step, state, batch, heard.exchanges), ""
        except Exception as error:  # nothing is wrong with the step itself, which ran
            why_not = f"{type(error).__name__}: {error}"
    measured: dict[str, int] = dict.fromkeys([STATE, NEXT, BATCH, *map(str, PHASES)], 0)
    modules: Counter[str] = Counter()
    for (what, module), n in peak.items():
        measured[what] += n
        if what in PHASES:
            modules[module] += n
    return MemoryProfile(predict(step, state, expected, why_not), measured, dict(modules.most_common()), allocated)
