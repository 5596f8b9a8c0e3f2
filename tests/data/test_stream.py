"""Laws of what a loader yields: shares, epochs, positions."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import fds
from fds.data import Coordinate, DistributedLoader
from fds.data.orders import permutation
from tests.data.loaders import Numbers, loaders, on, rows_of, stream_of


@given(st.data(), st.integers(1, 4))
def test_the_shares_of_all_ranks_in_order_are_the_batch(data, ranks):
    whole = data.draw(loaders(ranks=ranks, max_start=40))
    shares = [rows_of(on(whole, Coordinate(rank, ranks))) for rank in range(ranks)]
    assert [list(chain(*parts)) for parts in zip(*shares, strict=True)] == rows_of(whole)
    assert all(len({len(part) for part in parts}) == 1 for parts in zip(*shares, strict=True))


@given(loaders(last=["drop", "keep"]), st.integers(0, 3))
def test_an_epoch_has_every_row_once_but_for_what_is_dropped(loader, epochs):
    for _ in range(epochs):
        loader = loader.next_epoch()
    rows = list(chain(*rows_of(loader)))
    assert len(set(rows)) == len(rows) == len(loader.dataset) - (loader.stream.rest if loader.last == "drop" else 0)
    assert set(rows) <= set(range(len(loader.dataset)))


@given(loaders(last=["wrap"]), st.integers(1, 4))
def test_wrapped_epochs_have_every_row_once_and_every_batch_is_full(loader, epochs):
    length = len(loader.dataset)
    batches = stream_of(loader, -(-epochs * length // loader.batch_size))
    assert {len(rows) for rows in batches} == {loader.batch_size}
    stream = list(chain(*batches))
    for epoch in range(epochs):
        assert sorted(stream[epoch * length : (epoch + 1) * length]) == list(range(length))


@given(loaders(), st.integers(0, 40), st.integers(0, 40))
def test_starting_at_k_is_dropping_the_first_k_batches(loader, k, more):
    expected = stream_of(loader, k + 12)[k:]
    assert stream_of(loader.starting(k), 12) == expected
    assert stream_of(loader.starting(more).starting(torch.tensor(k)), 12) == expected


@given(loaders(max_start=40))
def test_iterating_yields_the_rest_of_the_epoch_and_the_length_counts_it(loader):
    rest = rows_of(loader)
    assert len(rest) == len(loader) > 0
    following = loader.next_epoch()
    assert following.start == loader.start + len(rest)
    assert following.epoch > loader.epoch
    assert all(loader.starting(i).epoch == loader.epoch for i in range(loader.start, following.start))
    assert rows_of(loader) == rest


@pytest.mark.parametrize(
    ("last", "sizes"), [("drop", [4, 4, 4, 4]), ("keep", [4, 4, 2, 4, 4, 2]), ("wrap", [4, 4, 4, 4, 4])]
)
def test_what_becomes_of_the_rows_that_fill_no_batch(last, sizes):
    loader = DistributedLoader(Numbers(10), 4, last=last, shuffle=False)
    assert [len(rows) for rows in [*rows_of(loader), *rows_of(loader.next_epoch())]] == sizes
    assert rows_of(loader.next_epoch())[0] == [2, 3, 4, 5] if last == "wrap" else [0, 1, 2, 3]
    assert (len(loader), len(loader.next_epoch())) == {"drop": (2, 2), "keep": (3, 3), "wrap": (3, 2)}[last]


def test_a_wrapped_batch_may_hold_several_epochs():
    loader = DistributedLoader(Numbers(3), 8, Coordinate(1, 2), last="wrap", shuffle=False)
    assert rows_of(loader) == [[1, 2, 0, 1]]
    assert rows_of(loader.next_epoch()) == [[0, 1, 2, 0]]


def test_rows_in_order_are_in_order_in_every_epoch():
    loader = DistributedLoader(Numbers(6), 3, shuffle=False)
    assert stream_of(loader, 4) == [[0, 1, 2], [3, 4, 5]] * 2


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = {
        tuple(rows_of(DistributedLoader(Numbers(50), 50, seed=seed, start=epoch))[0])
        for seed in (0, 1, fds.random.key(2))
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_the_number_of_rows_of_a_batch_does_not_change_their_order():
    by = [list(chain(*rows_of(DistributedLoader(Numbers(24), size, seed=3)))) for size in (1, 4, 24)]
    assert by[0] == by[1] == by[2]


def test_orders_never_change():
    """Runs are resumed in mid-epoch: another order would repeat some rows and lose others."""
    assert permutation(fds.random.key(0), 10).tolist() == [7, 2, 9, 6, 4, 0, 3, 5, 8, 1]
    loader = DistributedLoader(Numbers(8), 4, seed=1, start=3)
    assert rows_of(loader) == [[1, 3, 2, 5]]


@given(st.integers(0, 5), st.integers(0, 300))
def test_a_permutation_has_every_number_once(seed, length):
    order = permutation(fds.random.key(seed), length)
    assert (order.dtype, sorted(order.tolist())) == (np.int64, list(range(length)))


def test_every_order_is_as_likely_as_any_other():
    """Of 24 orders of 4 rows in 6,000 draws: chi-squared with 23 degrees of freedom is above 58.6 once in 16,000."""
    drawn = [tuple(permutation(fds.random.fold_in(fds.random.key(0), i), 4).tolist()) for i in range(6000)]
    counts = [drawn.count(order) for order in set(drawn)]
    assert len(counts) == 24
    assert sum((count - 250) ** 2 / 250 for count in counts) < 58.6
