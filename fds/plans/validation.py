"""`validate`: check that a plan does all work once, does not deadlock, and keeps to a memory bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fds.errors import PlanError, is_int
from fds.plans.lowering import last_uses
from fds.plans.order import OTHER_SIDE, B, F, Item, W, blame, finish_walk, gives, needs, needs_here, rendezvous
from fds.plans.plan import COMPUTE, RECVS, SENDS, Action, Op, Plan, Rows

OF_MICROBATCH = COMPUTE | SENDS | RECVS | {Op.LOAD}


def validate(plan: Plan | Rows, *, memory_bound: int | Sequence[int] | None = None) -> Plan:
    """Return the plan, lowered or not, if it can be run; rows are converted to a plan first.

    Every stage must be on one rank and do F once for every microbatch, and BW, or B and W, once (or no stage does a
    backward). Ranks must not wait for each other, even if a send returns only when its receive is posted. In a lowered
    plan every send has its receive, and loads and receives come before their use. No two microbatches use a buffer at
    the same time. A rank has at most `memory_bound` (stage, microbatch)s, one bound or one per rank, between their F
    and the end of their backward.

    Raises:
        PlanError: with the first fault, marked in the ranks x time grid.

    >>> validate([["0F0", "0BW0"], ["1BW0", "1F0"]])
    Traceback (most recent call last):
    ...
    fds.errors.PlanError: ranks wait for each other
      where: rank 1, action 0: 1BW0
      got:      0       1
             0: 0F0     0BW0
             1: >1BW0<  1F0
      want:  1BW0 on rank 1 needs 1F0
    """
    plan = Plan.of(plan)
    _check_forms(plan)
    places = _check_once(plan)
    _check_complete(plan, places)
    _check_end(plan)
    if any(action.op in OF_MICROBATCH - COMPUTE for row in plan.rows for action in row):
        check_messages(plan, places)
        what = "ranks wait for each other, since a send returns only when its receive is posted"
        finish_walk(plan, rendezvous(plan), what)
    else:
        finish_walk(plan, lambda action: needs(action, plan.num_stages), "ranks wait for each other")
    _check_buffers(plan)
    if memory_bound is not None:
        _check_memory(plan, _bounds(plan, memory_bound))
    return plan


def _check_forms(plan: Plan) -> None:
    for rank, row in enumerate(plan.rows):
        for place, action in enumerate(row):
            if (action.op in OF_MICROBATCH) != (action.stage is not None and action.microbatch is not None):
                want = f"0{action.op.value}0" if action.op in OF_MICROBATCH else action.op.value
                raise blame("not an action", plan, rank, place, want=f"such as {want}")


def _check_once(plan: Plan) -> dict[Item, tuple[int, int]]:
    """Return the (rank, index) of every item. Raises for a stage on two ranks, and for an item done twice."""
    places: dict[Item, tuple[int, int]] = {}
    homes: dict[int, int] = {}
    for rank, row in enumerate(plan.rows):
        for place, action in enumerate(row):
            stage, microbatch = action.stage, action.microbatch
            if stage is None or microbatch is None:
                continue
            if homes.setdefault(stage, rank) != rank:
                raise blame(
                    "a stage is on two ranks", plan, rank, place, want=f"stage {stage} on rank {homes[stage]} only"
                )
            for op in (B, W) if action.op is Op.BACKWARD else (action.op,):
                if (op, stage, microbatch) in places:
                    first = places[op, stage, microbatch][1]
                    raise blame("work is done twice", plan, rank, place, want=f"{row[first]} (action {first}) alone")
                places[op, stage, microbatch] = rank, place
    return places


def _check_complete(plan: Plan, places: dict[Item, tuple[int, int]]) -> None:
    if not plan.num_stages:
        raise PlanError("the plan is empty", got=str(plan) or "no rows", want="such as 0: 0F0 0BW0")
    ops = (F, B, W) if plan.trains else (F,)
    for stage in range(plan.num_stages):
        for microbatch in range(plan.num_microbatches):
            for op in ops:
                if (op, stage, microbatch) not in places:
                    either = f" or {Action(stage, Op.BACKWARD, microbatch)}" if op is B else ""
                    rank, place = _nearest(plan, places, stage, microbatch)
                    want = f"{Action(stage, op, microbatch)}{either}, too"
                    raise blame("work is missing", plan, rank, place, want=want)


def _nearest(plan: Plan, places: dict[Item, tuple[int, int]], stage: int, microbatch: int) -> tuple[int, int]:
    """Return the (rank, index) of the last work on this microbatch at the nearest stage that has any."""
    far = lambda item: (item[2] != microbatch, abs(item[1] - stage), -places[item][1])
    return places[min(places, key=far)]


def _check_end(plan: Plan) -> None:
    everywhere = {a.op for row in plan.rows for a in row} & {Op.REDUCE_GRADS, Op.OPTIMIZER_STEP}
    for rank, row in enumerate(plan.rows):
        end = [place for place, action in enumerate(row) if action.op not in OF_MICROBATCH]
        ops = [row[place].op for place in end]
        steps_last = Op.OPTIMIZER_STEP not in ops[:-1]
        if end != list(range(len(row) - len(end), len(row))) or len(set(ops)) < len(ops) or not steps_last:
            raise blame(
                "the end of a step is not at the end",
                plan,
                rank,
                end[0],
                want="REDUCE and REDUCE_TIED once after all other work, then STEP",
            )
        if row and (lacking := everywhere - set(ops)):
            raise blame(
                "a step ends on some ranks only",
                plan,
                rank,
                len(row) - 1,
                want=" and ".join(sorted(op.value for op in lacking)) + " on every rank",
            )


def _check_buffers(plan: Plan) -> None:
    for rank, row in enumerate(plan.rows):
        last = last_uses(row)
        held: dict[tuple[int, int], int] = {}  # (stage, microbatch) -> buffer
        owner: dict[tuple[int, int], int] = {}  # (stage, buffer) -> microbatch, while it is under way
        for place, action in enumerate(row):
            stage, microbatch, buffer = action.stage, action.microbatch, action.buffer
            if stage is None or microbatch is None or buffer is None:
                continue
            if held.setdefault((stage, microbatch), buffer) != buffer:
                raise blame(
                    "a microbatch changes its buffer",
                    plan,
                    rank,
                    place,
                    want=f"buffer {held[stage, microbatch]}, as before",
                )
            if owner.setdefault((stage, buffer), microbatch) != microbatch:
                other = owner[stage, buffer]
                raise blame(
                    "two microbatches share a buffer",
                    plan,
                    rank,
                    place,
                    want=f"another buffer: {buffer} is in use until {row[last[stage, other]]}",
                )
            if last[stage, microbatch] == place:
                del owner[stage, buffer]


def _bounds(plan: Plan, memory_bound: int | Sequence[int]) -> list[int]:
    bounds = list(memory_bound) if isinstance(memory_bound, Sequence) else [memory_bound] * plan.num_ranks
    if len(bounds) != plan.num_ranks or not all(map(is_int, bounds)):
        raise PlanError(
            "the memory bound is not a number of microbatches",
            where="validate(memory_bound=...)",
            got=repr(memory_bound),
            want=f"one, or one for each of {plan.num_ranks} ranks",
        )
    return bounds


def _check_memory(plan: Plan, bounds: list[int]) -> None:
    for rank, row in enumerate(plan.rows):
        live = 0
        for place, action in enumerate(row):
            live += action.op is F
            if live > bounds[rank]:
                raise blame(
                    "more microbatches are live on this rank than its memory bound",
                    plan,
                    rank,
                    place,
                    want=f"at most {bounds[rank]}",
                )
            live -= action.op in (W, Op.BACKWARD) or (action.op is F and not plan.trains)


def check_messages(plan: Plan, places: Mapping[Item, tuple[int, int]]) -> None:
    """Raise `PlanError` for a send or receive without its counterpart, and for a use before the load or receive."""
    for rank, row in enumerate(plan.rows):
        here: set[Item | None] = set()
        for place, action in enumerate(row):
            if action.stage is None:
                continue
            _check_other_side(plan, places, rank, place)
            for item in needs_here(action, plan):
                if item not in here:
                    late = "comes after it" if places.get(item, (None, 0))[0] == rank else "is missing"
                    raise blame(
                        f"what this action needs {late}",
                        plan,
                        rank,
                        place,
                        want=f"{Action(item[1], item[0], item[2])} before it on rank {rank}",
                    )
            here.add(gives(action))


def _check_other_side(plan: Plan, places: Mapping[Item, tuple[int, int]], rank: int, place: int) -> None:
    action = plan.rows[rank][place]
    stage, i = action.stage, action.microbatch
    assert stage is not None and i is not None
    if action.op is Op.LOAD and stage not in (0, plan.num_stages - 1):
        raise blame("this stage does not use loads", plan, rank, place, want="loads on the first and the last stage")
    if action.op not in OTHER_SIDE:
        return
    step, op = OTHER_SIDE[action.op]
    other = stage + step
    if plan.placement.get(other, rank) == rank:
        want = f"stage {other} on another rank" if other in plan.placement else f"a stage {other}"
        raise blame("there is no other rank for this message", plan, rank, place, want=want)
    if (op, other, i) not in places:
        fault = "the send has no receive" if action.op in SENDS else "the receive has no send"
        raise blame(fault, plan, rank, place, want=f"{Action(other, op, i)} on rank {plan.placement[other]}")
