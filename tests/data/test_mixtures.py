"""Mixtures of data sets, in proportions that may change; and orders that are never made."""

import itertools
import math
import pickle
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, strategies as st

import fds
from fds.data import DistributedLoader, mixture, permute
from fds.data.orders import key_words, permute_each
from fds.errors import DataError
from tests.data.loaders import Noisy, Numbers, as_lists, stream_of

WEB, CODE, PROSE = [("web", i) for i in range(23)], [("code", i) for i in range(5)], [("prose", i) for i in range(100)]
PARTS = {"web": WEB, "code": CODE, "prose": PROSE}
rising = lambda batch: {"web": 1, "code": min(batch, 40) / 10, "prose": 0.5}


@given(st.integers(0, 5), st.integers(1, 5000))
def test_a_permutation_that_is_never_made_has_every_number_once(seed, length):
    order = permute(fds.random.key(seed), length, np.arange(length))
    assert (order.dtype, sorted(order.tolist())) == (np.int64, list(range(length)))
    some = np.array([[length - 1, 0], [length // 2, 0]])
    assert (permute(fds.random.key(seed), length, some) == order[some]).all()


def test_every_order_of_few_rows_is_as_likely_as_any_other():
    """Of the 720 orders of 6 rows in 36,000 draws: chi-squared with 719 degrees is above 872 once in 14,000."""
    rows = np.tile(np.arange(6), 36_000)
    words = key_words(fds.random.key(0), np.arange(len(rows)) // 6)
    orders = permute_each(words, np.full(len(rows), 6), rows).reshape(-1, 6)
    counts = np.unique(orders @ 6 ** np.arange(6), return_counts=True)[1]
    assert len(counts) == math.factorial(6) and ((counts - 50) ** 2 / 50).sum() < 872


@pytest.mark.parametrize("length", [5_000, 2**40 + 3])
def test_two_rows_of_an_order_of_many_are_anywhere(length):
    """In 100 cells of pairs over 50,000 keys: chi-squared with 99 degrees is above 164 once in 24,000."""
    words = key_words(fds.random.key(1), np.arange(100_000) // 2)
    pairs = permute_each(words, np.full(100_000, length), np.tile([0, 1], 50_000)).reshape(-1, 2)
    cells = np.bincount(pairs * 10 // length @ [10, 1], minlength=100)
    assert ((cells - 500) ** 2 / 500).sum() < 164


def test_orders_that_are_never_made_never_change():
    assert permute(fds.random.key(0), 6, np.arange(6)).tolist() == [0, 3, 2, 1, 5, 4]
    assert permute(fds.random.key(0), 2**62, np.array([5, 2**61])).tolist() == [2051834348978528699, 685650352746983724]
    mixed = mixture(PARTS, [3, 1, 2], key=1)
    assert mixed.rows(7, 6).tolist() == ORDER


ORDER = [7, 6, 4, 37, 24, 45]


@pytest.mark.parametrize(
    ("key", "length", "positions", "what"),
    [
        (0.5, 3, [0], "not a random seed"),
        (0, 0, [0], "not a number of rows"),
        (0, True, [0], "not a number of rows"),
        (0, 2**63, [0], "not a number of rows"),
        (0, 3, [3], "not positions"),
        (0, 3, [-1], "not positions"),
        (0, 3, [0.0], "not positions"),
    ],
)
def test_what_cannot_be_permuted_is_refused(key, length, positions, what):
    with pytest.raises(fds.FdsError, match=what):
        permute(key, length, np.array(positions))


@given(
    st.lists(st.sampled_from([0, 0.3, 1, 2.5, 7]), min_size=1, max_size=5).filter(any), st.integers(1, 9), st.booleans()
)
def test_every_data_set_has_its_part_of_the_rows_until_any_batch(weights, size, follows):
    mixed = mixture([range(10)] * len(weights), (lambda batch: weights) if follows else weights)
    parts = np.array(weights) / sum(weights)
    counts = np.array([mixed.counts(batch, size) for batch in range(60)])
    assert (counts.sum(1) == size * np.arange(60)).all() and (np.diff(counts, axis=0) >= 0).all()
    assert np.abs(counts - size * np.arange(60)[:, None] * parts).max() <= len(weights) / 2
    assert (counts[:, parts == 0] == 0).all()


def test_weights_that_follow_a_function_have_their_part_of_each_batch(monkeypatch):
    monkeypatch.setattr("fds.data.mixtures._BLOCK", 16)
    mixed = mixture(PARTS, rising)
    due = np.cumsum(
        [np.zeros(3)] + [7 * np.array(list(w.values())) / sum(w.values()) for w in map(rising, range(99))], 0
    )
    assert all(np.abs(mixed.counts(batch, 7) - due[batch]).max() <= 1.5 for batch in range(100))
    assert all(
        (mixture(PARTS, rising).counts(batch, 7) == mixed.counts(batch, 7)).all() for batch in (99, 16, 3, 0, 50)
    )


@pytest.mark.parametrize("weights", [[3, 1, 2], rising])
def test_a_data_set_is_read_to_its_end_before_any_row_comes_again(weights):
    mixed = mixture(PARTS, weights, key=2)
    counts = Counter(itertools.chain(*PARTS.values()))
    for batch in range(40):
        counts.update(mixed[i] for i in mixed.rows(batch, 10))
        for part in PARTS.values():
            assert max(counts[row] for row in part) - min(counts[row] for row in part) <= 1
    orders = [mixture([range(5)], [1], key=key).rows(batch, 5) for key in range(2) for batch in range(4)]
    assert len(set(map(tuple, orders))) == 8


@pytest.mark.parametrize("weights", [[3, 1, 2], rising])
def test_a_loader_of_a_mixture_reads_the_same_rows_anywhere(weights):
    mixed = mixture({name: Numbers(len(part)) for name, part in PARTS.items()}, weights)
    loader = DistributedLoader(mixed, 12)
    rows = stream_of(loader, 25)
    assert len(loader) == 128 // 12 and stream_of(loader.starting(13), 12) == rows[13:]
    ranks = fds.simulate(lambda: stream_of(DistributedLoader(mixed, 12, fds.mesh(dp=-1)["dp"]), 25), 3)
    assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == rows
    working = DistributedLoader(mixed, 12, num_workers=2, start=4)
    assert [batch.tolist() for batch in working] == rows[4:10]
    if not callable(weights):
        assert (pickle.loads(pickle.dumps(mixed)).rows(9, 12) == mixed.rows(9, 12)).all()


def test_what_is_drawn_while_a_row_is_read_follows_from_batch_and_place():
    loader = DistributedLoader(mixture([Noisy(3)], [1]), 6, collate=as_lists)
    first, second = itertools.islice(loader, 1), itertools.islice(loader.starting(1), 1)
    rows = [row for batch in (*first, *second) for row in batch]
    assert len({row[1:] for row in rows}) == 12 > len({row[0] for row in rows})


@pytest.mark.parametrize(
    ("datasets", "weights", "where"),
    [
        ([], [], "datasets"),
        (range(3), [1, 1, 1], "datasets['0']"),
        ([[1], []], [1, 1], "datasets['1']"),
        ({"a": [1], "b": iter([1])}, [1, 1], "datasets['b']"),
        ("ab", [1, 1], "datasets"),
        ([[1], [2]], [1], "weights"),
        ([[1], [2]], 1, "weights"),
        ([[1], [2]], [1, -1], "weights"),
        ([[1], [2]], [0, 0], "weights"),
        ([[1], [2]], [1, float("inf")], "weights"),
        ([[1], [2]], {"0": 1}, "weights"),
        ([[1], [2]], {"0": 1, "1": "much"}, "weights"),
        ([[1], [2]], lambda batch: [1, 1 - batch / 10], "weights(11)"),
        ([[1], [2]], lambda batch: None, "weights(0)"),
    ],
)
def test_what_is_no_mixture_is_refused(datasets, weights, where):
    with pytest.raises(DataError) as refused:
        mixture(datasets, weights)
    assert refused.value.where == where


def test_weights_whose_sum_float64_does_not_have_are_refused():
    with pytest.raises(DataError, match="not weights"):
        mixture([WEB, CODE], [1e308, 1e308])
