"""Which layers are which stage's."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fds.errors import PlanError
from fds.plans.measuring import LayerCosts
from fds.plans.partition import boundaries_of, partition_balanced, partition_uniform, smallest_largest

TYPES = ["Embedding", "Block", "Block", "Block", "Block", "LayerNorm", "Linear"]
PARAMETERS = [100, 10, 10, 10, 10, 1, 100]
PARTS = st.integers(1, 6)
WEIGHTS = st.lists(st.integers(0, 20), min_size=6, max_size=11)


def of(partition, num_stages, types=TYPES, parameters=PARAMETERS):
    return boundaries_of(partition, num_stages, types=types, parameters=parameters)


def parts_of(weights, boundaries) -> list:
    return [sum(weights[a:b]) for a, b in itertools.pairwise(boundaries)]


def costs_of(seconds) -> LayerCosts:
    zero = [0] * len(seconds)
    return LayerCosts(seconds, zero, zero, zero, zero)


@given(weights=WEIGHTS, num_parts=PARTS)
def test_the_largest_part_is_the_smallest_of_all_divisions_and_then_the_parts_are_the_most_even(weights, num_parts):
    ours = smallest_largest(weights, num_parts)
    size = len(weights)
    inner = itertools.combinations(range(1, size), num_parts - 1)
    order = lambda boundaries: (max(parts := parts_of(weights, boundaries)), sum(p * p for p in parts))
    assert order(ours) == min(order((0, *cuts, size)) for cuts in inner)
    assert ours[0] == 0 and ours[-1] == size and all(a < b for a, b in itertools.pairwise(ours))


@given(weights=st.lists(st.floats(0, 1), min_size=6, max_size=11), num_parts=PARTS)
def test_seconds_are_divided_as_well_as_counts(weights, num_parts):
    total = [0, *itertools.accumulate(weights)]
    largest = lambda boundaries: max(total[b] - total[a] for a, b in itertools.pairwise(boundaries))
    inner = itertools.combinations(range(1, len(weights)), num_parts - 1)
    assert largest(smallest_largest(weights, num_parts)) == min(largest((0, *c, len(weights))) for c in inner)


@given(num_items=st.integers(1, 40), num_parts=st.integers(1, 12))
def test_equal_weights_are_divided_uniformly(num_items, num_parts):
    uniform = partition_uniform(num_items, num_parts)
    sizes = parts_of([1] * num_items, uniform)
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1 and uniform[-1] == num_items
    if num_items >= num_parts:
        assert smallest_largest([3] * num_items, num_parts) == tuple(uniform)


def test_the_names():
    assert of("uniform", 3) == (0, 3, 5, 7)
    assert of("parameters", 3) == (0, 1, 6, 7)
    assert of("type:block", 2) == of("type:^BLOCK$", 2) == (0, 3, 7)
    assert of("type:block|linear", 5) == (0, 2, 3, 4, 6, 7)
    assert of("type:embedding|linear", 2) == (0, 6, 7)


def test_what_has_no_weight_stays_with_the_stage_before():
    assert of("type:block", 4) == (0, 2, 3, 4, 7)  # but the first, which has none before it


def test_costs_are_divided_by_the_time_of_forward_and_backward():
    costs = LayerCosts([1, 1, 1, 1], [0, 0, 0, 3], [0, 0, 0, 3], [9, 0, 0, 0], [9, 0, 0, 0])
    assert boundaries_of(costs, 2, types=["A"] * 4, parameters=[9, 1, 1, 1]) == (0, 3, 4)


def test_no_stage_is_empty_where_the_names_of_deepspeed_would_leave_one():
    assert partition_balanced([9, 1, 1, 1], 3, minimise="bottleneck") == [0, 0, 4, 4]
    assert boundaries_of("parameters", 3, types=["A"] * 4, parameters=[9, 1, 1, 1]) == (0, 1, 3, 4)
    assert boundaries_of("type:a", 3, types=["A", "B", "B"], parameters=[0, 0, 0]) == (0, 1, 2, 3)


@pytest.mark.parametrize("boundaries", [[0, 2, 7], (0, 2, 7), np.array([0, 2, 7]), [0, np.int64(2), 7]])
def test_boundaries_are_taken_as_they_are(boundaries):
    taken = of(boundaries, 2)
    assert taken == (0, 2, 7) and all(type(b) is int for b in taken)


def test_an_edition_of_deepspeed_is_taken_as_boundaries():
    assert of(partition_balanced(PARAMETERS, 3), 3) == (0, 1, 6, 7)


@pytest.mark.parametrize(
    ("partition", "num_stages", "says"),
    [
        ("uniform", 8, "fewer layers than stages"),
        ("uniform", 0, "num_stages is not positive"),
        ("unifrom", 2, "did you mean 'uniform'"),
        ("type", 2, "unknown partition"),
        ("type:", 2, "matches no layer"),
        ("type:blokc", 2, "did you mean 'Block'"),
        ("type:(", 2, "not a regular expression"),
        (costs_of([1, 2, 3]), 2, "another number of layers"),
        ([0, 7], 2, "2 stages need 3 boundaries"),
        ([1, 3, 7], 2, "begin with 0"),
        ([0, 3, 6], 2, "end with the number"),
        ([0, 7, 7], 2, "stage 1 would have no layer"),
        ([0, 5, 3, 7], 3, "stage 1 would have no layer"),
        ([0, 3.5, 7], 2, "integer boundaries"),
        (None, 2, "integer boundaries"),
        (7, 2, "integer boundaries"),
    ],
)
def test_a_partition_that_cannot_be_is_refused(partition, num_stages, says):
    with pytest.raises(PlanError, match=re.escape(says)):
        of(partition, num_stages)


@pytest.mark.parametrize("divide", [partition_balanced, smallest_largest])
@pytest.mark.parametrize(
    ("weights", "num_parts", "says"),
    [
        ([1, 2], 0, "num_parts is not positive"),
        ([1, -2, 3], 2, "weights[1]"),
        ([1, float("nan"), 3], 2, "weights[1]"),
        ([1, float("inf"), 3], 2, "weights[1]"),
    ],
)
def test_weights_that_cannot_be_are_refused(divide, weights, num_parts, says):
    with pytest.raises(PlanError, match=re.escape(says)):
        divide(weights, num_parts)


def test_the_other_refusals():
    with pytest.raises(PlanError, match="unknown objective"):
        partition_balanced([1, 2, 3], 2, minimise="variance")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="fewer items"):
        smallest_largest([1], 2)
    with pytest.raises(PlanError, match="num_parts is not positive"):
        partition_uniform(3, 0)
    with pytest.raises(PlanError, match="differ in length"):
        of("uniform", 2, parameters=[1])


def test_a_search_ends_where_a_thousandth_is_nothing():
    boundaries = partition_balanced([1e16 + 2, 1e16, 1e16, 1e16 + 4], 2, minimise="bottleneck")
    assert boundaries == [0, 2, 4]


def test_parameters_are_counted_before_they_divide_layers():
    assert boundaries_of("parameters", 2, parameters=[1, 1, 2]) == (0, 2, 3)
    with pytest.raises(PlanError) as error:
        boundaries_of("parameters", 2)
    assert "parameters=" in error.value.want


def test_costs_alone_divide_layers():
    assert boundaries_of(costs_of([1, 1, 2]), 2) == (0, 2, 3)
