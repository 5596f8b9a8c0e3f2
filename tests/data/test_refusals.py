"""What a loader refuses, before a batch is read, and what it says to do instead."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import fds
from fds.data import Coordinate, DistributedLoader
from fds.errors import DataError, FdsError, MeshError
from tests.data.loaders import Numbers


class Flowing(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class Endless(Dataset):
    def __getitem__(self, index):
        return index


REFUSED = {
    "no rows in a batch": ({"batch_size": 0}, "batch_size", "1 or more"),
    "not an int": ({"batch_size": 4.0}, "batch_size", "got:   4.0"),
    "a bool": ({"batch_size": True}, "batch_size", "got:   True"),
    "ranks that do not divide it": ({"axis": Coordinate(0, 3)}, "batch_size", "want:  a multiple of 3"),
    "nor microbatches": (
        {"axis": Coordinate(0, 2), "num_microbatches": 4},
        "among 2 ranks, 4 microbatches each",
        "want:  a multiple of 8",
    ),
    "a last batch that does not": (
        {"axis": Coordinate(0, 4), "last": "keep"},
        "the last batch of an epoch does not divide among 4 ranks",
        "got:   2 rows: 10 in the data set, batch_size=4\n  want:  a multiple of 4\n"
        '  hint:  last="drop" or last="wrap"',
    ),
    "nor into microbatches": ({"num_microbatches": 4, "last": "keep"}, "where: last", "1 rank, 4 microbatches each"),
    "a word for the last": ({"last": "dorp"}, "'dorp'", "did you mean 'drop'?"),
    "too few rows": ({"dataset": range(3)}, "does not fill one batch", "3 rows, batch_size=4"),
    "no rows": ({"dataset": [], "last": "wrap"}, "does not fill one batch", "at least one row"),
    "no rows to keep": ({"dataset": [], "last": "keep"}, "does not fill one batch", "at least one row"),
    "a start before the first": ({"start": -1}, "start", "0 or more"),
    "fewer workers than none": ({"num_workers": -1}, "num_workers", "0 or more"),
    "no microbatches": ({"num_microbatches": 0}, "num_microbatches", "1 or more"),
    "a data set that is iterated": ({"dataset": Flowing()}, "no random access", "fds.data.RepeatingLoader"),
    "a generator": ({"dataset": (i for i in range(9))}, "no random access", "itertools.islice"),
    "a data set without a length": ({"dataset": Endless()}, "has no length", "got:   Endless"),
    "columns": ({"dataset": {"x": [1], "y": [2]}}, "a dict is not", "StackDataset(**columns)"),
    "an axis that is a number": ({"axis": 2}, "not an axis", 'fds.mesh(dp=-1)["dp"]'),
    "a mesh": ({"axis": fds.mesh(dp=1)}, "not an axis", 'fds.mesh(dp=-1)["dp"]'),
    "a place beyond the last": ({"axis": Coordinate(2, 2)}, "not an axis", "Coordinate(index=2, size=2)"),
}


@pytest.mark.parametrize(("changes", "what", "words"), REFUSED.values(), ids=REFUSED)
def test_a_loader_refuses(changes, what, words):
    with pytest.raises(DataError) as caught:
        DistributedLoader(**{"dataset": Numbers(10), "batch_size": 4, **changes})
    assert what in str(caught.value)
    assert words in str(caught.value)


def test_what_divides_is_taken():
    loader = DistributedLoader(Numbers(12), 8, Coordinate(0, 2), num_microbatches=2, last="keep")
    assert [len(batch) for batch in loader] == [4, 2]


@pytest.mark.parametrize("at", [-1, 1.0, True, None, torch.tensor([1]), torch.tensor(1.0), torch.tensor(True), "1"])
def test_a_position_is_a_count(at):
    with pytest.raises(DataError):
        DistributedLoader(Numbers(10), 4).starting(at)


def test_a_seed_is_an_int_or_a_key():
    with pytest.raises(FdsError, match="not a random seed"):
        DistributedLoader(Numbers(10), 4, seed="one")


def test_an_axis_of_other_ranks_is_refused():
    (axis,) = fds.simulate(lambda: fds.mesh(dp=1)["dp"], 1)
    with pytest.raises(MeshError, match="other ranks"):
        DistributedLoader(Numbers(10), 4, axis)


def test_a_loader_prints_without_its_rows():
    text = repr(DistributedLoader(torch.zeros(1000, 8), 10, Coordinate(1, 2), start=3))
    axis = "Coordinate(index=1, size=2)"
    assert text.startswith(f"DistributedLoader(dataset=Tensor of 1000, batch_size=10, axis={axis}, ")


@pytest.mark.parametrize("dataset", [torch.arange(8), np.arange(8), list(range(8)), tuple(range(8)), range(8)])
def test_whatever_has_a_length_and_rows_is_a_data_set(dataset):
    loader = DistributedLoader(dataset, 4, shuffle=False)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
