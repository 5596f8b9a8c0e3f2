"""Trees: records, paths, patterns."""

import dataclasses
import functools
import types
from collections import ChainMap, OrderedDict, UserDict, namedtuple
from collections.abc import Mapping, MutableMapping

import attrs
import pytest
import torch
from hypothesis import given, strategies as st

import fds
from fds import tree
from fds.errors import DonatedStateError, StateError
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


# --- containers of others ---


class Encoding(UserDict):
    """What a tokenizer returns: a mapping with more to it."""

    def __init__(self, data, source):
        super().__init__(data)
        self.source = source


class Fixed(Mapping):
    def __init__(self, given):
        self.given = dict(given)

    def __getitem__(self, key):
        return self.given[key]

    def __iter__(self):
        return iter(self.given)

    def __len__(self):
        return len(self.given)


class Wrapped(Fixed, MutableMapping):
    """Whose copy, by copy.copy, has the same dict."""

    def __init__(self, given):
        self.given = given

    def __setitem__(self, key, x):
        self.given[key] = x

    def __delitem__(self, key):
        del self.given[key]


class Deep(Wrapped):
    """What is copied of it cannot be told from it, so it is no tree."""

    def __init__(self, given):
        self.box = (given,)

    given = property(lambda self: self.box[0])


class Attributes(dict):
    """Whose items are its attributes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Derived(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.double = self["x"] * 2


class Rows(list):
    pass


class Sizes(tuple):
    pass


@attrs.frozen
class Sample:
    x: object
    name: str = attrs.field(validator=attrs.validators.instance_of(str))
    made: object = attrs.field(init=False, factory=lambda: torch.ones(1))


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    x: object
    y: object = None


@dataclasses.dataclass
class Cached:
    x: object

    @functools.cached_property
    def double(self):
        return self.x * 2


ONE = torch.ones(2)
OTHERS = [
    Wrapped({"x": ONE, "n": 3}),
    Attributes(x=ONE),
    Derived(x=ONE),
    ChainMap({"x": ONE}, {"y": ONE}),
    Encoding({"x": ONE, "n": 3}, "text"),
    Fixed({"x": ONE}),
    types.MappingProxyType({"x": [ONE]}),
    Rows([ONE, ONE]),
    Sizes([ONE]),
    Sample(ONE, "a"),
    Item(ONE),
    Cached(ONE),
    Pair(Item(ONE), Fixed({"x": Sample(ONE, "b")})),
]


@pytest.mark.parametrize("value", OTHERS, ids=lambda x: type(x).__name__)
def test_a_container_of_tensors_is_a_tree_whatever_its_class(value):
    doubled = tree.map(lambda x: x * 2 if isinstance(x, torch.Tensor) else x, {"batch": value})["batch"]
    assert type(doubled) is type(value)
    tensors = [x for x in tree.leaves(doubled) if isinstance(x, torch.Tensor)]
    assert tensors and all(torch.equal(x, 2 * torch.ones_like(x)) for x in tensors)
    assert tree.structure(doubled) == tree.structure(value)
    assert hash(tree.structure(doubled)) == hash(tree.structure(value))
    assert list(tree.paths(doubled)) == list(tree.paths(value))
    assert len(tree.paths(value)) == len(tree.leaves(value))
    again = tree.leaves(value)
    assert all(torch.equal(x, torch.ones_like(x)) for x in again if isinstance(x, torch.Tensor))


def test_a_container_keeps_what_is_not_a_child():
    value = Encoding({"x": ONE}, "text")
    assert tree.map(lambda x: x, value).source == "text"
    cached = Cached(ONE)
    assert torch.equal(cached.double, 2 * ONE)
    assert torch.equal(tree.map(lambda x: x + 1, cached).double, 4 * ONE)


def test_attributes_of_a_mapping_are_those_of_its_new_items_or_missing():
    assert torch.equal(tree.map(lambda x: x + 1, Attributes(x=ONE)).x, 2 * ONE)
    assert not hasattr(tree.map(lambda x: x + 1, Derived(x=ONE)), "double")


def test_a_mapping_that_cannot_be_copied_stays_as_it_is():
    value = Deep({"x": ONE, "y": 3})
    assert tree.leaves(value) == [value] and tree.opaque({"a": value}) == ["a"]
    assert value.given == {"x": ONE, "y": 3}


def test_mappings_of_other_keys_are_other_structures():
    assert tree.structure(Fixed({"x": ONE})) != tree.structure(Fixed({"y": ONE}))
    assert tree.paths(Encoding({"x": ONE, "n": 3}, "")) == {"x": ONE, "n": 3}
    assert list(tree.paths(Item(ONE))) == ["x", "y"]


def test_records_without_tensors_and_declared_leaves_are_leaves():
    @tree.leaf
    @attrs.frozen
    class Marked:
        value: object

    @attrs.frozen
    class Setting:
        size: int

    marked, setting = Marked(ONE), Setting(3)
    assert tree.leaves([marked, setting, fds.whole(ONE)])[:2] == [marked, setting]
    assert tree.opaque([marked, setting, {"a": ONE}, "text", None]) == []


@pytest.mark.parametrize("value", [{ONE}, torch.distributions.Normal(ONE, ONE), torch.nn.Linear(1, 1)])
def test_a_leaf_that_hides_tensors_is_found(value):
    assert tree.opaque({"a": [1, value], "b": ONE}) == ["a.1"]


UNLIKE = {
    "lacks a key": ({"n": {"m": [1, 2]}}, "k", "nothing", "int 3"),
    "has another": ({"n": {"m": [1, 2]}, "k": 3, "l": 4}, "l", "int 4", "nothing"),
    "lacks an item": ({"n": {"m": [1]}, "k": 3}, "n.m.1", "nothing", "int 2"),
    "is a leaf": ({"n": {"m": torch.ones(2)}, "k": 3}, "n.m", "a tensor (2,)", "list [1, 2]"),
    "has a tuple": ({"n": {"m": (1, 2)}, "k": 3}, "n.m", "tuple (1, 2)", "list [1, 2]"),
    "is nothing": (None, "", "NoneType None", "dict"),
}


@pytest.mark.parametrize(("other", "where", "got", "want"), UNLIKE.values(), ids=UNLIKE)
def test_a_tree_of_another_structure_is_refused_at_the_first_difference(other, where, got, want):
    with pytest.raises(StateError) as error:
        tree.map(lambda *leaves: leaves, {"n": {"m": [1, 2]}, "k": 3}, other)
    assert error.value.where == where and error.value.got == got and error.value.want.startswith(want)


def test_trees_are_paired_by_name_and_the_second_may_go_deeper():
    paired = tree.map(lambda a, b: (a, b), {"a": 1, "b": [2]}, {"b": [{"c": 3}], "a": None})
    assert paired == {"a": (1, None), "b": [(2, {"c": 3})]}


def test_a_second_tree_that_may_not_be_read_says_so():
    step = fds.compose(fds.donate(), fds.sgd(0.1))(lambda p, batch: (p["w"] * batch).sum())
    old = step.init({"w": torch.ones(2)})
    new, _ = step(old, torch.ones(2))
    with pytest.raises(DonatedStateError):
        tree.map(lambda a, b: a, new, old)


@dataclasses.dataclass
class Node:
    value: object
    next: object = None


def test_a_container_that_holds_itself_is_named():
    node, items, names = Node(torch.ones(2)), [torch.ones(2)], {"x": torch.ones(2)}
    items.append(items)
    node.next, names["inner"] = node, {"a": [names]}
    for whole, where in (({"n": node}, "n.next"), ([items], "0.1"), (names, "inner.a.0")):
        for read in (tree.leaves, tree.paths, tree.copied, lambda t: tree.map(lambda x: x, t)):
            with pytest.raises(StateError, match="holds itself") as error:
                read(whole)
            assert where.endswith(error.value.where)


def test_a_tree_that_is_too_deep_says_so():
    deep = leaf = []
    for _ in range(100_000):
        leaf.append([])
        leaf = leaf[0]
    with pytest.raises(StateError, match="too deep"):
        tree.leaves(deep)
    while deep:  # Python's own way of freeing it is recursive
        deep = deep.pop()
