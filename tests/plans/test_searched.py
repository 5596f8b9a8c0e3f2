"""A searched plan is valid, fits its memory, and is never worse than the schedules made by hand."""

import itertools

import pytest
from hypothesis import given, strategies as st

from fds.errors import PlanError
from fds.plans.letters import Times, fits, letters_of, plan_of, timed
from fds.plans.plan import Op, Plan
from fds.plans.schedules import gpipe, one_f_one_b, zb_h1, zb_h2
from fds.plans.search import greedy, preferences, searched
from fds.plans.simulator import Costs, simulate
from fds.plans.validation import validate

ROWS_OF_THREE = [
    row
    for letters in itertools.product("FBW", repeat=9)
    if fits(row := "".join(letters), 3) and row.count("F") == row.count("W") == 3
]
BY_HAND = [gpipe, one_f_one_b, zb_h1, zb_h2]
TIME = st.floats(0, 10, allow_subnormal=False) | st.integers(0, 5)
SIZE = st.floats(0, 3, allow_subnormal=False) | st.just(1.0)


@st.composite
def problems(draw):
    """Draw costs, a number of ranks and one of microbatches, and a bound that one microbatch fits."""
    p, m = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    per_stage = lambda numbers: draw(numbers | st.lists(numbers, min_size=p, max_size=p))
    costs = Costs(per_stage(TIME), per_stage(TIME), per_stage(TIME), per_stage(SIZE), latency=draw(TIME))
    least = [costs.at("activation_bytes", rank) for rank in range(p)]
    kind = draw(st.sampled_from(["none", "one", "per rank"]))
    factor = st.integers(1, 9) | st.floats(1, 9)
    if kind == "one":
        return costs, p, m, max(least) * draw(factor)
    return costs, p, m, [size * draw(factor) for size in least] if kind == "per rank" else None


def fitting(line, bound):
    """Tell whether a timeline keeps to a bound."""
    if bound is None:
        return True
    bounds = [bound] * line.num_ranks if isinstance(bound, int | float) else bound
    return all(peak <= most for peak, most in zip(line.peak_bytes, bounds, strict=True))


@given(problems())
def test_the_law(problem):
    costs, p, m, bound = problem
    plan = searched(costs, bound)(p, m)
    line = simulate(plan, costs)
    assert validate(plan) == plan
    assert (plan.num_ranks, plan.num_stages, plan.num_microbatches) == (p, p, m)
    assert fitting(line, bound)
    others = [simulate(schedule(p, m), costs) for schedule in BY_HAND]
    assert all(line.makespan <= other.makespan for other in others if fitting(other, bound))
    assert line.makespan >= Times.of(costs, p).least(m) * (1 - 1e-9)
    assert searched(costs, bound)(p, m) == plan  # the same anew


@given(problems())
def test_microbatches_keep_their_order(problem):
    costs, p, m, bound = problem
    for row in searched(costs, bound)(p, m).rows:
        for ops in ({Op.FORWARD}, {Op.BACKWARD_INPUT, Op.BACKWARD}, {Op.BACKWARD_WEIGHT, Op.BACKWARD}):
            assert [a.microbatch for a in row if a.op in ops] == list(range(m))


@given(problems(), st.data())
def test_rows_of_letters_are_timed_as_the_simulator_does(problem, data):
    costs, p, m, _ = problem
    times = Times.of(costs, p)
    room = data.draw(st.lists(st.integers(1, 9), min_size=p, max_size=p))
    rows = greedy(times, m, room, data.draw(st.sampled_from(preferences(times))))
    assert all(fits(row, most) for row, most in zip(rows, room, strict=True))
    assert letters_of(plan_of(rows)) == rows
    found, line = timed(times, rows), simulate(plan_of(rows), costs)
    assert found is not None
    assert [[e.start for e in row] for row in line.rows] == list(found.starts)
    assert [[e.end for e in row] for row in line.rows] == list(found.ends)


def test_every_greedy_taste_ends_with_room_for_one_microbatch():
    times = Times.of(Costs([1, 2, 1], [2, 1, 1], [1, 1, 3], latency=0.5), 3)
    for preference in preferences(times):
        assert simulate(plan_of(greedy(times, 5, [1, 1, 1], preference))).peak_live == (1, 1, 1)


def test_rows_that_get_stuck_have_no_times():
    assert timed(Times.of(Costs(), 2), ("FBWFBW", "FFBBWW")) is None


def test_a_row_that_does_not_fit():
    assert fits("FFBWBW", 2)
    assert not fits("FFBWBW", 1)
    assert not fits("FWB", 2)
    assert not fits("BF", 2)


@pytest.mark.parametrize(("bound", "most", "by_hand"), [(4, 104, 105), (5, 100, 105), (6, 99, 105), (None, 99, 99)])
def test_it_beats_all_others_where_stages_are_unequal(bound, most, by_hand):
    """No plan of these costs takes less than 99."""
    costs = Costs([2, 4, 2, 3], [5, 3, 4, 3], [3, 4, 1, 5], latency=1)
    assert Times.of(costs, 4).least(8) == 99
    others = [simulate(schedule(4, 8), costs) for schedule in BY_HAND]
    assert min(other.makespan for other in others if fitting(other, bound)) == by_hand
    assert simulate(searched(costs, bound)(4, 8), costs).makespan <= most


@given(st.lists(st.integers(1, 9), min_size=6, max_size=6), st.integers(0, 3), st.integers(1, 3))
def test_of_two_ranks_and_three_microbatches_it_finds_the_best_of_all_plans(times, latency, bound):
    costs = Costs(times[:2], times[2:4], times[4:], latency=latency)
    allowed = [row for row in ROWS_OF_THREE if fits(row, bound)]
    every = (timed(Times.of(costs, 2), (first, last)) for first in allowed for last in allowed)
    best = min(one.makespan for one in every if one is not None)
    assert simulate(searched(costs, bound)(2, 3), costs).makespan == best


def test_of_equal_costs_it_is_as_short_as_zb_h1_in_its_memory():
    found = simulate(searched(Costs(), 4)(4, 8))
    assert found.makespan == simulate(zb_h1(4, 8)).makespan == Times.of(Costs(), 4).least(8)


def test_of_equally_short_plans_it_takes_one_with_the_smallest_peak():
    assert max(simulate(searched(Costs())(4, 8)).peak_live) == 4  # ZB-H2, with 7, takes as long from 0 to the last end


def test_what_lies_below_one_microbatch_is_refused_with_the_least_bound():
    with pytest.raises(PlanError) as error:
        searched(Costs(activation_bytes=[3, 5]), 4)(2, 4)
    assert error.value.got == "memory_bound of 4 on rank 1"
    assert error.value.want == "at least 5 on all, or per rank [3, 5]"
    assert validate(searched(Costs(activation_bytes=[3, 5]), [3, 5])(2, 4)).num_microbatches == 4


def test_bounds_of_another_number_of_ranks_are_refused():
    with pytest.raises(PlanError, match="one number, or 3"):
        searched(Costs(), [1, 2])(3, 4)


def test_a_bound_that_division_would_round_is_kept():
    """0.1 * 3 is above 0.3 for floats, as the simulator multiplies."""
    assert simulate(searched(Costs(activation_bytes=0.1), 0.3)(4, 8), Costs(activation_bytes=0.1)).peak_live == (2,) * 4


def test_sizes_are_checked():
    with pytest.raises(PlanError, match="not a count"):
        searched(Costs())(2, 0)


def test_it_is_a_value():
    assert searched(Costs(), [1, 2]) == searched(Costs(), (1, 2)) != searched(Costs(), 2)
    assert isinstance(searched(Costs())(1, 1), Plan)
