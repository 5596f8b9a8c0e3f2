"""Random numbers that a data set or a collate function draws: functions of the seed, and nobody else's."""

import os
import pickle
import random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import Subset

from fds.data import Coordinate, DistributedLoader, RepeatingLoader
from fds.errors import DataError
from tests.data.loaders import Noisy, NoisyAtOnce, Numbers, as_lists, on


def noisy(rows):
    return rows, torch.rand(()).item(), random.random(), np.random.rand()


def generators():
    return torch.default_generator.get_state().tolist(), random.getstate(), str(np.random.get_state())


@pytest.mark.parametrize("dataset", [range(12), Numbers(12), Noisy(12), NoisyAtOnce(12)])
@pytest.mark.parametrize("workers", [0, 1])
def test_global_generators_stay_as_they_were(dataset, workers):
    loader = DistributedLoader(dataset, 4, collate=noisy, num_workers=workers)
    before = generators()
    one = list(loader)
    assert generators() == before
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    assert list(loader) == one


@given(st.integers(1, 3), st.sampled_from(["drop", "wrap"]), st.integers(0, 9), st.integers(0, 2))
def test_what_a_row_draws_depends_on_neither_ranks_nor_batches_nor_position(half, last, start, seed):
    ranks = 2 * half
    whole = DistributedLoader(Noisy(17), 12, seed=seed, last=last, collate=as_lists)
    by_one = DistributedLoader(Noisy(17), 1, seed=seed, last=last, collate=as_lists)
    shares = [list(on(whole.starting(start), Coordinate(rank, ranks))) for rank in range(ranks)]
    joined = [[row for part in parts for row in part] for parts in zip(*shares, strict=True)]
    assert joined == list(whole.starting(start))
    if last == "wrap":  # the stream is the same for all batch sizes
        single = RepeatingLoader(by_one.starting(start * 12))
        assert joined == [[next(single)[0] for _ in range(12)] for _ in joined]


@pytest.mark.parametrize("dataset", [Noisy(8), Subset(Noisy(9), range(8)), NoisyAtOnce(8)])
def test_epochs_and_rows_draw_different_numbers(dataset):
    loader = DistributedLoader(dataset, 8, collate=noisy)
    (first, *drawn), (second, *drawn_next) = next(iter(loader)), next(iter(loader.next_epoch()))
    numbers = [number for row in [*first, *second] for number in row[1:]] + drawn + drawn_next
    assert len(set(numbers)) == len(numbers) == 54


def test_another_seed_draws_other_numbers():
    loaders = [DistributedLoader(Noisy(4), 4, shuffle=False, collate=noisy, seed=seed) for seed in (0, 1)]
    (one,), (other,) = map(list, loaders)
    numbers = [number for rows, *drawn in (one, other) for number in [*(x for row in rows for x in row[1:]), *drawn]]
    assert len(set(numbers)) == len(numbers) == 30


def test_a_subset_draws_row_by_row():
    loader = DistributedLoader(Subset(Noisy(20), range(8)), 8, collate=as_lists)
    (whole,) = list(loader)
    assert [row for rank in (0, 1) for row in next(iter(on(loader, Coordinate(rank, 2))))] == whole


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # of machines with one core
def test_workers_change_no_bit():
    loader = DistributedLoader(Noisy(20), 4, Coordinate(1, 2), collate=noisy, last="wrap", pin_memory=True)
    many = DistributedLoader(Noisy(20), 4, Coordinate(1, 2), collate=noisy, last="wrap", num_workers=2)
    assert list(many.starting(2)) == list(loader)[2:]


def test_rows_are_read_at_once_where_the_data_set_can():
    calls = []

    class Counting(NoisyAtOnce):
        def __getitems__(self, indices):
            calls.append(indices)
            return super().__getitems__(indices)

    loader = DistributedLoader(Counting(9), 4, shuffle=False, last="keep", collate=as_lists)
    assert [[row[0] for row in batch] for batch in loader] == calls == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_a_loader_is_pickled_with_its_position():
    loader = DistributedLoader(Noisy(12), 4, Coordinate(1, 2), collate=noisy, seed=5, start=1)
    copy = pickle.loads(pickle.dumps(loader))
    assert list(copy) == list(loader)
    assert (copy.start, copy.axis) == (1, Coordinate(1, 2))


class Process(Numbers):
    def __getitem__(self, index):
        return os.getpid()


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # of machines with one core
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_that_stay_are_the_same_processes_in_every_epoch(persistent):
    loader = DistributedLoader(Process(6), 2, num_workers=1, persistent_workers=persistent, prefetch_factor=3)
    epochs = [set(torch.cat(list(one)).tolist()) for one in (loader, loader.next_epoch(), loader.starting(1))]
    assert len(set.union(*epochs)) == (1 if persistent else 3)


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_workers_that_stay_change_no_bit_whatever_was_left_off_or_goes_on_at_the_same_time():
    plain = DistributedLoader(Noisy(20), 4, collate=noisy, last="wrap", seed=2)
    loader = DistributedLoader(Noisy(20), 4, collate=noisy, last="wrap", seed=2, num_workers=1, persistent_workers=True)
    left = iter(loader)
    next(left)
    assert list(loader.starting(2)) == list(plain.starting(2))  # while another iteration is under way
    left.close()
    assert list(loader.next_epoch()) == list(plain.next_epoch())
    assert list(pickle.loads(pickle.dumps(loader))) == list(plain)


class Ending(Numbers):
    def __getitem__(self, index):
        if index == 3:
            next(iter(()))
        return index


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_raises_stop_iteration_does_not_end_the_epoch(workers):
    loader = DistributedLoader(Ending(8), 2, shuffle=False, num_workers=workers)
    with pytest.raises(DataError, match="raised StopIteration"):
        list(loader)
    with pytest.raises(DataError, match="raised StopIteration"):
        list(DistributedLoader(range(8), 2, collate=lambda rows: next(iter(()))))


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_rows_of_other_shapes_are_refused_with_what_pads_them(workers):
    rows = [torch.ones(2 + i % 2) for i in range(8)]
    with pytest.raises(DataError, match=r"cannot be stacked(?s:.*)hint: +collate="):
        list(DistributedLoader(rows, 4, num_workers=workers))


@pytest.mark.parametrize("last", [None, {"y": 1}])
def test_rows_of_what_torch_does_not_stack_are_refused_with_what_does(last):
    rows = [{"x": 1}] * 3 + [last] if last else [(torch.ones(2), None)] * 4
    with pytest.raises(DataError, match=r"cannot be stacked(?s:.*)Error: (?s:.*)hint: +collate="):
        list(DistributedLoader(rows, 4, shuffle=False))


@pytest.mark.parametrize("name", ["persistent_workers", "prefetch_factor"])
def test_there_is_nothing_to_keep_or_read_ahead_without_workers(name):
    with pytest.raises(DataError, match="no workers"):
        DistributedLoader(range(8), 2, **{name: 2})
