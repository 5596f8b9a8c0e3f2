"""Orders: which row stands where in an epoch, a function of the seed and of the epoch's number."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, Sampler

from fds import random
from fds.data.permutation import permutation
from fds.errors import DataError

Ordering = Sampler | Callable[[int, Tensor], Sequence[int] | Tensor | np.ndarray]


@attrs.frozen(eq=False)
class Orders:
    """The orders of all epochs, made when they are asked for; the last two are kept.

    Attributes:
        rows: of the data set.
        key: of the seed.
        sampler: what gives the rows of an epoch; None is a permutation of all, or, unless `shuffle`, their own order.
    """

    rows: int
    key: Tensor
    shuffle: bool
    sampler: Ordering | None = None
    made: dict[int, np.ndarray] = attrs.field(factory=dict, repr=False)
    lengths: list[int] = attrs.field(factory=list, repr=False)  # of a sampler's epochs: one number, once it is known

    def length(self) -> int:
        """Return the rows of an epoch. Raises `DataError` for a sampler that gives something else."""
        if self.sampler is None:
            return self.rows
        if not self.lengths:
            self._of(0)
        return self.lengths[0]

    def rows_of(self, epoch: int, first: int, end: int) -> list[int]:
        """Return the numbers of the rows that stand from place `first` to `end` in an epoch."""
        if self.sampler is None and not self.shuffle:
            return list(range(first, end))
        return self._of(epoch)[first:end].tolist()

    def _of(self, epoch: int) -> np.ndarray:
        if epoch not in self.made:
            key = random.fold_in(self.key, "order", epoch)
            made = permutation(key, self.rows) if self.sampler is None else self._sampled(epoch, key)
            for old in list(self.made)[:-1]:
                del self.made[old]
            self.made[epoch] = made
        return self.made[epoch]

    def _sampled(self, epoch: int, key: Tensor) -> np.ndarray:
        """Return what the sampler gives in an epoch, `(N,) int64`."""
        with random.seeded(key), random.python_seeded(key):
            if isinstance(self.sampler, Sampler):
                given: Any = list(_at_epoch(self.sampler, epoch, key))
            else:
                assert self.sampler is not None
                given = self.sampler(epoch, key)
        try:
            order = np.asarray(given)
        except (ValueError, TypeError):
            order = np.asarray("lists")
        if order.ndim != 1 or not len(order) or order.dtype.kind not in "iu":
            raise DataError("a sampler gives the numbers of rows, one after the other", where=f"sampler, epoch {epoch}",
                            got=f"{type(given).__name__} {str(given)[:40]}", want="integers, one or more",
                            hint="batches are cut by batch_size: pass the sampler of the rows")  # fmt: skip
        if order.min() < 0 or order.max() >= self.rows:
            raise DataError("a sampler gave a row that the data set does not have", where=f"sampler, epoch {epoch}",
                            got=str(order.min() if order.min() < 0 else order.max()),
                            want=f"0 to {self.rows - 1}")  # fmt: skip
        if not self.lengths:
            self.lengths.append(len(order))
        if len(order) != self.lengths[0]:
            raise DataError("a sampler gives as many rows in every epoch", where=f"sampler, epoch {epoch}",
                            got=f"{len(order)} rows", want=f"{self.lengths[0]}, as in another epoch")  # fmt: skip
        return order.astype(np.int64)


def refuse_sampler(sampler: Any) -> None:
    """Raise `DataError` for what is no sampler of all ranks' rows."""
    if isinstance(sampler, DistributedSampler):
        raise DataError(
            "a DistributedSampler gives a rank its share, which the loader does itself", where="sampler",
            got="DistributedSampler", want="a sampler of all ranks' rows", hint="leave it out: axis= says which share",
        )  # fmt: skip
    if sampler is None or isinstance(sampler, Sampler):
        return
    hint = ""
    try:
        if callable(sampler) and not isinstance(sampler, type):
            inspect.signature(sampler).bind("epoch", "key")
            return
    except TypeError as error:
        hint = f"it is called with an epoch and a key: {error}"
    except ValueError:  # a function that is not written in Python: nothing tells
        return
    raise DataError("not a sampler", where="sampler", got=repr(sampler)[:60], hint=hint,
                    want="a torch Sampler, or a function of (epoch, key) that returns the numbers of rows")


def _at_epoch(sampler: Any, epoch: int, key: Tensor) -> Any:
    """Return a torch sampler as it is at the beginning of an epoch, whatever was drawn from it before."""
    if callable(getattr(sampler, "set_epoch", None)):
        sampler.set_epoch(epoch)
    if isinstance(generator := getattr(sampler, "generator", None), torch.Generator):
        generator.manual_seed(random.seed(key, "generator"))
    return sampler
