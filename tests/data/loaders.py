"""Loaders for tests, drawn; and what they yield, as row numbers."""

import random
from itertools import islice

import attrs
import numpy as np
import torch
from hypothesis import strategies as st

from fds.data import DistributedLoader, RepeatingLoader
from fds.data.orders import LAST


class Numbers:
    """Row i is i. Not a list, so that the loader cannot know that nothing is drawn."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        assert 0 <= index < self.length
        return index


class Noisy(Numbers):
    """Row i is i and a number from each global generator."""

    def __getitem__(self, index):
        return index, torch.rand(()).item(), random.random(), np.random.rand()


class NoisyAtOnce(Noisy):
    """The same for many rows, read at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def rows_of(batches, count=None):
    """Return the first `count` batches, or all, as lists."""
    return [batch.tolist() for batch in islice(batches, count)]


def as_lists(rows):
    """Collate rows into themselves."""
    return list(rows)


@st.composite
def loaders(draw, last=LAST, ranks=1, max_start=0):
    """Draw a loader whose batches divide among `ranks` ranks."""
    batch_size = ranks * draw(st.integers(1, 4))
    kind = draw(st.sampled_from(last))
    length = ranks * draw(st.integers(1, 12)) if kind == "keep" else draw(st.integers(1, 30))
    if kind == "drop":
        length += batch_size
    shuffle, seed = draw(st.booleans()), draw(st.integers(0, 5))
    data = draw(st.sampled_from([Numbers, range]))
    start = draw(st.integers(0, max_start))
    return DistributedLoader(data(length), batch_size, shuffle=shuffle, seed=seed, last=kind, start=start)


def stream_of(loader, count):
    """Return `count` batches from the loader's position on, over the epochs."""
    return rows_of(RepeatingLoader(loader), count)


def on(loader, place):
    """Return the loader of another rank."""
    return attrs.evolve(loader, axis=place)
