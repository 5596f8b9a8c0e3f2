"""Media: what they do, which of them a tensor lives on, and reading and writing leaves that live on several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fds.media.device import DEVICE
from fds.media.mapping import leaf_of


class Medium(Protocol):
    """Where leaves live between steps. What is read is what was written, bit for bit. Threads may use it at once."""

    @property
    def name(self) -> str:
        """Its kind: "device", "host" or "disk"."""
        ...

    def make(self, x: Tensor) -> Tensor:
        """Return contiguous memory of the shape and dtype of `x`, with anything in it; `x` is not read.

        It has a storage of its own, and is given back when nobody holds that any more.
        """
        ...

    def read(self, leaves: list[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
        """Begin to copy leaves that live here to `device`.

        Return the function that waits, and returns the copies, which may be written over. The leaves must not change
        until then.
        """
        ...

    def write(self, worked: list[Tensor], new: list[Tensor]) -> Callable[[], Any]:
        """Begin to copy `worked` (on any device) to leaves `new` that live here, of the same shapes and dtypes.

        Return the function that waits. Until then, `worked` must not change, and nobody may read `new`.
        """
        ...


def medium_of(x: Tensor) -> Medium | None:
    """Return the medium that made the memory of a tensor; None for an ordinary tensor.

    >>> medium_of(torch.zeros(2)) is None
    True
    """
    leaf = leaf_of(x)
    return None if leaf is None else leaf.medium


def read(leaves: Sequence[Tensor], device: torch.device) -> Callable[[], list[Tensor]]:
    """Begin to copy leaves to `device`, each from where it lives; ordinary tensors are copied as well.

    Return the function that waits, and returns the copies, which may be written over.

    >>> read([torch.arange(3)], torch.device("cpu"))()
    [tensor([0, 1, 2])]
    """
    groups = _groups(leaves)
    waits = [medium.read([leaves[i] for i in indices], device) for medium, indices in groups]

    def wait() -> list[Tensor]:
        by_index: dict[int, Tensor] = {}
        for (_, indices), copies in zip(groups, _all(waits), strict=True):
            by_index.update(zip(indices, copies, strict=True))
        return [by_index[i] for i in range(len(leaves))]

    return wait


def write(worked: Sequence[Tensor], new: Sequence[Tensor]) -> Callable[[], None]:
    """Begin to copy `worked` to the leaves `new`, each to where it lives; ordinary tensors are written at once.

    Return the function that waits.
    """
    waits = [medium.write([worked[i] for i in some], [new[i] for i in some]) for medium, some in _groups(new)]

    def wait() -> None:
        _all(waits)

    return wait


def _groups(leaves: Sequence[Tensor]) -> list[tuple[Medium, list[int]]]:
    """Return the media of leaves, each with the indices of those that live there."""
    groups: dict[int, tuple[Medium, list[int]]] = {}
    for i, x in enumerate(leaves):
        medium = medium_of(x) or DEVICE
        groups.setdefault(id(medium), (medium, []))[1].append(i)
    return list(groups.values())


def _all(waits: list[Callable[[], Any]]) -> list[Any]:
    """Wait for all, even if one fails: nobody may write into this memory from here on. Raises the first error."""
    done: list[Any] = []
    failed: BaseException | None = None
    for wait in waits:
        try:
            done.append(wait())
        except BaseException as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return done
