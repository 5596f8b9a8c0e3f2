"""The simulator gives the numbers of the papers, and of small examples worked by hand."""

import pytest
from hypothesis import given, strategies as st

from fds.errors import PlanError
from fds.plans.lowering import assign_buffers, communicate, finish, overlap
from fds.plans.measuring import LayerCosts
from fds.plans.plan import Plan
from fds.plans.schedules import (
    data_parallel,
    dualpipe_v,
    gpipe,
    inference,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_h2,
    zb_v,
)
from fds.plans.search import searched
from fds.plans.simulator import Costs, simulate

TRAINING = [gpipe, one_f_one_b, interleaved(2), zb_h1, zb_h2, zb_v, dualpipe_v]
RANKS = st.integers(1, 6)
TIMES = st.integers(1, 9)  # whole numbers: sums of them are exact


@given(st.sampled_from([gpipe, one_f_one_b]), RANKS, st.integers(1, 20), TIMES, TIMES, TIMES)
def test_gpipe_and_1f1b_lose_what_one_microbatch_takes_on_all_other_ranks(schedule, p, m, f, b, w):
    line = simulate(schedule(p, m), Costs(f, b, w))
    assert line.makespan == (m + p - 1) * (f + b + w)
    assert line.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert line.idle_fraction == pytest.approx((p - 1) / (m + p - 1))


@given(RANKS, st.integers(1, 4), st.integers(1, 4), TIMES, TIMES, TIMES)
def test_interleaving_divides_the_bubble_by_the_chunks(p, rounds, chunks, f, b, w):
    m = rounds * p
    line = simulate(interleaved(chunks)(p, m), Costs(f, b, w))
    assert line.bubble_fraction == pytest.approx((p - 1) / (chunks * m + p - 1))


@given(st.integers(1, 8), st.integers(0, 20), TIMES)
def test_zb_h1_has_a_third_of_the_bubble_of_1f1b(p, more, t):
    m = p + more
    lost = (p - 1) * t
    line = simulate(zb_h1(p, m), Costs(t, t, t))
    assert line.bubble_fraction == pytest.approx(lost / (lost + m * 3 * t))


@given(st.integers(1, 6), st.integers(0, 12), TIMES, TIMES, st.data())
def test_zb_h1_and_zb_h2_lose_what_the_paper_says(p, more, f, b, data):
    """The formulas hold while W is no longer than what runs beside it: F, and for ZB-H2 B too."""
    m = 2 * p - 1 + more
    w = data.draw(st.integers(1, f))
    lost = (p - 1) * (f + b - w)
    assert simulate(zb_h1(p, m), Costs(f, b, w)).bubble_fraction == pytest.approx(lost / (lost + m * (f + b + w)))
    w = min(w, b)
    lost = (p - 1) * (f + b - 2 * w)
    assert simulate(zb_h2(p, m), Costs(f, b, w)).bubble_fraction == pytest.approx(lost / (lost + m * (f + b + w)))


@given(st.integers(1, 8), st.integers(0, 20), TIMES, st.sampled_from([zb_h2, zb_v]))
def test_zb_h2_and_zb_v_have_no_bubble_once_the_pipeline_is_full(p, more, t, schedule):
    line = simulate(schedule(p, 2 * p - 1 + more), Costs(t, t, t))
    assert line.bubble_fraction == 0
    assert line.idle_fraction > 0 or p == 1  # for ranks still begin one after the other


@given(RANKS, st.integers(1, 16))
def test_peaks_of_live_microbatches(p, m):
    ranks = range(p)
    assert simulate(gpipe(p, m)).peak_live == (m,) * p
    assert simulate(one_f_one_b(p, m)).peak_live == tuple(min(m, p - r) for r in ranks)
    assert simulate(zb_h1(p, m)).peak_live == (min(m, p),) * p
    assert simulate(zb_h2(p, m)).peak_live == (min(m, 2 * p - 1),) * p
    assert simulate(inference(p, m)).peak_live == (1,) * p
    assert simulate(data_parallel(1, m)).peak_live == (1,)


def test_stages_of_one_rank_count_each_for_itself():
    line = simulate([["0F0", "1F0", "0F1", "1BW0", "0BW0", "1F1", "1BW1", "0BW1"]], Costs(activation_bytes=[10, 100]))
    assert line.peak_live == (3,)
    assert line.peak_bytes == (120,)


def test_a_microbatch_is_held_until_its_weight_gradient():
    assert simulate([["0F0", "0B0", "0F1", "0B1", "0W0", "0W1"]]).peak_live == (2,)
    assert simulate([["0F0", "0B0", "0W0", "0F1", "0B1", "0W1"]]).peak_live == (1,)


def test_sums_of_bytes_do_not_drift():
    line = simulate(one_f_one_b(3, 50), Costs(activation_bytes=0.1))
    assert line.peak_bytes == (3 * 0.1, 2 * 0.1, 0.1)


def test_a_message_takes_its_latency_and_its_bytes():
    costs = Costs(message_bytes=[6, 100], latency=0.5, bytes_per_second=4)  # 2 from stage 0 to 1 and back
    line = simulate([["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1F1", "1BW1"]], costs)
    at = {str(event.action): (event.start, event.end) for row in line.rows for event in row}
    assert at == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "0BW0": (8, 10),
        "0BW1": (11, 13),
        "1F0": (3, 4),
        "1BW0": (4, 6),
        "1F1": (6, 7),
        "1BW1": (7, 9),
    }
    assert line.makespan == 13
    assert line.busy == (6, 6)
    assert line.spans == (13, 6)
    assert line.bubble_fraction == 1 - 6 / 13
    assert line.idle_fraction == 1 - 12 / 26


def test_between_stages_of_one_rank_nothing_is_sent():
    assert simulate([["0F0", "1F0", "1BW0", "0BW0"]], Costs(latency=7)).makespan == 6


def test_a_fused_backward_costs_both_halves():
    costs = Costs(1, 3, 5)
    assert simulate([["0F0", "0BW0"]], costs).makespan == simulate([["0F0", "0B0", "0W0"]], costs).makespan == 9


def test_a_message_leaves_when_it_is_sent_and_not_when_it_is_asked_for():
    rows = [["0F0", "0SEND_ACT0", "0F1", "0SEND_ACT1"], ["1RECV_ACT1", "1F1", "1RECV_ACT0", "1F0"]]
    line = simulate(rows, Costs(latency=4))
    at = {str(event.action): (event.start, event.end) for row in line.rows for event in row}
    assert at["0SEND_ACT0"] == (1, 1)
    assert at["1RECV_ACT1"] == (0, 6)  # posted, and there
    assert at["1F1"] == (6, 7)
    assert at["1RECV_ACT0"] == (7, 7)  # it came at 5
    assert at["1F0"] == (7, 8)


@given(st.sampled_from([*TRAINING, inference]), st.integers(1, 4), st.integers(1, 3), st.data())
def test_a_lowered_plan_takes_the_same_time(schedule, p, rounds, data):
    plan = schedule(p, 2 * p * rounds)
    per_stage = st.lists(TIMES, min_size=plan.num_stages, max_size=plan.num_stages)
    times = [data.draw(per_stage) for _ in range(3)]
    costs = Costs(*times, latency=data.draw(st.integers(0, 3)))
    lowered = communicate(plan)
    expected = simulate(plan, costs)
    for other in (lowered, overlap(lowered), overlap(assign_buffers(lowered))):
        found = simulate(finish(other) if plan.trains else other, costs)
        assert (found.makespan, found.peak_live) == (expected.makespan, expected.peak_live)
        assert found.bubble_fraction == expected.bubble_fraction


def test_every_action_is_an_event_in_its_row():
    plan = finish(overlap(communicate(one_f_one_b(3, 4))))
    line = simulate(plan)
    assert Plan(tuple(tuple(event.action for event in row) for row in line.rows)) == plan


def test_the_simulation_is_that_of_a_loop_over_ticks():
    """Another way to the same: at every tick each rank that is free begins what it can."""
    plan = zb_v(3, 7)
    ends: dict[str, int] = {}
    rows, free = [list(row) for row in plan.rows], [0] * 3
    needs = {
        "F": lambda s, i: [f"{s - 1}F{i}"] if s else [],
        "B": lambda s, i: [f"{s}F{i}", *([f"{s + 1}B{i}"] if s < 5 else [])],
        "W": lambda s, i: [f"{s}B{i}"],
    }
    for tick in range(100):
        for rank, row in enumerate(rows):
            if row and free[rank] <= tick:
                a = row[0]
                if all(ends.get(need, 1000) <= tick for need in needs[a.op.value](a.stage, a.microbatch)):
                    free[rank] = ends[str(row.pop(0))] = tick + 1
    assert {str(e.action): e.end for row in simulate(plan).rows for e in row} == ends


def test_ranks_that_wait_for_each_other_are_named():
    with pytest.raises(PlanError) as error:
        simulate([["0F0", "0BW0", "0F1", "0BW1"], ["1F0", "1F1", "1BW0", "1BW1"]])
    assert "rank 0 is at 0BW0 and waits for 1BW0, which is later in the row of rank 1" in error.value.got
    assert "rank 1 is at 1F1 and waits for 0F1, which is later in the row of rank 0" in error.value.got


def test_work_that_is_missing_is_named():
    with pytest.raises(PlanError, match="rank 1 is at 1F1 and waits for 0F1, which is not in the plan"):
        simulate([["0F0"], ["1F0", "1F1"]])
    with pytest.raises(PlanError, match="rank 0 is at 0W0 and waits for 0B0, which is not"):
        simulate([["0F0", "0W0"]])
    with pytest.raises(PlanError, match="waits for 0SEND_ACT0, which is not"):
        simulate([["0F0"], ["1RECV_ACT0", "1F0"]])
    with pytest.raises(PlanError, match="waits for 1RECV_ACT0, which is not"):
        simulate([["0F0", "0SEND_ACT0"], ["1F0"]])


def test_a_message_that_nobody_sends_is_named():
    with pytest.raises(PlanError) as error:
        simulate([["0F0", "0SEND_ACT0"], ["1RECV_ACT0", "1F0", "1RECV_GRAD0"]])
    assert (error.value.got, error.value.want) == ("1RECV_GRAD0", "a SEND_GRAD of microbatch 0 by stage 2")


def test_a_stage_without_a_cost_is_named():
    with pytest.raises(PlanError, match="no cost for this stage"):
        simulate(gpipe(3, 2), Costs(forward=[1, 2]))


@pytest.mark.parametrize("name", ["forward", "backward_weight", "activation_bytes", "message_bytes"])
def test_costs_of_more_stages_are_refused(name):
    with pytest.raises(PlanError, match="more costs than stages") as error:
        simulate(gpipe(3, 2), Costs(**{name: [1, 2, 3, 4]}))
    assert (error.value.where, error.value.want) == (f"costs.{name}", "3, or one for all")


@pytest.mark.parametrize("use", [searched, lambda costs: simulate(gpipe(1, 1), costs)])
def test_costs_of_layers_are_put_together_by_stage_first(use):
    with pytest.raises(PlanError, match="not costs of stages") as error:
        use(LayerCosts([1], [1], [1], [1], [1]))
    assert error.value.hint == "costs.by_stage(boundaries)"


def test_nothing_takes_no_time():
    line = simulate([[], []])
    assert (line.makespan, line.bubble_fraction, line.idle_fraction, line.peak_live) == (0, 0, 0, (0, 0))
    line = simulate(gpipe(2, 2), Costs(0, 0, 0))
    assert (line.makespan, line.bubble_fraction, line.idle_fraction) == (0, 0, 0)


def test_a_large_plan_is_simulated_at_all():
    """64 stages x 512 microbatches: a scan of rows within rows would not end."""
    plan = gpipe(64, 512)
    assert simulate(plan).makespan == 575 * 3
