"""Validation: every fault is found, and shown where it is."""

import pytest
from hypothesis import given, strategies as st

from fds import plans
from fds.errors import PlanError
from fds.plans import Op, Plan
from fds.plans.order import blame
from tests.plans.cases import SCHEDULES, changed, made_by, passes, peaks

PLAN = plans.one_f_one_b(2, 3)
LOWERED = plans.communicate(PLAN)


def fault(plan, **bounds) -> PlanError:
    with pytest.raises(PlanError) as refused:
        plans.validate(Plan.of(plan), **bounds)
    return refused.value


def without(plan: Plan, text: str) -> Plan:
    return Plan.of([[a for a in row if str(a) != text] for row in plan.rows])


def moved(plan: Plan, text: str, before: str) -> Plan:
    rank = next(r for r, row in enumerate(plan.rows) if before in map(str, row))
    rows = [list(map(str, row)) for row in without(plan, text).rows]
    rows[rank].insert(rows[rank].index(before), text)
    return Plan.of(rows)


BROKEN = {
    "lost work": (without(PLAN, "1BW2"), "work is missing", "1F2", "1B2 or 1BW2, too"),
    "lost forward": (without(PLAN, "0F1"), "work is missing", "0BW1", "0F1, too"),
    "half a backward": (changed(PLAN, 1, 5, "1B2"), "work is missing", "1B2", "1W2, too"),
    "a backward without its first half": (changed(PLAN, 1, 5, "1W2"), "work is missing", "1W2", "1B2 or 1BW2, too"),
    "a stage that does not train": (Plan.of([["0F0"], ["1F0", "1BW0"]]), "work is missing", "0F0", "0B0 or 0BW0, too"),
    "a stage that nobody has": (Plan.of([["0F0", "0BW0"], ["2F0", "2BW0"]]), "work is missing", "0BW0", "1F0, too"),
    "doubled work": (changed(PLAN, 0, 1, "0F1", "0F1"), "work is done twice", "0F1", "0F1 (action 1) alone"),
    "a whole and a half": (changed(PLAN, 1, 1, "1BW0", "1W0"), "work is done twice", "1W0", "1BW0 (action 1) alone"),
    "a stage on two ranks": (
        Plan.of([["0F0", "0BW0", "1F1"], ["1F0", "1BW0"]]),
        "a stage is on two ranks",
        "1F0",
        "stage 1 on rank 0 only",
    ),
    "wrong order": (moved(PLAN, "1BW2", before="1F2"), "ranks wait for each other", "1BW2", "1BW2 on rank 1 needs 1F2"),
    "two ranks that wait for each other": (
        moved(moved(PLAN, "0BW0", before="0F1"), "1F1", before="1BW0"),
        "ranks wait for each other",
        "0BW0",
        "0BW0 on rank 0 needs 1B0,\n1F1 on rank 1 needs 0F1",
    ),
    "no action": (Plan.of([["0F0", "F"]]), "not an action", "F", "such as 0F0"),
    "a step of a microbatch": (Plan.of([["0F0", "0STEP0"]]), "not an action", "0STEP0", "such as STEP"),
    "a missing receive": (
        without(LOWERED, "1RECV_ACT1"),
        "the send has no receive",
        "0SEND_ACT1",
        "1RECV_ACT1 on rank 1",
    ),
    "a missing send": (
        without(LOWERED, "1SEND_GRAD2"),
        "the receive has no send",
        "0RECV_GRAD2",
        "1SEND_GRAD2 on rank 1",
    ),
    "a missing message": (
        without(without(LOWERED, "1RECV_ACT1"), "0SEND_ACT1"),
        "what this action needs is missing",
        "1F1",
        "1RECV_ACT1 before it on rank 1",
    ),
    "a missing load of inputs": (
        without(LOWERED, "0LOAD1"),
        "what this action needs is missing",
        "0F1",
        "0LOAD1 before it on rank 0",
    ),
    "a missing load of targets": (
        without(LOWERED, "1LOAD1"),
        "what this action needs is missing",
        "1F1",
        "1LOAD1 before it on rank 1",
    ),
    "a late load": (
        moved(LOWERED, "0LOAD1", before="0SEND_ACT1"),
        "what this action needs comes after it",
        "0F1",
        "0LOAD1 before it on rank 0",
    ),
    "used before received": (
        moved(LOWERED, "0RECV_GRAD1", before="0RECV_GRAD2"),
        "what this action needs comes after it",
        "0BW1",
        "0RECV_GRAD1 before it on rank 0",
    ),
    "sent before computed": (
        moved(LOWERED, "1SEND_GRAD1", before="1BW1"),
        "what this action needs comes after it",
        "1SEND_GRAD1",
        "1B1 before it on rank 1",
    ),
    "a doubled message": (
        changed(LOWERED, 0, 2, "0SEND_ACT0", "0SEND_ACT0"),
        "work is done twice",
        "0SEND_ACT0",
        "0SEND_ACT0 (action 2) alone",
    ),
    "a message within a rank": (
        changed(plans.communicate(plans.zb_v(1, 1)), 0, 1, "0F0", "0SEND_ACT0"),
        "there is no other rank for this message",
        "0SEND_ACT0",
        "stage 1 on another rank",
    ),
    "a message beyond the last": (
        changed(LOWERED, 1, 2, "1F0", "1SEND_ACT0"),
        "there is no other rank for this message",
        "1SEND_ACT0",
        "a stage 2",
    ),
    "a send before its computation": (
        moved(LOWERED, "0SEND_ACT1", before="0F1"),
        "what this action needs comes after it",
        "0SEND_ACT1",
        "0F1 before it on rank 0",
    ),
    "a load in the middle": (
        changed(plans.communicate(plans.gpipe(3, 1)), 1, 0, "1RECV_ACT0", "1LOAD0"),
        "this stage does not use loads",
        "1LOAD0",
        "loads on the first and the last stage",
    ),
    "a deadlock of blocking sends": (
        moved(LOWERED, "1RECV_ACT1", before="1LOAD1"),
        "ranks wait for each other, since a send returns only when its receive is posted",
        "0SEND_ACT1",
        "0SEND_ACT1 on rank 0 needs 1RECV_ACT1,\n1SEND_GRAD0 on rank 1 needs 0RECV_GRAD0",
    ),
    "a shared buffer": (
        Plan.of([["0F0@0", "0F1@0", "0BW0@0", "0BW1@0"]]),
        "two microbatches share a buffer",
        "0F1@0",
        "another buffer: 0 is in use until 0BW0@0",
    ),
    "a changed buffer": (
        Plan.of([["0F0@0", "0BW0@1"]]),
        "a microbatch changes its buffer",
        "0BW0@1",
        "buffer 0, as before",
    ),
    "a step in the middle": (
        changed(PLAN, 0, 1, "0F1", "STEP"),
        "the end of a step is not at the end",
        "STEP",
        "REDUCE and REDUCE_TIED once after all other work, then STEP",
    ),
    "a reduction after the step": (
        changed(plans.finish(PLAN), 0, 7, "STEP", "REDUCE_TIED"),
        "the end of a step is not at the end",
        "REDUCE",
        "REDUCE and REDUCE_TIED once after all other work, then STEP",
    ),
    "two reductions": (
        changed(plans.finish(PLAN), 0, 6, "REDUCE", "REDUCE"),
        "the end of a step is not at the end",
        "REDUCE",
        "REDUCE and REDUCE_TIED once after all other work, then STEP",
    ),
    "a step on one rank only": (
        changed(plans.finish(PLAN), 1, 7),
        "a step ends on some ranks only",
        "REDUCE",
        "STEP on every rank",
    ),
}


@pytest.mark.parametrize(("plan", "what", "marked", "want"), BROKEN.values(), ids=BROKEN)
def test_a_fault_is_found_and_shown(plan, what, marked, want):
    error = fault(plan)
    assert (error.what, error.want) == (what, want)
    assert f">{marked}<" in error.got and error.got.count(">") == 1
    rank, place = (int(word.strip(":,")) for word in error.where.split()[1:4:2])
    assert str(plan.rows[rank][place]) == marked
    line = next(line for line in error.got.splitlines() if ">" in line)
    assert line.startswith(f"{rank}:")


def test_the_picture_of_a_fault():
    assert str(fault(without(PLAN, "1BW2"))) == (
        "work is missing\n"
        "  where: rank 1, action 4: 1F2\n"
        "  got:      0    1    2     3     4     5      6\n"
        "         0: 0F0  0F1  .     0BW0  0F2   0BW1   0BW2\n"
        "         1: .    1F0  1BW0  1F1   1BW1  >1F2<  .\n"
        "  want:  1B2 or 1BW2, too"
    )


@pytest.mark.parametrize("plan", [Plan(()), Plan.of([[], []]), Plan.of([["STEP"]])])
def test_an_empty_plan_is_refused(plan):
    assert fault(plan).what == "the plan is empty"


@given(made_by(SCHEDULES, ranks=3, microbatches=4).filter(lambda p: p.num_microbatches > 1), st.data())
def test_no_action_of_a_lowered_plan_can_be_left_out_or_done_twice(plan, data):
    plan = plans.communicate(plan)
    rank = data.draw(st.integers(0, plan.num_ranks - 1))
    place = data.draw(st.integers(0, len(plan.rows[rank]) - 1))
    action = str(plan.rows[rank][place])
    fault(changed(plan, rank, place))
    fault(changed(plan, rank, place, action, action))


@given(made_by(SCHEDULES, ranks=3, microbatches=4), st.data())
def test_a_plan_that_is_found_valid_can_be_put_in_order(plan, data):
    """Swap two neighbours: either it is refused, or nothing but the order of a row has changed."""
    name = data.draw(st.sampled_from(["plan", "lowered", "overlapped"]))
    plan = passes(plan)[name]
    rank = data.draw(st.integers(0, plan.num_ranks - 1))
    row = list(plan.rows[rank])
    place = data.draw(st.integers(0, len(row) - 2)) if len(row) > 1 else 0
    row[place : place + 2] = reversed(row[place : place + 2])
    swapped = Plan.of([*plan.rows[:rank], row, *plan.rows[rank + 1 :]])
    try:
        plans.validate(swapped)
    except PlanError as error:
        assert "<" in error.got
    else:
        assert len(plans.linear(swapped)) == sum(map(len, plan.rows))


# memory


@given(made_by(SCHEDULES))
def test_the_memory_bound_is_the_peak_of_live_microbatches(plan):
    most = peaks(plan, "W") if plan.trains else [1] * plan.num_ranks
    for made in passes(plan).values():
        plans.validate(made, memory_bound=most)
        plans.validate(made, memory_bound=max(most))
        error = fault(made, memory_bound=max(most) - 1)
        assert "memory bound" in error.what and error.want == f"at most {max(most) - 1}"


def test_the_forward_that_is_too_much_is_marked():
    error = fault(plans.gpipe(2, 3), memory_bound=[3, 2])
    assert error.where == "rank 1, action 2: 1F2"
    assert ">1F2<" in error.got


@pytest.mark.parametrize("bound", [[1], [1, 2, 3], [1, 2.5], 1.5, "12", True])
def test_what_is_no_memory_bound_is_refused(bound):
    assert fault(PLAN, memory_bound=bound).where == "validate(memory_bound=...)"


def test_rows_are_read_wherever_a_plan_is_taken():
    rows = [["0F0", "0BW0"], "1F0 1BW0"]
    plan = Plan.of(rows)
    lowered = plans.communicate(plan)
    texts = [list(map(str, row)) for row in lowered.rows]
    assert plans.validate(rows) == plan
    assert plans.communicate(rows) == lowered
    assert plans.overlap(texts) == plans.overlap(lowered)
    assert plans.assign_buffers(texts) == plans.assign_buffers(lowered)
    assert plans.finish(texts, tied=[1]) == plans.finish(lowered, tied=[1])
    assert plans.num_buffers(rows) == {0: 1, 1: 1}


@pytest.mark.parametrize(
    ("rows", "hint"),
    [
        (["0: 0F0 0BW0", "1: 1F0 1BW0"], "Plan.parse"),
        ("0: 0F0 0BW0\n1: 1F0 1BW0", "Plan.parse"),
        ([["F0"]], "the stage comes first: 0F0"),
        ([["0FF0"]], "did you mean"),
        ([["BV0"]], "did you mean"),
    ],
)
def test_what_is_no_action_says_what_was_meant(rows, hint):
    with pytest.raises(PlanError, match=r"not an? (action|plan)") as refused:
        plans.validate(rows)
    assert hint in refused.value.hint


NO_PLANS = [3, None, [3], [[3]], [["0F0", 1.5]], "0F0 0BW0"]


@pytest.mark.parametrize("rows", NO_PLANS, ids=str)
@pytest.mark.parametrize("read", [plans.Plan, plans.Plan.of, plans.validate, plans.simulate])
def test_what_is_no_plan_is_refused_wherever_one_is_read(read, rows):
    with pytest.raises(PlanError, match=r"not a plan") as refused:
        read(rows)
    assert "rows such as" in refused.value.want


def test_a_plan_is_made_of_rows_of_texts_as_it_is_read_from_them():
    rows = [["0F0", None, "0BW0"], "1F0 1BW0"]
    assert plans.Plan(rows) == plans.Plan.of(rows) == plans.validate(rows) == plans.Plan.parse(str(plans.Plan(rows)))


# the grid


@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_the_grid_of_a_large_plan_is_a_window_around_the_fault(p, m, data):
    plan = plans.gpipe(p, m)
    rank, place = data.draw(st.integers(0, p - 1)), data.draw(st.integers(0, 2 * m - 1))
    error = blame("look", plan, rank, place, want="")
    lines = error.got.splitlines()
    rows = [line for line in lines[1:] if line != "..."]
    assert len(rows) == min(p, 16)
    assert sum(f">{plan.rows[rank][place]}<" in line for line in rows) == 1
    assert len(lines[0].replace("..", "").split()) <= 16
    assert all(len(line) <= 120 for line in lines)
    assert lines.count("...") == (not rows[0].startswith("0:")) + (not rows[-1].startswith(f"{p - 1}:"))


def test_a_large_plan_is_lowered_and_checked_whole():
    plan = plans.overlap(plans.communicate(plans.zb_h1(64, 128)))
    assert plans.validate(plan, memory_bound=64) is plan
    assert ">" in fault(without(plan, "40W100")).got
    counts = [sum(a.op is Op.BACKWARD_WEIGHT for a in row) for row in plan.rows]
    assert counts == [128] * 64
