"""Divide the matrices of modules over the ranks of an axis, which compute one loss together.

Fills:  topology, modules        State:  every rank its pieces of what the plan divides; names and whole shapes stay
Law:    13: an axis of any size is the axis of size 1 to derived rounding, dropout and initialisation included
Cost:   parameters and their states / N; per column and row B S H elements all-reduced in forward, and in backward; with
        `sequence` gathered and scattered instead, as many, and what is between blocks / N
Source: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor, nn

from fds.collectives import Axis
from fds.errors import FLAG, ComposeError, LossError, Rule, count, instance
from fds.loss import Root, modules_of
from fds.nn.parallel.plan import Part
from fds.nn.parallel.region import Region
from fds.nn.parallel.uses import Edges, check_uses
from fds.step import Dimension, Placement, Replicated, SplitDim, Step, fill, first_call_compared, transform
from fds.transforms.tensor_parallel.resolution import Resolved, resolve


@attrs.frozen(eq=False, repr=False)
class Divided(Placement):
    """How parameters lie along a tensor axis, by their names; buffers lie whole, alike on every rank."""

    axis: Axis  # pyright: ignore[reportIncompatibleVariableOverride]  (never None)
    resolved: tuple[Resolved, ...]
    by_name: Mapping[str, SplitDim | Replicated]

    def lies(self, name: str) -> SplitDim | Replicated:
        """Say it by the name, or by the end of it where a loss passes a part of its parameters to the module."""
        while name not in self.by_name and "." in name:
            name = name.partition(".")[2]
        return self.by_name.get(name, _SAME)

    def holding(self, encodings: Sequence[Any]) -> Divided:
        """Return the same placement, which knows how long parts are that views encode."""

        def encoded(how: SplitDim | Replicated) -> SplitDim | Replicated:
            if not isinstance(how, SplitDim):
                return how
            each = (view.parts(how.parts, self.axis.size) for view in encodings if hasattr(view, "parts"))
            return attrs.evolve(how, encoded=tuple(parts for parts in each if parts))

        return attrs.evolve(self, by_name={name: encoded(how) for name, how in self.by_name.items()})

    def __repr__(self) -> str:
        kinds = Counter(
            (re.sub(r"\d+", "*", f"{resolution.loss_module.prefix}{path}"), str(part))
            for resolution in self.resolved
            for path, part in resolution.parts.items()
        )
        return "; ".join(f"{n} x {path}: {part}" if n > 1 else f"{path}: {part}" for (path, part), n in kinds.items())


_SAME = Replicated()


@attrs.frozen(eq=False, repr=False)
class Dividing:
    """The module map: copies of modules compute with pieces."""

    axis: Axis
    resolved: Mapping[int, Resolved]
    chunks: int
    pending: Edges = attrs.field(factory=Edges)  # of first calls, whose loss has not been checked

    @property
    def vocabularies(self) -> set[int]:
        """How many rows there are, padding included, of each matrix that is divided by rows: heads among them."""
        return {n for resolution in self.resolved.values() for n in resolution.rows}

    def __repr__(self) -> str:
        return f"pieces over {self.axis.name} ({self.axis.size} ranks)"

    def __call__(self, module: nn.Module, root: Root) -> None:
        """Convert a copy. Raises `LossError` for one of a module that the plan was not resolved for."""
        resolution = self.resolved.get(root.number)
        if resolution is None:
            raise LossError(
                "the loss runs a module that tensor_parallel could not see when it was composed",
                where=type(module).__name__,
                got="a module that the loss reaches in another way than it shows",
                want="loss_fn that holds apply in its closure, its defaults or as a global; or fds.Layers",
            )
        resolution.convert(module, Region(self.axis, self.chunks), self.pending)

    def check_graph(self, total: Tensor | None) -> None:
        """Raise `LossError` for a first loss that takes pieces for the whole, or whose gradients the plan mistakes.

        The next call is looked at again then. None drops what waits for a loss.
        """
        if not self.pending:
            return
        edges = dict(self.pending)
        self.pending.clear()
        try:
            check_uses(edges, total, "whole")
        except LossError:
            for resolution in self.resolved.values():
                for observations in resolution.observations.values():
                    observations.watched.clear()
            raise


@transform(
    axis=instance(Axis, ": {name} is not an axis", 'fds.mesh(tp=-1)["tp"]'),
    plan=Rule(
        lambda plan: plan == "auto" or isinstance(plan, Mapping),
        " takes a plan",
        '"auto", or a dict: pattern of paths of modules -> "column", "row", ...',
        where="plan",
    ),
    sequence=FLAG,
    overlap=count(": {name} counts pieces", 0),
    verify=FLAG,
)
def tensor_parallel(
    axis: Axis,
    plan: str | Mapping[str, str | Part] = "auto",
    *,
    sequence: bool = False,
    overlap: int = 0,
    verify: bool = False,
):
    """Divide the matrices of the loss's modules over an axis, whose ranks pass the same batch and compute one loss.

    The loss is made of modules by `fds.functional` or `fds.Layers`, which stay as they are: private copies compute with
    pieces. Names and whole shapes of parameters stay too, so that a save of any product of axes loads on any other.

    Args:
        axis: of `fds.mesh`; one of size 1 changes nothing.
        plan: `"auto"`, which knows `nn.MultiheadAttention`, `nn.TransformerEncoderLayer`, the layers of `fds.nn` and
            the families of transformers that `fds.nn.parallel.auto` lists, and refuses what it does not know. Or a
            dict: patterns of paths of modules (`*` crosses dots) -> `"column"`, `"row"`, `"vocab"`, `"heads"`,
            `"replicated"`, `"sequence"`, or what functions of these names in `fds.nn` return, or `fds.nn.split`; where
            several patterns match, the last counts. Parameters that it does not name are whole on every rank, but for
            the scores of divided weights (`fds.compression.with_scores`), which lie as these do.
        sequence: cut activations between matrices along the sequence too (norms, dropout, residuals), in the blocks
            that the plan calls `"sequence"`. Sequences that the ranks do not divide are padded inside.
        overlap: into how many pieces the messages of rows, and of columns that share their input with no other, are cut
            to travel beside their products; 0 for one after the other. With 1 sums keep their bits, with more products
            of fewer rows may be summed in another order. In backward the message of a column travels beside the
            gradients of its weights.
        verify: compare the first call with one rank, which runs the undivided module: its loss and every gradient. The
            first call then takes some times as long, and every rank whole parameters; see
            `fds.debugging.compare_with_one_rank`, which does so at any time.

    Raises `ComposeError` for a plan that does not fit, `MeshError` for an axis of ranks that do not run now.
    """
    axis.check_current()
    channel = axis.channel("tensor")

    def apply(step: Step) -> Step:
        loss_modules = modules_of(step.loss)
        if step.eval_loss is not step.loss:
            numbers = {loss_module.number for loss_module in loss_modules}
            loss_modules += [other for other in modules_of(step.eval_loss) if other.number not in numbers]
        if not loss_modules:
            raise ComposeError(
                "tensor_parallel finds no module in the loss",
                got=repr(step.loss)[:80],
                want="a loss that calls apply, of fds.functional(module), or fds.Layers",
                hint="apply must be in its closure, its defaults, or a global that it names",
            )
        resolved = tuple(resolve(loss_modules, plan, axis.size, sequence=sequence))
        if axis.size == 1:
            return step
        lies = dict(itertools.chain.from_iterable(resolution.lies.items() for resolution in resolved))
        lies |= {name: how for filler in step.added for name, how in filler.lie(lies).items()}
        placement = Divided(channel, resolved, lies)
        modules = Dividing(channel, {resolution.loss_module.number: resolution for resolution in resolved}, overlap)
        step = fill(step, topology=Dimension(channel, "tensor", placement), modules=modules)
        return first_call_compared(step) if verify else step

    return apply
