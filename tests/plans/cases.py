"""The schedules with the sizes that they take, and what is counted in their plans the slow and plain way."""

from collections.abc import Iterable, Iterator, Sequence

from hypothesis import strategies as st

from fds import plans
from fds.plans import Action, Op, Plan

SCHEDULES = {
    "gpipe": plans.gpipe,
    "one_f_one_b": plans.one_f_one_b,
    "interleaved(1)": plans.interleaved(1),
    "interleaved(2)": plans.interleaved(2),
    "interleaved(3)": plans.interleaved(3),
    "zb_h1": plans.zb_h1,
    "zb_h2": plans.zb_h2,
    "zb_v": plans.zb_v,
    "dualpipe_v": plans.dualpipe_v,
    "inference": plans.inference,
    "data_parallel": plans.data_parallel,
}
TRAINING = [name for name in SCHEDULES if name != "inference"]


def sizes(name: str, ranks: Iterable[int], microbatches: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of these numbers of ranks and microbatches that a schedule takes."""
    for p in ranks:
        if p == 1 or name != "data_parallel":
            for m in microbatches:
                if (m % p == 0 or "interleaved" not in name) and (m >= 2 * p or name != "dualpipe_v"):
                    yield p, m


def made_by(names: Iterable[str], ranks: int = 5, microbatches: int = 12) -> st.SearchStrategy[Plan]:
    """Draw plans of these schedules."""
    pairs = {name: list(sizes(name, range(1, ranks + 1), range(1, microbatches + 1))) for name in names}
    one = lambda name: st.sampled_from(pairs[name]).map(lambda pair: Plan.of(SCHEDULES[name](*pair)))
    return st.sampled_from(list(pairs)).flatmap(one)


def passes(plan: Plan) -> dict[str, Plan]:
    """Return what the passes make of a plan."""
    lowered = plans.communicate(plan)
    made = {
        "plan": plan,
        "buffers": plans.assign_buffers(plan),
        "lowered": lowered,
        "overlapped": plans.overlap(lowered),
        "far ahead": plans.overlap(lowered, ahead=3),
        "lowered, with buffers": plans.assign_buffers(lowered),
        "overlapped, then buffers": plans.assign_buffers(plans.overlap(lowered)),
        "buffers, then overlapped": plans.overlap(plans.assign_buffers(lowered), ahead=2),
    }
    if plan.trains:
        made["whole"] = plans.finish(made["overlapped, then buffers"], tied=[0, plan.num_stages - 1])
    return made


def peaks(plan: Plan, ends: str) -> list[int]:
    """Return each rank's peak of (stage, microbatch)s between their F and `ends`: the end of their B, or of their W."""
    last = {"B": {Op.BACKWARD_INPUT, Op.BACKWARD}, "W": {Op.BACKWARD_WEIGHT, Op.BACKWARD}}[ends]
    found = []
    for row in plan.rows:
        live: set[tuple[int | None, int | None]] = set()
        found.append(0)
        for action in row:
            if action.op is Op.FORWARD:
                live.add((action.stage, action.microbatch))
            found[-1] = max(found[-1], len(live))
            if action.op in last:
                live.remove((action.stage, action.microbatch))
    return found


def spans(plan: Plan, f: float = 1, b: float = 1, w: float = 1) -> tuple[float, float]:
    """Return the idle time from the first start to the last end of all, and of the rank with the largest span.

    By rounds over all ranks until nothing changes, from the rules of F, B and W alone: no code of fds.plans.order.
    """
    cost = {"F": f, "B": b, "W": w, "BW": b + w}
    end: dict[str, float] = {}
    clocks, starts, places = [0.0] * plan.num_ranks, [0.0] * plan.num_ranks, [0] * plan.num_ranks
    while any(place < len(row) for place, row in zip(places, plan.rows, strict=True)):
        before = list(places)
        for rank, row in enumerate(plan.rows):
            while places[rank] < len(row):
                action = row[places[rank]]
                s, i = action.stage, action.microbatch
                waits = {"F": [f"{s - 1}F{i}"] if s else [], "W": [f"{s}B{i}"]}.get(
                    action.op.value, [f"{s}F{i}", *([f"{s + 1}B{i}"] if s + 1 < plan.num_stages else [])]
                )
                if not all(item in end for item in waits):
                    break
                start = max([clocks[rank], *(end[item] for item in waits)])
                starts[rank] = start if places[rank] == 0 else starts[rank]
                clocks[rank] = start + cost[action.op.value]
                end[f"{s}{action.op.value.removesuffix('W') or 'W'}{i}"] = clocks[rank]
                places[rank] += 1
        assert places != before, "stuck"
    busy = max(sum(cost[a.op.value] for a in row) for row in plan.rows)
    return max(clocks) - busy, max(c - s for c, s in zip(clocks, starts, strict=True)) - busy


def changed(plan: Plan, rank: int, place: int, *instead: str) -> Plan:
    """Return the plan with other actions in place of one."""
    rows = [list(row) for row in plan.rows]
    rows[rank][place : place + 1] = map(Action.parse, instead)
    return Plan.of(rows)
