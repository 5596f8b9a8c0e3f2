"""`validate`: check that a plan does all work once, does not deadlock, and keeps to a memory bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from fds.errors import PlanError, is_int
from fds.plans.lowering import last_uses
from fds.plans.order import OTHER_SIDE, B, F, Item, W, blame, finish_walk, gives, needs, needs_here, rendezvous
from fds.plans.plan import COMPUTE, RECVS, SENDS, Action, Op, Plan, Rows

Places = dict[Item, tuple[int, int]]  # item -> (rank, index) of the action that produces it
Fault = tuple[str, int, int, str]  # what is wrong, rank and index of the action to blame, what would be right
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
    places: Places = {}
    _raise_first(plan, itertools.chain(_forms(plan), _repeats(plan, places), _gaps(plan, places), _ends(plan)))
    if any(action.op in OF_MICROBATCH - COMPUTE for row in plan.rows for action in row):
        _raise_first(plan, _messages(plan, places))
        what = "ranks wait for each other, since a send returns only when its receive is posted"
        finish_walk(plan, rendezvous(plan), what)
    else:
        finish_walk(plan, lambda action: needs(action, plan.num_stages), "ranks wait for each other")
    _raise_first(plan, _buffers(plan))
    if memory_bound is not None:
        _raise_first(plan, _memory(plan, _bounds(plan, memory_bound)))
    return plan


def _raise_first(plan: Plan, faults: Iterator[Fault]) -> None:
    for what, rank, place, want in faults:
        raise blame(what, plan, rank, place, want=want)


def _forms(plan: Plan) -> Iterator[Fault]:
    for rank, row in enumerate(plan.rows):
        for place, action in enumerate(row):
            if (action.op in OF_MICROBATCH) != (action.stage is not None and action.microbatch is not None):
                want = f"0{action.op.value}0" if action.op in OF_MICROBATCH else action.op.value
                yield "not an action", rank, place, f"such as {want}"


def _repeats(plan: Plan, places: Places) -> Iterator[Fault]:
    """Yield stages on two ranks and items that are done twice; note in `places` where each item is."""
    homes: dict[int, int] = {}
    for rank, row in enumerate(plan.rows):
        for place, action in enumerate(row):
            stage, microbatch = action.stage, action.microbatch
            if stage is None or microbatch is None:
                continue
            if homes.setdefault(stage, rank) != rank:
                yield "a stage is on two ranks", rank, place, f"stage {stage} on rank {homes[stage]} only"
            for op in (B, W) if action.op is Op.BACKWARD else (action.op,):
                if (op, stage, microbatch) in places:
                    first = places[op, stage, microbatch][1]
                    yield "work is done twice", rank, place, f"{row[first]} (action {first}) alone"
                places[op, stage, microbatch] = rank, place


def _gaps(plan: Plan, places: Places) -> Iterator[Fault]:
    if not plan.num_stages:
        raise PlanError("the plan is empty", got=str(plan) or "no rows", want="such as 0: 0F0 0BW0")
    ops = (F, B, W) if plan.trains else (F,)
    for stage, i, op in itertools.product(range(plan.num_stages), range(plan.num_microbatches), ops):
        if (op, stage, i) not in places:  # shown at the last work on this microbatch at the nearest stage that has any
            far = lambda item, stage=stage, i=i: (item[2] != i, abs(item[1] - stage), -places[item][1])
            either = f" or {Action(stage, Op.BACKWARD, i)}" if op is B else ""
            yield "work is missing", *places[min(places, key=far)], f"{Action(stage, op, i)}{either}, too"


def _ends(plan: Plan) -> Iterator[Fault]:
    everywhere = {a.op for row in plan.rows for a in row} & {Op.REDUCE_GRADS, Op.OPTIMIZER_STEP}
    for rank, row in enumerate(plan.rows):
        end = [place for place, action in enumerate(row) if action.op not in OF_MICROBATCH]
        ops = [row[place].op for place in end]
        steps_last = Op.OPTIMIZER_STEP not in ops[:-1]
        if end != list(range(len(row) - len(end), len(row))) or len(set(ops)) < len(ops) or not steps_last:
            want = "REDUCE and REDUCE_TIED once after all other work, then STEP"
            yield "the end of a step is not at the end", rank, end[0], want
        if row and (lacking := everywhere - set(ops)):
            want = " and ".join(sorted(op.value for op in lacking)) + " on every rank"
            yield "a step ends on some ranks only", rank, len(row) - 1, want


def _buffers(plan: Plan) -> Iterator[Fault]:
    for rank, row in enumerate(plan.rows):
        last = last_uses(row)
        buffer_of: dict[tuple[int, int], int] = {}  # (stage, microbatch) -> buffer
        owner: dict[tuple[int, int], int] = {}  # (stage, buffer) -> microbatch, while it is under way
        for place, action in enumerate(row):
            stage, microbatch, buffer = action.stage, action.microbatch, action.buffer
            if stage is None or microbatch is None or buffer is None:
                continue
            if buffer_of.setdefault((stage, microbatch), buffer) != buffer:
                want = f"buffer {buffer_of[stage, microbatch]}, as before"
                yield "a microbatch changes its buffer", rank, place, want
            if owner.setdefault((stage, buffer), microbatch) != microbatch:
                want = f"another buffer: {buffer} is in use until {row[last[stage, owner[stage, buffer]]]}"
                yield "two microbatches share a buffer", rank, place, want
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


def _memory(plan: Plan, bounds: list[int]) -> Iterator[Fault]:
    for rank, row in enumerate(plan.rows):
        live = 0
        for place, action in enumerate(row):
            live += action.op is F
            if live > bounds[rank]:
                what = "more microbatches are live on this rank than its memory bound"
                yield what, rank, place, f"at most {bounds[rank]}"
            live -= action.op in (W, Op.BACKWARD) or (action.op is F and not plan.trains)


def _messages(plan: Plan, places: Places) -> Iterator[Fault]:
    """Yield sends and receives without their counterpart, and uses before the load or receive."""
    for rank, row in enumerate(plan.rows):
        here: set[Item | None] = set()
        for place, action in enumerate(row):
            stage, i = action.stage, action.microbatch
            if stage is None or i is None:
                continue
            if action.op is Op.LOAD and stage not in (0, plan.num_stages - 1):
                yield "this stage does not use loads", rank, place, "loads on the first and the last stage"
            if action.op in OTHER_SIDE:
                step, op = OTHER_SIDE[action.op]
                other = stage + step
                if plan.placement.get(other, rank) == rank:
                    want = f"stage {other} on another rank" if other in plan.placement else f"a stage {other}"
                    yield "there is no other rank for this message", rank, place, want
                elif (op, other, i) not in places:
                    what = "the send has no receive" if action.op in SENDS else "the receive has no send"
                    yield what, rank, place, f"{Action(other, op, i)} on rank {plan.placement[other]}"
            for item in needs_here(action, plan):
                if item not in here:
                    late = "comes after it" if places.get(item, (None, 0))[0] == rank else "is missing"
                    want = f"{Action(item[1], item[0], item[2])} before it on rank {rank}"
                    yield f"what this action needs {late}", rank, place, want
            here.add(gives(action))
