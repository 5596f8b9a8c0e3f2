"""Cut the layers of a loss into stages on the ranks of an axis, and let microbatches pass through them by a schedule.

Fills:  topology, split, execute  State:  params, opt, buffers, averages of its stages on each rank, under their names
Law:    accumulate(num_microbatches), for every schedule; schedules that sum in one order are equal bit for bit
Cost:   sends one activation and one gradient per border and microbatch; the schedule says which ranks wait how long
Source: Huang et al. 2019, arXiv:1811.06965; Narayanan et al. 2021, arXiv:2104.04473; Qi et al. 2024, arXiv:2401.10241
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fds import loss as losses
from fds.collectives import Axis
from fds.errors import ComposeError, PlanError, Rule, count, is_int
from fds.loss import Layers, LayerSpec
from fds.plans import LayerCosts, Op, PipelineSchedule, Plan, boundaries_of, validate
from fds.plans.plan import COMPUTE
from fds.step import Dimension, Split, Step, fill, transform, with_added
from fds.transforms.pipeline.computations import Lowered
from fds.transforms.pipeline.ownership import Ownership
from fds.transforms.pipeline.post import numbered
from fds.transforms.pipeline.station import Pipeline


@transform(
    schedule=Rule(
        callable, ": {name} is not a schedule", "fds.plans.one_f_one_b, or a function (ranks, microbatches) -> rows"
    ),
    axis=Rule(
        lambda axis: isinstance(axis, Axis) or is_int(axis, 1),
        ": {name} is not an axis",
        'fds.mesh(pp=2, dp=-1)["pp"], or a number of ranks to play',
    ),
    num_microbatches=count(" takes a number of microbatches"),
)
def pipeline(
    schedule: PipelineSchedule,
    axis: Axis | int,
    *,
    num_microbatches: int,
    partition: str | LayerCosts | Sequence[int] = "parameters",
    dynamic_shapes: bool = False,
):
    """Let every rank of `axis` hold some consecutive layers of a `Layers` loss, and run them for all microbatches.

    Ranks that differ only along `axis` pass the same batch; one that has neither the first stage nor the last may pass
    None. Activations are any pytree of tensors; integers and booleans are sent without gradients. Tied
    layers on several ranks add up their gradients. What any rank raises is raised on all of them, with stage and
    microbatch. `evaluate` passes through the same stages, and its outputs are those of the last on every rank.

    With `shard_optimizer` on another axis of the mesh every stage is sharded among its own ranks. Its stages 2 and 3
    reduce once per backward of a stage, with one small exchange between ranks each time. B and W cut backward between
    layers: the gradients of an activation that a layer uses several times and passes on are added in another order than
    by BW, so such schedules agree with others to rounding there.

    Args:
        schedule: of `fds.plans`, or a function `(number of ranks, number of microbatches) -> Plan or rows of actions`.
        axis: of `fds.mesh`; or a number: so many ranks, played by this process alone.
        num_microbatches: into which the batch is cut along dim 0.
        partition: which stage has which layers: "uniform", "parameters" (the largest stage as small as can be, frozen
            parameters counted too), "type:REGEX" (as many layers of a class that matches), measured costs
            (`fds.plans.measure`), or the boundaries themselves (`[0, 3, 6]`: two stages of three layers).
        dynamic_shapes: whether activations of different microbatches may differ in shape; then each is announced.

    Raises `ComposeError` for a loss that is not `Layers`, `PlanError` for a schedule that does not fit and a partition
    that cannot be, `LossError` for a layer with buffers that is tied across stages.
    """
    if isinstance(axis, Axis):
        axis.check_current()
    ranks = axis.size if isinstance(axis, Axis) else axis
    name = getattr(schedule, "__name__", None) or repr(schedule)
    plan = validate(_planned(schedule, name, ranks, num_microbatches))
    _check_training(plan, name, ranks, num_microbatches)
    shared = axis if isinstance(axis, Axis) and axis.size > 1 else None
    lowered = Lowered(plan, None if shared is None else shared.index, shared is None or shared.device.type == "cpu")
    stage_axis, ties, channels = (None, None, {}) if shared is None else _channels(shared, plan)

    def apply(step: Step) -> Step:
        owned = _ownership(step, plan, name, partition, stage_axis, ties)
        made = Pipeline(name, owned, lowered, num_microbatches, dynamic_shapes, channels)
        hint = f"a pipeline accumulates over its microbatches: pipeline(..., num_microbatches={num_microbatches}) alone"
        stages = Dimension(stage_axis, "stage", owned)
        return fill(step, topology=stages, split=Split(num_microbatches), execute=made, hint=hint)

    return apply


def _channels(axis: Axis, plan: Plan) -> tuple[Axis, Axis, dict[Any, Axis]]:
    """Return channels of an axis for what all stages do, for tied parameters, and for messages between stages."""
    most = max(numbered(plan.placement).values(), default=-1)
    between = {
        (kind, i): axis.channel(f"pipeline {kind} {i}").used_for(kind)
        for kind in ("activation", "gradient")
        for i in range(most + 1)
    }
    return axis.channel("pipeline"), axis.channel("pipeline ties").used_for("shared"), between


def _ownership(
    step: Step, plan: Plan, name: str, partition: Any, stage_axis: Axis | None, ties: Axis | None
) -> Ownership:
    """Return which stage has which layers of a step's loss. Raises what `pipeline` says."""
    _check_layers(step)
    loss = step.loss
    shapes = {name: tuple(x.shape) for name, x in with_added(step.added, loss.init.trace()).items()}
    boundaries = _boundaries(loss, shapes, partition, plan.num_stages)
    owned = Ownership(loss, boundaries, plan.placement, stage_axis, ties, shapes)
    owned.check_shared_buffers()
    _check_order(plan, name, loss)
    return owned


def _planned(schedule: PipelineSchedule, name: str, ranks: int, num_microbatches: int) -> Plan:
    """Return a schedule's plan. Raises `PlanError` for anything else, or actions that are not computations."""
    want = '(ranks, microbatches) -> a Plan, or rows such as [["0F0", "0BW0"], ["1F0", "1BW0"]]'
    try:
        inspect.signature(schedule).bind(ranks, num_microbatches)
    except TypeError as error:
        raise PlanError(
            "the schedule does not take ranks and microbatches",
            where=name,
            got=str(error),
            want=want,
            hint="a schedule with arguments of its own is called first: interleaved(2)",
        ) from None
    try:
        plan = Plan.of(schedule(ranks, num_microbatches))
    except PlanError as error:
        raise PlanError(
            f"the schedule returned no plan: {error.what}", where=name, got=error.got, want=error.want, hint=error.hint
        ) from error
    more = next((a for row in plan.rows for a in row if a.op not in COMPUTE), None)
    if more is not None:
        raise PlanError(
            "the schedule's plan is lowered already, which the pipeline does",
            where=name,
            got=str(more),
            want="F, B, W and BW alone",
        )
    return plan


def _check_training(plan: Plan, name: str, ranks: int, num_microbatches: int) -> None:
    got = f"{plan.num_ranks} ranks, {plan.num_microbatches} microbatches" + ("" if plan.trains else ", no backward")
    want = f"{ranks} ranks, {num_microbatches} microbatches"
    if got != want:
        raise PlanError("the schedule's plan is another than it was asked for", where=name, got=got, want=want)
    idle = [rank for rank, row in enumerate(plan.rows) if not row]
    if idle:
        raise PlanError(
            "the schedule leaves ranks without a stage",
            where=name,
            got=f"nothing to do on {idle}",
            want="a stage on every rank",
            hint="fewer ranks",
        )


def _check_order(plan: Plan, name: str, loss: Layers) -> None:
    """Raise `PlanError` where layers with buffers would see the microbatches in another order than they are in."""
    if not any(loss.layer(i).buffers for i in range(len(loss))):
        return
    for rank, row in enumerate(plan.rows):
        at: dict[Any, Any] = {}
        for action in row:
            if action.op is Op.FORWARD and at.setdefault(action.stage, -1) > action.microbatch:
                raise PlanError(
                    "forwards are not in the order of microbatches, and layers with buffers change them in that order",
                    where=f"{name}, rank {rank}",
                    got=str(action),
                    want=f"before {action.stage}F{at[action.stage]}",
                )
            if action.op is Op.FORWARD:
                at[action.stage] = action.microbatch


def _check_layers(step: Step) -> None:
    loss, other = step.loss, step.eval_loss
    for role, hides in (("loss", loss), ("eval_fn", other)):
        if not isinstance(hides, Layers):
            raise ComposeError(
                "a pipeline cuts a loss between its layers, and this one hides them",
                where=role,
                got=losses.name(hides),
                want="fds.Layers(layers, criterion)",
                hint="eval_fn, too, is Layers of the same layers",
            )

    def names(layers: Layers) -> list[list[str]]:
        return [sorted((*layers.layer(i).params, *layers.layer(i).buffers)) for i in range(len(layers))]

    if other is not loss and names(other) != names(loss):
        raise ComposeError(
            "eval_fn has other layers than the loss, and stages hold the loss's",
            where="pipeline",
            got=f"{len(other)} layers",
            want=f"{len(loss)} layers with the same parameters, in any criterion",
            hint="fds.Layers(loss.layers, another_criterion)",
        )


def _boundaries(
    loss: Layers, shapes: Mapping[str, tuple[int, ...]], partition: Any, num_stages: int
) -> tuple[int, ...]:
    counts = [sum(math.prod(shapes[name]) for name in loss.layer(i).params) for i in range(len(loss))]
    return boundaries_of(partition, num_stages, types=[_kind(layer) for layer in loss.layers], parameters=counts)


def _kind(layer: object) -> str:
    """Return the name of a layer's class, or of the function that it is."""
    made: object = layer.cls if isinstance(layer, LayerSpec) else layer if inspect.isfunction(layer) else type(layer)
    return getattr(made, "__name__", repr(made))
