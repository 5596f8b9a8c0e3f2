"""The helper that thins out crosses loses no pair, and no triple where it is told so."""

import itertools

import pytest

from tests.pairs import covering

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
