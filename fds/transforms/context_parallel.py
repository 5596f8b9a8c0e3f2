"""Let the ranks of an axis pass parts of the same sequences: context parallelism.

Fills:  topology, context        State:  none
Law:    13: the step of one rank that passes the whole sequences, to rounding, dropout included
Cost:   activations / n; a copy of the gradients is summed over the axis, unless `shard_optimizer` has these ranks too;
        what `fds.nn.attention` sends; of what is drawn the whole rows for a moment
Source: Jacobs et al. 2023, arXiv:2309.14509; Liu et al. 2023, arXiv:2310.01889
"""

from __future__ import annotations

import attrs

from fds.collectives import Axis
from fds.errors import FLAG, Rule, instance
from fds.nn.parallel.tokens import Parts
from fds.nn.parallel.zigzag import LAYOUTS, Layout
from fds.step import Dimension, Placement, Replicated, Step, fill, first_call_compared, transform


@attrs.frozen(repr=False)
class SummedGradients(Placement):
    """Every rank holds all parameters, alike; its gradients are those of its tokens."""

    axis: Axis  # pyright: ignore[reportIncompatibleVariableOverride]  (never None)

    def lies(self, name: str) -> Replicated:
        """Say so of every parameter."""
        return Replicated("sum")

    @property
    def split(self) -> tuple[Axis, ...]:
        """Nothing: an optimizer gets all that one rank would get."""
        return ()


@transform(
    axis=instance(Axis, ": {name} is not an axis", 'fds.mesh(dp=-1, sp=2)["sp"]'),
    layout=Rule(LAYOUTS.__contains__, ": no such layout", " or ".join(map(repr, LAYOUTS))),
    verify=FLAG,
)
def context_parallel(axis: Axis, *, layout: Layout = "contiguous", verify: bool = False):
    """Let every rank of `axis` pass its part of the same sequences, (B, S/N) of (B, S) tokens; the step is that of all.

    The loss is one of tokens, which ranks compute for their own, and only `fds.nn.attention(..., axis=axis)` looks at
    those of others: all ranks of the axis run it together. A loss of different numbers of targets on each rank returns
    `fds.Mean(total, weight)`; of a plain scalar the ranks' mean is taken.

    Gradients are summed over the axis after those of data ranks: of slices, from stage 1 on. To slice the state over
    these ranks too, give them to both: `shard_optimizer(mesh["dp", "sp"])` with `context_parallel(mesh["sp"])`.

    Ranks that pass the same rows draw what one rank draws for them: dropout and noise of (B, S/N, ...) are drawn for
    the whole rows, of which a rank takes its part, and what has nothing of tokens is alike. `LossError` says what
    cannot be drawn so: tokens along another dim than 1, functions that draw otherwise, dropout in
    `torch.utils.checkpoint`. And in a first call what would see this rank's tokens alone, and one rank all of them:
    other attention, convolutions, positions by `torch.arange`, shifts, means that are not the loss; but for what is in
    `with fds.nn.allow_mixing():`.

    Args:
        axis: of `fds.mesh`, in the order of the parts. One of size 1 changes nothing.
        layout: which tokens a rank passes: "contiguous", the r-th of N equal parts, or "zigzag", those of
            `fds.nn.zigzag`; as `fds.nn.attention` is told.
        verify: compare the first call with one rank that has the whole rows, as `fds.tensor_parallel` does.

    Raises `ComposeError` for anything else, `MeshError` for an axis of ranks that do not run now.
    """
    axis.check_current()
    channel = axis.channel("context_parallel")

    def apply(step: Step) -> Step:
        if channel.size == 1:
            return step
        step = fill(
            step, topology=Dimension(channel, "sequence", SummedGradients(channel)), context=Parts(channel, layout)
        )
        return first_call_compared(step) if verify else step

    return apply
