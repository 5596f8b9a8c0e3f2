"""Share optimizer state, gradients and parameters among the ranks of an axis: ZeRO, stages 0 to 3.

Fills:  topology, gather,        State:  params, opt and averages as this rank's slices of flat buckets (from stage 1);
        reduce (transports)              `kept` of transports with error feedback
Law:    over N ranks with accumulate(n), the plain step's accumulate(N * n) of the concatenated batch, to rounding
Cost:   sends 2P per step at stage 0 and 1, (1 + n)P at stage 2, 3nP at stage 3; float32 Adam holds 12P / N bytes
Source: Rajbhandari et al. 2020, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277 (replicas);
        Wang et al. 2023, arXiv:2306.10209 (secondary)
"""

import math
from collections.abc import Iterator
from typing import Any

from fds import tree
from fds.collectives import Axis
from fds.errors import ComposeError, Rule, count, instance, is_number
from fds.step import Dimension, Named, Shard, Step, Transport, fill, transform

_AXIS = instance(Axis, ": {name} is not an axis", 'fds.mesh(dp=-1)["dp"]')
_TRANSPORT = "fds.transports.quantized(8), or another fds.step.Transport"
_NODES = 'mesh = fds.mesh(node=2, local=-1); axis=mesh["node", "local"], stage=3, secondary=mesh["local"]'


@transform(
    axis=_AXIS,
    stage=Rule(lambda x: not isinstance(x, bool) and x in (0, 1, 2, 3), ": unknown stage", "0, 1, 2 or 3"),
    replicate=_AXIS.or_none(),
    bucket_bytes=count().or_none(),
    max_live_bytes=count().or_none(),
    prefetch=count(least=0),
    persist_below=count(least=0),
    predivide=Rule(
        lambda x: x is None or (is_number(x) and 0 < x < math.inf),
        ": gradients cannot be divided by predivide",
        "a positive number, or None",
    ),
    weights=instance(Transport, ": {name} is not a transport", _TRANSPORT).or_none(),
    secondary=instance(Axis, ": {name} is not an axis", _NODES).or_none(),
)
def shard_optimizer(
    axis: Axis,
    *,
    stage: int = 1,
    replicate: Axis | None = None,
    bucket_bytes: int | None = None,
    max_live_bytes: int | None = None,
    prefetch: int = 1,
    persist_below: int = 0,
    predivide: float | None = None,
    weights: Transport | None = None,
    gradients: Transport | dict[str, Transport] | None = None,
    secondary: Axis | None = None,
):
    """Let every rank of `axis` pass its own batch and own one slice of the state; the step is that of all batches.

    Stage 0 keeps everything on every rank and sums gradients; stage 1 slices masters and optimizer state; stage 2 also
    gradients, reduced every microbatch; stage 3 gathers parameters only while the loss uses them, in forward and again
    in backward. `fds.precision` says in which dtypes parameters and gradients are sent and summed.

    Args:
        axis: of `fds.mesh`, over which batches and slices differ. One of size 1 changes nothing, but at stage 3 with
            `max_live_bytes`, where one rank keeps to that too.
        stage: 0, 1, 2 or 3. At stage 3 forward-mode AD over a parameter takes its `fds.materialize`d values.
        replicate: a second axis of the same mesh, over which batches differ and slices are alike: gathers stay on
            `axis` (inside a node), gradients are summed over both (hybrid sharding).
        bucket_bytes: bound of a bucket, in master precision: what is gathered or reduced in one message. A parameter
            that is larger has a bucket of its own. None follows the model and the axis: a sixteenth of the model's
            bytes, at least 1 MiB and at most 32, so that sending overlaps backward; 32 MiB where all ranks share the
            CPU of one node, where it cannot. `step.describe(state)` shows the sizes.
        max_live_bytes: stage 3: bound of the parameters that are whole at once; None for two buckets and the prefetch.
            What lives elsewhere (on disk) is read for it bucket by bucket, in forward and again in backward.
            Where all fit they are gathered once, before the loss runs, as plain tensors: a parameter that is gathered
            on use costs the host some 10 us for each operator that reads it.
        prefetch: stage 3: buckets that are gathered ahead, in the order of the step before.
        persist_below: stage 3: parameters of fewer elements stay whole from the start of a step to its end.
        predivide: gradients are divided by this before they are sent and multiplied after. None for the number of
            data ranks where they are sent in float16, which a sum could overflow, else for 1.
        weights: how gathered parameters travel, from stage 1 on: `fds.transports.quantized(8)`, or None, without loss.
        gradients: how gradients travel: `fds.transports.quantized(8)`, `onebit()`, `hierarchical(quantized(4))`, one of
            your own, or None, without loss. Or a dict of these by shell-style pattern of parameters' names, of which
            the first that matches counts: `{"*embed*": fds.transports.rows()}`; others travel without loss.
        secondary: stage 3: an axis inside `axis`, that of a node: `mesh["local"]` of `mesh["node", "local"]`. Its ranks
            keep a slice each of what was gathered, in the dtype of the loss, and gather from there for the rest of
            the step, in backward and in later microbatches (ZeRO++'s hpZ). The same bits.

    Raises `ComposeError` for anything else, `MeshError` for an axis of ranks that do not run now; `step.init` raises
    `StateError` where `max_live_bytes` has no room for a bucket, and for a pattern that matches no parameter.
    """
    axis.check_current()
    for what, got, want in _faults(axis, stage, weights, gradients, secondary):
        raise ComposeError(f"shard_optimizer: {what}", got=got, want=want)
    by_name = Named(gradients) if isinstance(gradients, dict) else gradients
    data = axis if replicate is None else _joined(axis, replicate)
    copies = replicate.channel("step") if replicate is not None and replicate.size > 1 else None
    shard = Shard(  # on its own channels, so that collectives of the loss are not mixed with its own
        axis.channel("step"),
        stage,
        data.channel("step"),
        copies,
        bucket_bytes,
        max_live_bytes,
        prefetch,
        persist_below,
        secondary.channel("step again").used_for("gather") if secondary is not None and secondary.size > 1 else None,
        None if predivide is None else float(predivide),
    )

    ways = {"gather": weights, "reduce": by_name} if data.size > 1 else {}
    sent: dict[str, Any] = {name: {"transport": way.on(shard.axis)} for name, way in ways.items() if way is not None}

    def apply(step: Step) -> Step:
        changes = data.size > 1 or (shard.gathers_on_use and max_live_bytes is not None)
        return fill(step, topology=Dimension(shard.data, "data", shard), **sent) if changes else step

    return apply


def _faults(
    axis: Axis, stage: int, weights: Any, gradients: Any, secondary: Axis | None
) -> Iterator[tuple[str, str, str]]:
    """Yield (what is wrong, got, want) of arguments that do not go together."""
    by_name: dict[Any, Any] = {**gradients} if tree.is_dict(gradients) else {}
    if tree.is_dict(gradients) and not (by_name and all(isinstance(pattern, str) for pattern in by_name)):
        want = '{"*embed*": fds.transports.rows()}'
        yield "gradients by name are transports by pattern", repr(gradients)[:80], want
    named = {f"gradients[{key!r}]": way for key, way in by_name.items()} or {"gradients": gradients}
    for name, way in named.items():
        if not isinstance(way, Transport) and (way is not None or by_name):
            yield f"{name} is not a transport", repr(way)[:80], _TRANSPORT
    if weights is not None and stage == 0:
        yield "at stage 0 no weights are sent", f"stage=0, weights={weights}", "stage=1, 2 or 3, or gradients alone"
    if weights is not None and (weights.keeps or weights.draws):
        what = "what a message of weights loses is not sent later, and the same in every call"
        yield what, f"weights={weights}", "fds.transports.quantized(8), without feedback, and not stochastic"
    if secondary is not None and stage != 3:
        yield "only stage 3 gathers again, from a secondary axis", f"stage={stage}", _NODES
    if secondary is not None and (secondary.mesh != axis.mesh or not set(secondary.ranks) <= set(axis.ranks)):
        what = "secondary is not an axis inside the one of the slices"
        yield what, f"{secondary.name!r} and {axis.name!r}", _NODES


def _joined(axis: Axis, replicate: Axis) -> Axis:
    """Return the flattened axis of both. Raises `ComposeError` unless they are two axes of one mesh."""
    names = [*replicate.name.split(","), *axis.name.split(",")]
    if replicate.mesh != axis.mesh or len(set(names)) < len(names):
        raise ComposeError(
            "shard_optimizer: replicate and axis are not two axes of one mesh",
            got=f"{replicate.name!r} and {axis.name!r}",
            want='mesh = fds.mesh(replicate=2, shard=-1); shard_optimizer(mesh["shard"], replicate=mesh["replicate"])',
        )
    return axis.mesh[tuple(names)]
