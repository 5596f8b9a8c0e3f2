"""A call of a step that is run again, to find what in it is not finite first."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch

from fds import tree
from fds.debugging.checking import CheckedGradients, Checking, NamedLayers
from fds.debugging.statistics import Statistics, is_finite, not_finite
from fds.state import State
from fds.step import Step
from fds.step.ranges import clocked
from fds.step.stations import AtOnce

_SHOWN = 8  # parameters that a text names


@attrs.frozen
class NonFinite:
    """The first numbers of a call of a step that are not finite, of all ranks that share it.

    Attributes:
        call: `state.calls` before it.
        rank: where they were found, among the ranks that share the step.
        num_ranks: how many these are.
        part: "state" or "batch", where the call was given them; "gather", "forward", "recomputation" or "backward",
            where an operator made them of finite ones; "reduce" where that happened between ranks or microbatches;
            "nowhere" where no operator that is looked at did it, as where the call is finite when it is run again.
        module: the innermost one in which the operator ran, or in backward whose forward was reversed; "layers[2]" for
            a layer that is no module; empty outside of all.
        kind: the module's class.
        operator: torch's name of it, "aten.div".
        stage: of a pipeline.
        microbatch: its index, on this rank; None outside of all.
        tensors: what the operator was given and what it returned, or leaves of the state or the batch.
        params: the parameters whose summed gradient is not finite, in the order of the state.
    """

    call: int
    rank: int
    num_ranks: int
    part: str
    module: str = ""
    kind: str = ""
    operator: str = ""
    stage: int | None = None
    microbatch: int | None = None
    tensors: tuple[Statistics, ...] = ()
    params: tuple[str, ...] = ()

    @classmethod
    def read(cls, fields: dict[str, Any]) -> NonFinite:
        """Return what another rank sent as JSON."""
        tensors = tuple(map(Statistics.read, fields["tensors"]))
        return cls(**fields | {"tensors": tensors, "params": tuple(fields["params"])})

    @property
    def place(self) -> str:
        """Where it is, in words: `backward of '2.ffn' (FFN), aten.mul, microbatch 1, rank 0 of 4`."""
        inside = f"{self.part} of {self.module!r}" if self.module else self.part
        words = [inside + (f" ({self.kind})" if self.kind else ""), self.operator]
        words += [f"{name} {i}" for name in ("stage", "microbatch") if (i := getattr(self, name)) is not None]
        return ", ".join(filter(None, [*words, f"rank {self.rank} of {self.num_ranks}" * (self.num_ranks > 1)]))

    def __str__(self) -> str:
        """Return the place, and a line for each tensor."""
        lines = [f"first not finite: {self.place}", *map(str, self.tensors)]
        return "\n".join([*lines, f"gradients not finite: {tree.named(self.params, _SHOWN)}"] if self.params else lines)


def replayed(step: Step, state: State, batch: Any) -> NonFinite:
    """Run a call again, and return what in it is not finite first; all ranks that share the step call this."""
    order, found, params = _on_this_rank(step, state, batch)
    everyone = step.everyone
    if everyone is None:
        return attrs.evolve(found, params=params)
    sent = everyone.exchange([order, attrs.asdict(found), params], "watch")
    first = min(range(len(sent)), key=lambda rank: (sent[rank][0], rank))
    names = dict.fromkeys(name for _, _, theirs in sent for name in theirs)
    return attrs.evolve(NonFinite.read(sent[first][1]), params=tuple(names))


def _on_this_rank(step: Step, state: State, batch: Any) -> tuple[list[int], NonFinite, tuple[str, ...]]:
    """Return what is not finite first on this rank, what orders it among ranks, and the parameters whose gradients are.

    What came before its effects has the smaller order.
    """
    call, everyone = int(state.calls), step.everyone
    rank, size = (0, 1) if everyone is None else (everyone.index, everyone.size)
    kinds = ("params", "opt", "buffers")
    held = [one for kind in kinds for one in not_finite(getattr(state, kind), kind)]
    given = not_finite(batch, "batch")
    checking = Checking(state.step.device)
    with torch.compiler.set_stance("force_eager"), clocked(checking.parts), checking.modules, checking:
        _, metrics = _checked(step, checking)(state, batch)
    params = tuple(checking.params)
    found = functools.partial(NonFinite, call, rank, size)
    if held or given:
        part, tensors = ("state", held) if held else ("batch", given)
        return [0 if held else 1], found(part, tensors=tuple(tensors)), params
    lost = not is_finite(metrics["loss"])
    loss = checking.of_loss if lost else None
    # of a loss that is finite, what is not was hidden again in forward: a mask
    seen = [one for one in checking.culprits.values() if lost or one.part != "forward"]
    if (one := loss or next(iter(seen), None)) is not None:
        order = [3 if loss is None else 2, -1 if one.microbatch is None else one.microbatch, one.stage or 0]
        return order, found(**attrs.asdict(one, recurse=False)), params
    reduced = bool(params) and not lost
    return [4 if reduced else 5], found("reduce" if reduced else "nowhere"), params


def _checked(step: Step, checking: Checking) -> Step:
    """Return the same step, which donates nothing and runs as it is written, and has what it does looked at."""
    return attrs.evolve(
        step,
        place=attrs.evolve(step.place, donate=False, speculate=False),
        run=AtOnce(),
        layer=(*step.layer, NamedLayers(checking.modules)),
        condition=(CheckedGradients(checking.params), *step.condition),
    )
