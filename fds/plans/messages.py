"""Check the loads and messages of a lowered plan."""

from __future__ import annotations

from collections.abc import Mapping

from fds.plans.actions import SENDS, Action, Op
from fds.plans.dependencies import OTHER_SIDE, Item, gives, needs_here
from fds.plans.order import blame
from fds.plans.plan import Plan


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
