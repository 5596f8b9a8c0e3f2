"""The helper that thins out crosses loses no pair, and no triple where it is told so; swept tests lose no value."""

import itertools
import types

import pytest

from tests.pairs import covering
from tests.sweeps import left_out

CROSS = list(itertools.product("abc", range(3), "xyz", range(2), "pq"))


def combinations(rows, strength):
    return {one for row in rows for one in itertools.combinations(enumerate(row), strength)}


@pytest.mark.parametrize(("strength", "most"), [(1, 3), (2, 15), (3, 45)])
def test_every_combination_is_there_in_few_rows(strength, most):
    some = covering(CROSS, strength)
    assert combinations(some, strength) == combinations(CROSS, strength)
    assert len(some) <= most and set(some) <= set(CROSS)
    assert some == covering(CROSS, strength)


def test_what_no_row_has_need_not_be_there():
    rows = [row for row in CROSS if row[:2] != ("a", 0)]
    assert combinations(covering(rows), 2) == combinations(rows, 2)


def case(name, mark, *params):
    """Return what is to be known of a test that pytest has collected."""
    spec = types.SimpleNamespace(params=dict(enumerate(params)))
    marker = lambda name: getattr(pytest.mark, name)(*mark[1:]).mark if mark[:1] == (name,) else None
    return types.SimpleNamespace(nodeid=f"{name}[{params}]", callspec=spec, get_closest_marker=marker)


@pytest.mark.parametrize("strength", [(), (1,), (2,)])
def test_swept_tests_run_with_every_value_or_every_pair_and_others_as_they_are(strength):
    values = [], {}, [1], 0, False  # of which three have no hash, and two are equal
    swept = [case("a.py::one", ("sweep", *strength), *row) for row in itertools.product(values, "xyz", (0.5, 1.5))]
    others = [case("a.py::two", (), *row) for row in itertools.product(values, "xyz")]
    whole = case("a.py::three", ("whole",))
    gone = left_out([*swept, *others, whole])
    rows = [tuple(map(id, item.callspec.params.values())) for item in swept]
    kept = [row for row, item in zip(rows, swept, strict=True) if item not in gone]
    assert combinations(kept, *(strength or (1,))) == combinations(rows, *(strength or (1,)))
    assert len(kept) == {(): 5, (1,): 5, (2,): 15}[strength] and whole in gone and not any(x in gone for x in others)
