"""Passes: what they add, what they keep, and what runs after them."""

import copy
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from fds import plans
from fds.errors import PlanError
from fds.plans import Action, Op, Plan
from fds.plans.plan import COMPUTE, RECVS, SENDS
from tests.plans.cases import SCHEDULES, TRAINING, made_by, passes

CASES = list(passes(plans.gpipe(1, 1)))
lowered = made_by(SCHEDULES).map(plans.communicate)
OTHER = {Op.SEND_ACTIVATION: (1, Op.RECV_ACTIVATION), Op.SEND_GRAD: (-1, Op.RECV_GRAD)}


def computations(plan: Plan) -> list[list[tuple]]:
    return [[(a.stage, a.op, a.microbatch) for a in row if a.op in COMPUTE] for row in plan.rows]


def both_wait(plan: Plan) -> int:
    """Do the rows where a send and its receive each wait for the other; return how many actions are left undone."""
    rows = [list(row) for row in plan.rows]
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row and row[0].op not in SENDS | RECVS:
                row.pop(0)
                moved = True
        for row in rows:
            if row and row[0].op in OTHER:
                step, op = OTHER[row[0].op]
                peer = Action(row[0].stage + step, op, row[0].microbatch)
                other = next((r for r in rows if r and r[0] == peer), None)
                if other is not None:
                    row.pop(0)
                    other.pop(0)
                    moved = True
    return sum(map(len, rows))


@given(made_by(SCHEDULES))
def test_every_pass_gives_a_valid_plan_that_prints_and_parses(plan):
    for made in passes(plan).values():
        assert plans.validate(made) is made
        assert Plan.parse(str(made)) == made
        assert computations(made) == computations(plan)


@given(made_by(SCHEDULES))
def test_passes_are_pure(plan):
    before = copy.deepcopy(plan)
    assert passes(plan) == passes(plan)
    assert plan == before


# one order


@given(made_by(SCHEDULES), st.booleans())
def test_the_linear_order_keeps_rows_and_gives_what_is_needed(plan, lower):
    plan = plans.communicate(plan) if lower else plan
    order = plans.linear(plan)
    for rank, row in enumerate(plan.rows):
        assert tuple(action for r, action in order if r == rank) == row
    done = set()
    for _, action in order:
        s, i, last = action.stage, action.microbatch, plan.num_stages - 1
        backward = lambda stage, i=i: {f"{stage}B{i}", f"{stage}BW{i}"} & done
        if action.op is Op.FORWARD:
            assert s == 0 or f"{s - 1}F{i}" in done
        if action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            assert f"{s}F{i}" in done and (s == last or backward(s + 1))
        if action.op is Op.BACKWARD_WEIGHT:
            assert f"{s}B{i}" in done
        if action.op is Op.RECV_ACTIVATION:
            assert f"{s - 1}SEND_ACT{i}" in done
        if action.op is Op.RECV_GRAD:
            assert f"{s + 1}SEND_GRAD{i}" in done
        done.add(str(action))


def test_the_linear_order_keeps_together_what_is_done_at_one_moment():
    assert " ".join(str(action) for _, action in plans.linear(plans.one_f_one_b(3, 3))) == (
        "0F0 0F1 1F0 0F2 1F1 2F0 2BW0 1BW0 2F1 0BW0 1F2 2BW1 1BW1 2F2 0BW1 2BW2 1BW2 0BW2"
    )


@given(lowered, st.integers(0, 4))
def test_a_plan_that_overlaps_can_be_put_in_order(plan, ahead):
    """A message is used after it was sent, though its receive may be posted before."""
    order = [str(action) for _, action in plans.linear(plans.overlap(plan, ahead=ahead))]
    at = {text: place for place, text in enumerate(order)}
    for text, place in at.items():
        action = Action.parse(text)
        s, i = action.stage, action.microbatch
        if action.op is Op.FORWARD and f"{s}RECV_ACT{i}" in at:
            assert at[f"{s - 1}SEND_ACT{i}"] < place
        if action.op in (Op.BACKWARD, Op.BACKWARD_INPUT) and f"{s}RECV_GRAD{i}" in at:
            assert at[f"{s + 1}SEND_GRAD{i}"] < place


def test_an_order_of_what_is_not_there_is_refused():
    with pytest.raises(PlanError) as refused:
        plans.linear(Plan.of([["0BW0"]]))
    assert refused.value.want == "0F0, which 0BW0 needs"


def test_a_long_circle_is_shown_by_its_beginning():
    rows = [[f"{r}F0", f"{r}BW0"] for r in range(12)]
    with pytest.raises(PlanError, match="ranks wait for each other") as refused:
        plans.linear(Plan.of([[*rows[0], "12F0", "12BW0"], *rows[1:]]))
    assert refused.value.where == "rank 0, action 1: 0BW0"
    shown = refused.value.want.split(",\n")
    assert shown == [*(f"{r}BW0 on rank {r} needs {r + 1}B0" for r in range(8)), "..."]


# communicate


def test_what_communicate_prints():
    assert str(plans.communicate(plans.one_f_one_b(3, 2))).split("\n") == [
        "0: 0LOAD0 0F0 0SEND_ACT0 0LOAD1 0F1 0SEND_ACT1 0RECV_GRAD0 0BW0 0RECV_GRAD1 0BW1",
        "1: 1RECV_ACT0 1F0 1RECV_ACT1 1SEND_ACT0 1F1 1SEND_ACT1"
        " 1RECV_GRAD0 1BW0 1SEND_GRAD0 1RECV_GRAD1 1BW1 1SEND_GRAD1",
        "2: 2RECV_ACT0 2LOAD0 2F0 2RECV_ACT1 2BW0 2SEND_GRAD0 2LOAD1 2F1 2BW1 2SEND_GRAD1",
    ]


def test_nothing_is_sent_within_a_rank():
    assert str(plans.communicate(plans.zb_v(2, 1))).splitlines() == [
        "0: 0LOAD0 0F0 0SEND_ACT0 3RECV_ACT0 3LOAD0 3F0 3B0 3SEND_GRAD0 3W0 0RECV_GRAD0 0B0 0W0",
        "1: 1RECV_ACT0 1F0 2F0 2SEND_ACT0 2RECV_GRAD0 2B0 2W0 1B0 1SEND_GRAD0 1W0",
    ]


def test_one_load_for_a_stage_that_is_first_and_last():
    assert str(plans.communicate(plans.data_parallel(1, 2))) == "0: 0LOAD0 0F0 0BW0 0LOAD1 0F1 0BW1"


@given(lowered)
def test_messages_cannot_deadlock_though_both_sides_wait(plan):
    assert both_wait(plan) == 0


@given(made_by(SCHEDULES).flatmap(lambda plan: st.sampled_from(list(passes(plan).values()))))
def test_messages_of_one_kind_between_two_ranks_have_one_order_on_both_sides(plan):
    streams = {}
    for rank, row in enumerate(plan.rows):
        for action in row:
            s, i = action.stage, action.microbatch
            if action.op in OTHER:
                step, _ = OTHER[action.op]
                key = ("sent", rank, plan.placement[s + step], step)
                streams.setdefault(key, []).append((s, i))
            elif action.op in RECVS:
                step = 1 if action.op is Op.RECV_ACTIVATION else -1
                streams.setdefault(("got", plan.placement[s - step], rank, step), []).append((s - step, i))
    sent = {key[1:]: messages for key, messages in streams.items() if key[0] == "sent"}
    assert sent == {key[1:]: messages for key, messages in streams.items() if key[0] == "got"}


@given(made_by(SCHEDULES, ranks=4, microbatches=6))
def test_as_many_messages_as_there_are_neighbours_on_other_ranks(plan):
    away = sum(plan.placement[s] != plan.placement[s + 1] for s in range(plan.num_stages - 1))
    counts = Counter(a.op for row in plans.communicate(plan).rows for a in row)
    m = plan.num_microbatches
    assert counts[Op.SEND_ACTIVATION] == counts[Op.RECV_ACTIVATION] == away * m
    assert counts[Op.SEND_GRAD] == counts[Op.RECV_GRAD] == away * m * plan.trains
    assert counts[Op.LOAD] == m * len({0, plan.num_stages - 1})


@pytest.mark.parametrize("name", [case for case in CASES if case != "plan"])
def test_what_is_lowered_is_not_lowered_again(name):
    with pytest.raises(PlanError, match="only a plan of computations"):
        plans.communicate(passes(plans.one_f_one_b(2, 2))[name])


def test_a_stuck_plan_is_not_lowered():
    with pytest.raises(PlanError, match="wait for each other"):
        plans.communicate(Plan.of([["0BW0", "0F0"]]))


# overlap


@given(lowered, st.integers(0, 4))
def test_receives_move_up_past_so_many_computations_and_nothing_else_moves(plan, ahead):
    early = plans.overlap(plan, ahead=ahead)
    for before, after in zip(plan.rows, early.rows, strict=True):
        assert Counter(before) == Counter(after)
        still = lambda row: [a for a in row if a.op not in RECVS]
        receives = lambda row: [a for a in row if a.op in RECVS]
        assert still(before) == still(after) and receives(before) == receives(after)
        done = lambda row, action: sum(a.op in COMPUTE for a in row[: row.index(action)])
        for receive in receives(before):
            assert 0 <= done(before, receive) - done(after, receive) <= ahead


def test_what_overlap_prints():
    assert str(plans.overlap(plans.communicate(plans.one_f_one_b(2, 2)))).splitlines() == [
        "0: 0LOAD0 0F0 0SEND_ACT0 0LOAD1 0RECV_GRAD0 0F1 0SEND_ACT1 0RECV_GRAD1 0BW0 0BW1",
        "1: 1RECV_ACT0 1LOAD0 1RECV_ACT1 1F0 1BW0 1SEND_GRAD0 1LOAD1 1F1 1BW1 1SEND_GRAD1",
    ]


def test_a_gradient_is_not_awaited_before_its_own_forward():
    plan = plans.overlap(plans.communicate(plans.one_f_one_b(2, 1)), ahead=9)
    assert str(plan.rows[0]) == "(0LOAD0, 0F0, 0SEND_ACT0, 0RECV_GRAD0, 0BW0)"


def test_nothing_is_received_into_a_buffer_in_use():
    plan = Plan.parse("""
        0: 0LOAD0@0 0F0@0 0SEND_ACT0@0 0RECV_GRAD0@0 0BW0@0 0LOAD1@0 0F1@0 0SEND_ACT1@0 0RECV_GRAD1@0 0BW1@0
        1: 1RECV_ACT0@0 1LOAD0@0 1F0@0 1BW0@0 1SEND_GRAD0@0 1RECV_ACT1@0 1LOAD1@0 1F1@0 1BW1@0 1SEND_GRAD1@0
    """)
    assert plans.overlap(plan, ahead=9) == plan


def test_nothing_ahead_is_the_same_plan():
    plan = plans.communicate(plans.zb_h1(3, 4))
    assert plans.overlap(plan, ahead=0) == plan


@pytest.mark.parametrize("ahead", [-1, True, 1.0])
def test_ahead_is_a_count(ahead):
    with pytest.raises(PlanError, match="not a count"):
        plans.overlap(plans.communicate(plans.gpipe(1, 1)), ahead=ahead)


# finish


@given(made_by(TRAINING))
def test_every_rank_reduces_and_steps_and_owners_of_ties_reduce_those(plan):
    ends = [[str(a) for a in row[-3:]] for row in plans.finish(plan, tied=[plan.num_stages - 1]).rows]
    owner = plan.placement[plan.num_stages - 1]
    for rank, end in enumerate(ends):
        assert end[-1] == "STEP"
        assert end[:2] == ["REDUCE", "REDUCE_TIED"] if rank == owner else end[1] == "REDUCE"


@pytest.mark.parametrize(
    ("plan", "tied", "words"),
    [
        (plans.inference(2, 2), (), "no gradients to reduce"),
        (plans.finish(plans.gpipe(2, 2)), (), "is finished"),
        (plans.gpipe(2, 2), [0, 2], "unknown stages"),
    ],
)
def test_what_cannot_be_finished(plan, tied, words):
    with pytest.raises(PlanError, match=words):
        plans.finish(plan, tied=tied)


# buffers


@given(made_by(SCHEDULES), st.sampled_from(["buffers", "lowered, with buffers", "overlapped, then buffers"]))
def test_there_are_as_many_buffers_as_microbatches_at_once(plan, name):
    made = passes(plan)[name]
    assert plans.num_buffers(made) == {s: most_at_once(made, s) for s in range(plan.num_stages)}


def most_at_once(plan: Plan, stage: int) -> int:
    """Count, at every place of the row, the microbatches whose first action was and whose last was not yet before."""
    row = plan.rows[plan.placement[stage]]
    whose = [a.microbatch if a.stage == stage else None for a in row]
    started = lambda place: set(whose[: place + 1])
    to_come = lambda place: set(whose[place:])
    return max(len((started(place) & to_come(place)) - {None}) for place in range(len(row)))


@given(made_by(TRAINING))
def test_buffers_of_a_plan_of_computations_are_its_live_microbatches(plan):
    several = plans.assign_buffers(plan)
    stages = range(plan.num_stages)
    for stage in stages:
        own = Plan.of([[a for row in plan.rows for a in row if a.stage == stage]])
        assert plans.num_buffers(several)[stage] == most_at_once(own, stage)


@given(lowered)
def test_buffers_can_be_assigned_again(plan):
    once = plans.assign_buffers(plan)
    assert plans.assign_buffers(once) == once
    assert plans.num_buffers(plan) == plans.num_buffers(once)


def test_the_lowest_free_buffer_is_taken():
    plan = Plan.of([["0F0", "0F1", "0F2", "0BW1", "0BW0", "0F3", "0BW2", "0BW3"]])
    assert str(plans.assign_buffers(plan)) == "0: 0F0@0 0F1@1 0F2@2 0BW1@1 0BW0@0 0F3@0 0BW2@2 0BW3@0"


def test_the_end_of_a_step_has_no_buffer():
    assert str(plans.assign_buffers(plans.finish(plans.gpipe(1, 1)))) == "0: 0F0@0 0BW0@0 REDUCE STEP"
