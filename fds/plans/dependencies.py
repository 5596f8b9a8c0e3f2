"""Dependencies of actions: the item that each produces, and the items that it needs."""

from __future__ import annotations

from collections.abc import Callable

from fds.plans.actions import COMPUTE, RECVS, SENDS, Action, Op
from fds.plans.plan import Plan

Item = tuple[Op, int, int]  # the result of an action: (operation, stage, microbatch)
Needs = Callable[[Action], tuple[Item, ...]]

F, B, W, BW = Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD
OTHER_SIDE = {  # of a message: the offset of the other stage, and the operation there
    Op.SEND_ACTIVATION: (1, Op.RECV_ACTIVATION),
    Op.RECV_ACTIVATION: (-1, Op.SEND_ACTIVATION),
    Op.SEND_GRAD: (-1, Op.RECV_GRAD),
    Op.RECV_GRAD: (1, Op.SEND_GRAD),
}


def gives(action: Action) -> Item | None:
    """Return the item that an action produces; BW produces that of B, an action without microbatch None."""
    if action.stage is None or action.microbatch is None:
        return None
    return (B if action.op is BW else action.op), action.stage, action.microbatch


def needs(action: Action, num_stages: int) -> tuple[Item, ...]:
    """Return the items that an action needs, in a plan of this many stages.

    >>> needs(Action.parse("1BW0"), 3)
    ((<Op.FORWARD: 'F'>, 1, 0), (<Op.BACKWARD_INPUT: 'B'>, 2, 0))
    """
    op, stage, i = action.op, action.stage, action.microbatch
    if stage is None or i is None:
        return ()
    if op is F:
        return ((F, stage - 1, i),) if stage else ()
    if op is B or op is BW:
        return ((F, stage, i), (B, stage + 1, i)) if stage + 1 < num_stages else ((F, stage, i),)
    if op is W or op is Op.SEND_GRAD:
        return ((B, stage, i),)
    if op is Op.SEND_ACTIVATION:
        return ((F, stage, i),)
    if op is Op.RECV_ACTIVATION:
        return ((Op.SEND_ACTIVATION, stage - 1, i),)
    if op is Op.RECV_GRAD:
        return ((Op.SEND_GRAD, stage + 1, i),)
    return ()


def needs_here(action: Action, plan: Plan) -> tuple[Item, ...]:
    """Return the items that must be on the action's rank before it, in a lowered plan."""
    op, stage, i = action.op, action.stage, action.microbatch
    assert stage is not None and i is not None
    together = lambda other: plan.placement.get(other, -1) == plan.placement.get(stage)
    last = plan.num_stages - 1
    if op is F:
        loads = ((Op.LOAD, stage, i),) if stage in (0, last) else ()
        before = () if stage == 0 else ((F, stage - 1, i) if together(stage - 1) else (Op.RECV_ACTIVATION, stage, i),)
        return loads + before
    if op in COMPUTE and op is not W:
        after = () if stage == last else ((B, stage + 1, i) if together(stage + 1) else (Op.RECV_GRAD, stage, i),)
        return ((F, stage, i), *after)
    if op is Op.SEND_ACTIVATION:
        return ((F, stage, i),)
    return ((B, stage, i),) if op in (W, Op.SEND_GRAD) else ()


def rendezvous(plan: Plan) -> Needs:
    """Return what actions wait for if a send returns only when its receive is posted.

    A receive does not block: the receiver waits for the message where it is used, and only then needs the send.
    """

    def need(action: Action) -> tuple[Item, ...]:
        if action.stage is None or action.microbatch is None:
            return ()
        items = [
            (OTHER_SIDE[op][1], stage + OTHER_SIDE[op][0], i) if op in RECVS else (op, stage, i)
            for op, stage, i in needs_here(action, plan)
        ]
        if action.op in SENDS:
            step, receive = OTHER_SIDE[action.op]
            items.append((receive, action.stage + step, action.microbatch))
        return tuple(items)

    return need
