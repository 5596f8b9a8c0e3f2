"""Trees: records, paths, patterns."""

from collections import OrderedDict, namedtuple

import attrs
import pytest
import torch
from hypothesis import given, strategies as st

from fds import tree
from fds.errors import StateError
from fds.tree import fresh, record, static

Pair = namedtuple("Pair", "left right")


@record
class Point:
    x: object
    y: object
    unit: str = static(default="m")
    marks: list = fresh(factory=list)


def test_a_record_is_frozen():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Point(1, 2).x = 3


def test_a_record_is_a_tree_of_its_fields():
    assert tree.leaves(Point(1, {"a": 2})) == [1, 2]
    assert tree.paths(Point(1, {"a": 2})) == {"x": 1, "y.a": 2}


def test_static_fields_are_structure():
    doubled = tree.map(lambda v: v * 2, Point(1, 2, unit="km"))
    assert (doubled.x, doubled.y, doubled.unit) == (2, 4, "km")
    assert tree.structure(Point(1, 2, unit="km")) != tree.structure(Point(1, 2, unit="m"))
    assert tree.structure(Point(1, 2)) == tree.structure(Point(3, 4))


def test_fresh_fields_start_anew_in_a_map_and_are_shared_by_evolve():
    point = Point(1, 2)
    point.marks.append("seen")
    assert tree.map(lambda v: v, point).marks == []
    assert attrs.evolve(point, x=3).marks is point.marks
    assert tree.leaves(point) == [1, 2]


def test_a_field_that_init_does_not_take_is_no_leaf():
    @record
    class Counted:
        x: object
        seen: list = fresh(factory=list, init=False)

    assert tree.leaves(Counted(1)) == [1]
    assert tree.map(lambda v: v + 1, Counted(1)).x == 2


def test_a_record_compares_by_identity():
    assert Point(1, 2) != Point(1, 2)


nested = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(lambda x, y: Point(x, y, "km"), inner, inner)
    ),
    max_leaves=10,
)


@given(nested)
def test_flatten_and_build_are_inverse(value):
    leaves, build = tree.flatten(value)
    assert tree.structure(build(leaves)) == tree.structure(value)
    assert tree.leaves(build(leaves)) == leaves == tree.leaves(value)


@given(nested)
def test_every_leaf_has_a_path_in_order(value):
    assert list(tree.paths(value).values()) == tree.leaves(value)


def test_paths_read_like_module_names():
    value = OrderedDict([("net", [1, Pair(2, (3,))]), (5, {"bias": 4})])
    assert tree.paths(value) == {"net.0": 1, "net.1.left": 2, "net.1.right.0": 3, "5.bias": 4}


def test_a_lone_leaf_has_the_empty_path():
    assert tree.paths(7) == {"": 7}


@pytest.mark.parametrize("value", [{"a.b": 1, "a": {"b": 2}}, {1: 1, "1": 2}])
def test_two_leaves_of_one_path_are_refused(value):
    with pytest.raises(StateError) as caught:
        tree.paths(value)
    assert caught.value.where in ("a.b", "1")


def test_dict_entries_keep_their_order():
    assert tree.leaves({"b": 1, "a": 2}) == [1, 2]


def test_a_map_takes_several_trees():
    assert tree.map(lambda a, b: a + b, {"x": 1}, {"x": 10}) == {"x": 11}


def test_a_star_crosses_dots():
    names = ["0.weight", "0.bias", "block.1.bias"]
    assert tree.match(["*.bias"], names, what="freeze") == {"0.bias", "block.1.bias"}


def test_patterns_add_up():
    assert tree.match(["a", "b*"], ["a", "b1", "c"], what="freeze") == {"a", "b1"}


def test_no_pattern_matches_nothing():
    assert tree.match([], ["a"], what="freeze") == set()


def test_a_pattern_without_a_match_is_refused_by_its_owner_with_a_hint():
    with pytest.raises(StateError, match="freeze") as caught:
        tree.match(["*.bias", "0.wieght"], ["0.weight", "0.bias"], what="freeze")
    assert caught.value.got == "'0.wieght'"
    assert "0.weight" in caught.value.hint


def test_bytes_are_those_of_the_tensors():
    value = {"a": torch.zeros(3, dtype=torch.float64), "b": [torch.zeros(5, dtype=torch.int8)], "c": "text"}
    assert tree.num_bytes(value) == 29
