"""`RepeatingLoader`: iterates any loader endlessly."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fds.data.distributed import DistributedLoader
from fds.errors import DataError

_END = object()


class RepeatingLoader:
    """Iterate a loader endlessly; `next(loader)` gives one batch.

    - A `DistributedLoader` continues with its next epoch, in another order.
    - Before every further epoch of a torch DataLoader, `set_epoch` of its sampler (a DistributedSampler, say) is
      called with the next epoch, without which every epoch would have the order of the first.
    - Anything else is iterated again from its beginning.

    Like any iterator it continues where it is: `iter` does not restart it. `loader` is the loader that is iterated.

    Raises `DataError` if an epoch yields nothing, or the loader cannot be iterated.

    >>> batches = RepeatingLoader([1, 2])
    >>> [next(batches) for _ in range(5)]
    [1, 2, 1, 2, 1]
    """

    def __init__(self, loader: Iterable):
        if not hasattr(loader, "__iter__"):
            raise DataError("the loader cannot be iterated", got=type(loader).__name__, want="a loader")
        self.loader: Any = loader
        self._current: Any = None  # created with the first batch, since workers start with it

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        if self._current is not None:
            if (batch := next(self._current, _END)) is not _END:
                return batch
            self._advance()
        self._current = iter(self.loader)
        if (batch := next(self._current, _END)) is not _END:
            return batch
        self._current = None
        raise DataError(
            "an epoch without a batch",
            got=f"{type(self.loader).__name__} that yields nothing",
            want="a loader that yields batches each time it is iterated",
            hint="a generator can be iterated only once: pass an object whose __iter__ makes a new one",
        )

    def _advance(self) -> None:
        """Move on to the next epoch."""
        if isinstance(self.loader, DistributedLoader):
            self.loader = self.loader.next_epoch()
        for sampler in _samplers(self.loader):
            sampler.set_epoch(getattr(sampler, "epoch", 0) + 1)


def _samplers(loader: Any) -> list[Any]:
    """Return the samplers of a torch DataLoader that have `set_epoch`, each once."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
    return list({id(it): it for it in samplers if callable(getattr(it, "set_epoch", None))}.values())
