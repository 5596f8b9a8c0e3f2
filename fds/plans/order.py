"""What actions wait for, an order that respects it, and errors that mark an action in the grid of ranks and time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence

import attrs

from fds.errors import PlanError
from fds.plans.plan import COMPUTE, RECVS, SENDS, Action, Op, Plan

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


@attrs.frozen
class Walk:
    """How far a plan gets when every rank does its row in order, each action once its dependencies are done."""

    steps: tuple[tuple[int, int, Action], ...]  # (tick, rank, action), in order
    places: tuple[int, ...]  # number of actions that each rank has done


def linear(plan: Plan) -> tuple[tuple[int, Action], ...]:
    """Return (rank, action) of a whole plan, in an order that keeps every row and respects all dependencies.

    Actions are ordered by time, if every computation takes one tick and the rest none, and by rank within a tick: one
    process can run them in this order. Raises `PlanError` if ranks wait for each other.

    A receive comes after its send. If that is not possible for the whole plan, as after `overlap`, a receive may come
    before its send, and the use of the message comes after the send.

    >>> linear(Plan.of([["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]]))
    ((0, 0F0), (0, 0F1), (1, 1F0), (1, 1BW0), (0, 0BW0), (1, 1F1), (1, 1BW1), (0, 0BW1))
    """
    return tuple((rank, action) for _, rank, action in in_ticks(plan))


def in_ticks(plan: Plan) -> tuple[tuple[int, int, Action], ...]:
    """Return (tick, rank, action) of a whole plan, in the order of `linear`. Raises `PlanError`."""
    need = lambda action: needs(action, plan.num_stages)
    if any(action.op in RECVS for row in plan.rows for action in row):
        done = walk(plan, need)
        if len(done.steps) == sum(map(len, plan.rows)):
            return done.steps
        need = rendezvous(plan)
    return finish_walk(plan, need, "ranks wait for each other").steps


def finish_walk(plan: Plan, need: Needs, what: str) -> Walk:
    """Walk a plan to its end. Raises `PlanError` with the cycle if ranks wait for each other."""
    done = walk(plan, need)
    for rank, row in enumerate(plan.rows):
        if done.places[rank] < len(row):
            raise _cycle_error(plan, done.places, need, what, rank)
    return done


def walk(plan: Plan, need: Needs, *, timed: Collection[Op] = COMPUTE) -> Walk:
    """Walk a plan as far as possible; the operations in `timed` take one tick, the others none."""
    steps: list[tuple[int, int, Action]] = []
    places = [0] * plan.num_ranks
    since: dict[Item, int] = {}  # the tick from which an item is available
    waiting: dict[Item, list[int]] = {}  # the ranks that wait for an item
    queue = [(0, rank) for rank in range(plan.num_ranks)]  # (tick, rank): when to try a rank again
    while queue:
        tick, rank = heapq.heappop(queue)
        row = plan.rows[rank]
        while places[rank] < len(row):
            action = row[places[rank]]
            missing = [item for item in need(action) if since.get(item, tick + 1) > tick]
            if missing:
                when = since.get(missing[0])
                if when is None:
                    waiting.setdefault(missing[0], []).append(rank)
                else:
                    heapq.heappush(queue, (when, rank))
                break
            steps.append((tick, rank, action))
            places[rank] += 1
            end = tick + (action.op in timed)
            item = gives(action)
            if item is not None:
                since.setdefault(item, end)
                for other in waiting.pop(item, ()):
                    heapq.heappush(queue, (end, other))
            if end > tick:
                heapq.heappush(queue, (end, rank))
                break
    return Walk(tuple(steps), tuple(places))


def blame(what: str, plan: Plan, rank: int, place: int, *, want: str, need: Needs | None = None) -> PlanError:
    """Return an error about the action at index `place` of a rank's row, marked in the ranks x time grid."""
    columns: list[list[int]] = [[] for _ in plan.rows]
    each_takes_time = walk(plan, need or (lambda action: needs(action, plan.num_stages)), timed=set(Op))
    for tick, r, _ in each_takes_time.steps:
        columns[r].append(tick)
    for row, column in zip(plan.rows, columns, strict=True):  # actions that were not reached follow without gaps
        start = column[-1] + 1 if column else 0
        column.extend(range(start, start + len(row) - len(column)))
    where = f"rank {rank}, action {place}: {plan.rows[rank][place]}"
    return PlanError(what, where=where, got=grid(plan, columns, rank, place), want=want)


def _cycle_error(plan: Plan, places: Sequence[int], need: Needs, what: str, rank: int) -> PlanError:
    """Return the error that shows the cycle of waiting ranks reached from `rank`, or an item that no rank produces."""
    position = {gives(a): (r, p) for r, row in enumerate(plan.rows) for p, a in reversed(list(enumerate(row)))}
    waits: dict[int, str] = {}
    while rank not in waits:
        head = plan.rows[rank][places[rank]]
        unmet = [(item, position.get(item)) for item in need(head)]
        item, at = next((item, at) for item, at in unmet if at is None or at[1] >= places[at[0]])
        name = f"{item[1]}{item[0].value}{item[2]}"
        if at is None:
            return blame(what, plan, rank, places[rank], want=f"{name}, which {head} needs", need=need)
        waits[rank] = f"{head} on rank {rank} needs {name}"
        rank = at[0]
    cycle = list(waits)[list(waits).index(rank) :]
    want = ",\n".join([*(waits[r] for r in cycle[:8]), *["..."] * (len(cycle) > 8)])
    return blame(what, plan, rank, places[rank], want=want, need=need)


MAX_ROWS = 16
MAX_COLUMNS = 16
MAX_WIDTH = 100  # characters of the cells of a row


def grid(plan: Plan, columns: Sequence[Sequence[int]], rank: int, place: int) -> str:
    """Return the part of the ranks x time grid around an action, which is marked; a dot is a rank that waits.

    `columns` are the times of each rank's actions, increasing along a row.

    >>> print(grid(Plan.of([["0F0", "0BW0"], ["1F0", "1BW0"]]), [[0, 3], [1, 2]], 1, 1))
       0    1    2       3
    0: 0F0  .    .       0BW0
    1: .    1F0  >1BW0<  .
    """
    ranks = _window(rank, plan.num_ranks, MAX_ROWS)
    cells = {r: dict(zip(columns[r], map(str, plan.rows[r]), strict=True)) for r in ranks}
    centre = columns[rank][place]
    cells[rank][centre] = f">{plan.rows[rank][place]}<"
    num_columns = 1 + max(row[-1] for row in columns if row)
    shown = _window(centre, num_columns, MAX_COLUMNS)
    widths = {c: max(len(str(c)), *(len(cells[r].get(c, ".")) for r in ranks)) for c in shown}
    while sum(widths[c] + 2 for c in shown) > MAX_WIDTH and len(shown) > 1:
        shown = shown[1:] if centre - shown[0] > shown[-1] - centre else shown[:-1]
    label = 1 + len(str(ranks[-1]))
    before, after = "..  " * (shown[0] > 0), "  .." * (shown[-1] + 1 < num_columns)

    def line(name: str, texts: dict[int, str]) -> str:
        middle = "  ".join(texts.get(c, ".").ljust(widths[c]) for c in shown)
        return f"{name:<{label}} {before}{middle}{after}".rstrip()

    lines = [line("", {c: str(c) for c in shown}), *(line(f"{r}:", cells[r]) for r in ranks)]
    return "\n".join([lines[0], *["..."] * (ranks[0] > 0), *lines[1:], *["..."] * (ranks[-1] + 1 < plan.num_ranks)])


def _window(centre: int, size: int, most: int) -> range:
    """Return `most` numbers below `size` around `centre`, or all if there are fewer."""
    start = max(0, min(centre - most // 2, size - most))
    return range(start, min(size, start + most))
