"""`RepeatingLoader`: any loader, for ever."""

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from fds.data import DistributedLoader, RepeatingLoader
from fds.errors import DataError
from tests.data.loaders import Numbers, rows_of


def test_any_loader_is_iterated_again_and_again():
    assert list(islice(RepeatingLoader(["a", "b", "c"]), 7)) == list("abcabca")


def test_it_goes_on_where_it_is():
    batches = RepeatingLoader(range(4))
    assert [next(batches), next(batches)] == [0, 1]
    assert list(islice(batches, 3)) == [2, 3, 0]
    assert iter(batches) is batches


def test_nothing_is_read_before_a_batch_is_asked_for():
    class Starting(list):
        def __iter__(self):
            raise AssertionError("started")

    batches = RepeatingLoader(Starting())
    with pytest.raises(AssertionError, match="started"):
        next(batches)


def test_a_distributed_loader_goes_on_with_the_next_epoch():
    loader = DistributedLoader(Numbers(6), 2, seed=4, start=1)
    batches = RepeatingLoader(loader)
    got = rows_of(batches, 8)
    assert got == [*rows_of(loader), *rows_of(loader.next_epoch()), *rows_of(loader.next_epoch().next_epoch())]
    assert batches.loader.start == 6
    assert got[2:5] != got[5:8]


@pytest.mark.parametrize("as_batches", [False, True])
def test_a_distributed_sampler_is_told_of_every_further_epoch(as_batches):
    def epoch(number):
        sampler.set_epoch(number)
        return [batch.tolist() for batch in loader]

    sampler = DistributedSampler(range(12), num_replicas=2, rank=1, seed=3)
    if as_batches:
        batched = torch.utils.data.BatchSampler(sampler, 2, drop_last=False)
        loader = DataLoader(range(12), batch_sampler=batched)
    else:
        loader = DataLoader(range(12), batch_size=2, sampler=sampler)
    expected = epoch(5) + epoch(6) + epoch(7)
    sampler.set_epoch(5)
    assert rows_of(RepeatingLoader(loader), 9) == expected
    assert expected[:3] != expected[3:6]


@pytest.mark.parametrize("loader", [[], iter([])])
def test_a_loader_that_yields_nothing_is_refused(loader):
    with pytest.raises(DataError, match="without a batch"):
        next(RepeatingLoader(loader))


def test_what_can_be_iterated_once_only_is_refused_when_it_ends():
    batches = RepeatingLoader(i for i in range(2))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(DataError, match="a generator can be iterated only once"):
        next(batches)


def test_what_is_no_loader_is_refused():
    with pytest.raises(DataError, match="cannot be iterated"):
        RepeatingLoader(3)
