"""Batches: which leaves are rows, and how a batch becomes microbatches: the stations `batch` and `split`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from fds import random, tree
from fds.errors import BatchError
from fds.microbatches import Microbatches
from fds.step.call import Call, seeded
from fds.step.checks import contracts

_ELEMENTS = 4096  # of a leaf that a checksum looks at, evenly spaced


@tree.leaf
@attrs.frozen(eq=False)
class Whole:
    """A batch leaf that every microbatch gets whole: see `whole`."""

    value: Any


def whole(x: Any) -> Whole:
    """Mark a leaf of a batch that is not to be sliced into microbatches; the loss sees the leaf itself.

    >>> whole([1, 2])
    Whole(value=[1, 2])
    """
    return Whole(x)


def check_tree(batch: Any, at: str = "") -> None:
    """Raise `BatchError` where a leaf of a batch, or of the part at a path, hides tensors: they could not be sliced.

    Leaves marked by `whole` are not examined.
    """
    for path in tree.opaque(batch):
        raise BatchError(
            "a leaf of the batch hides tensors",
            where=place(".".join(filter(None, (at, path)))),
            got=type(tree.paths(batch)[path]).__name__,
            want="tensors in dicts, lists, tuples, Mappings, named tuples, attrs classes or dataclasses",
            hint="take it apart, or register its class with torch.utils._pytree",
        )


def rows(batch: Any) -> int | None:
    """Return the length that all sliced leaves share, None where there are none.

    Raises `BatchError` where two leaves disagree.
    """
    lengths = {x.shape[0] for x in tree.leaves(batch) if _is_sliced(x)}
    if len(lengths) < 2:
        return next(iter(lengths), None)
    sliced = [(path, x.shape[0]) for path, x in tree.paths(batch).items() if _is_sliced(x)]
    at, length = sliced[0]
    where, other = next(pair for pair in sliced if pair[1] != length)
    raise BatchError(
        "the leaves of the batch disagree in length",
        where=place(where),
        got=f"{other} rows here, {length} at {place(at)}",
        want="one length along dim 0, in every step: any may be accumulated or shared over ranks",
        hint="mark a leaf that is not made of rows: fds.whole(x)",
    )


@attrs.frozen
class Split:
    """The station `split`: a batch as `num_microbatches` consecutive slices, views without a copy.

    Slices of a sparse COO tensor are copies. Other layouts cannot be sliced.
    """

    num_microbatches: int = 1
    draws: ClassVar = False

    def checked(self, batch: Microbatches) -> tuple[Any, ...]:
        """Return the parts of a batch that is cut already. Raises `BatchError` where they are not as many as here."""
        n = self.num_microbatches
        if len(batch.parts) == n:
            return batch.parts
        raise BatchError(
            f"the batch is cut already, and not into {n}",
            got=f"{len(batch.parts)} microbatches",
            want=f"{n} microbatch{'es' * (n > 1)}",
            hint=f"accumulate({len(batch.parts)})" if n > 1 else "fds.evaluate(step, state, list(batch.parts))",
        )

    def __call__(self, batch: Any) -> list[Any]:
        """Return the microbatches. Raises `BatchError` for leaves that disagree or do not divide."""
        n, length = self.num_microbatches, rows(batch)
        if n > 1:
            check_tree(batch)
        if n > 1 and length is None:
            raise BatchError(
                "the batch has no rows to split",
                got=type(batch).__name__,
                want=f"{n} microbatches",
                hint="a batch is a pytree (dict, list, tuple, record) of tensors; convert other containers",
            )
        if length is not None and (length % n or length < n):
            where = next(path for path, x in tree.paths(batch).items() if _is_sliced(x))
            what = f"does not divide into {n} microbatches" if length else "has no rows"
            raise BatchError(
                f"the batch {what}",
                where=place(where),
                got=f"{length} rows",
                want=f"a positive multiple of {n}" if n > 1 else "one or more",
                hint="drop the last rows, or mark a leaf that is not made of rows: fds.whole(x)"
                if length
                else "leave out what has no rows, on every rank",
            )
        if n > 1:
            _check_slices(batch)
            for path, got in _uncut(batch, length):
                raise BatchError(
                    f"a part of the batch has an entry for each of the {length} rows, and is not cut",
                    where=place(path),
                    got=got,
                    want=f"a tensor, or fds.Microbatches of {n} parts",
                    hint="only tensors are cut into microbatches; fds.whole(x) gives the whole of it to each of them",
                )
        leaves, build = tree.flatten(batch)
        leaves = list(map(_trainable, leaves))
        size = 0 if length is None else length // n
        return [build([_slice(x, i * size, size, n) for x in leaves]) for i in range(n)]


def place(path: str) -> str:
    """Return how to call a leaf of the batch in a message.

    >>> place("inputs.0"), place("")
    ('batch.inputs.0', 'batch')
    """
    return f"batch.{path}" if path else "batch"


def _slice(x: Any, start: int, size: int, n: int) -> Any:
    if isinstance(x, Whole):
        return tree.map(_trainable, x.value)
    if n == 1 or not _is_sliced(x):
        return x
    return x.narrow(0, start, size) if x.layout is torch.strided else x.narrow_copy(0, start, size)


def _check_slices(batch: Any) -> None:
    for path, x in tree.paths(batch).items():
        if _is_sliced(x) and x.layout not in (torch.strided, torch.sparse_coo):
            raise BatchError(
                "a leaf of the batch has no slices",
                where=place(path),
                got=str(x.layout),
                want="a dense tensor, or a sparse one in the COO layout",
                hint="fds.whole(x) gives it whole to every microbatch; fds.Microbatches takes parts",
            )


def _uncut(part: Any, rows: int | None, at: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and kind of everything that has as many entries as there are rows and would not be sliced.

    These are lists and tuples without tensors (texts, file names), and arrays. A tuple of numbers is taken for a size.
    """
    inside: list[tuple[Any, Any]]
    if tree.is_mapping(part):
        inside = list(part.items())
    elif tree.is_sequence(part):
        inside = list(enumerate(part))
        is_size = isinstance(part, tuple) and {type(x) for x in part} <= {int, float, bool}
        if len(part) == rows and not is_size and not any(isinstance(x, Tensor | Whole) for x in tree.leaves(part)):
            yield at, f"a {type(part).__name__} of {rows}, the first {part[0]!r:.40}"
            return
    else:
        shape = None if isinstance(part, Tensor | Whole) else getattr(part, "shape", None)
        if isinstance(shape, tuple) and shape[:1] == (rows,):
            yield at, f"{type(part).__name__} of shape {shape}"
        return
    for key, x in inside:
        yield from _uncut(x, rows, f"{at}.{key}" if at else str(key))


def _trainable(x: Any) -> Any:
    """Return a leaf that autograd can save for backward: a copy of an inference tensor."""
    return x.clone() if isinstance(x, Tensor) and x.is_inference() else x


def _is_sliced(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0


def checksums(batch: Any, *, waits: bool = False) -> tuple[int, int]:
    """Return checksums of the shapes and dtypes of a batch, and of all of it: elements, numbers and texts too.

    What `whole` marks counts in the second alone. Elements on a GPU are left out, unless it `waits` for them.
    """
    kinds = values = 0
    for x in tree.leaves(batch):
        inside = tree.leaves(x.value) if isinstance(x, Whole) else [x]
        for y in inside:
            kind = kind_of(y).encode()
            kinds = kinds if isinstance(x, Whole) else zlib.crc32(kind, kinds)
            values = zlib.crc32(_elements(y, waits), zlib.crc32(kind, values))
    return kinds, values


def kind_of(x: Any) -> str:
    """Return shape and dtype of a leaf of a batch, or what class it is of.

    >>> kind_of(torch.zeros(2, 3)), kind_of("text")
    ('(2, 3) float32', 'str')
    """
    return f"{tuple(x.shape)} {str(x.dtype)[6:]}" if isinstance(x, Tensor) else type(x).__name__


def _elements(x: Any, waits: bool) -> bytes:
    """Return some elements of a tensor, of a number or a text what it is, of all else nothing."""
    if not isinstance(x, Tensor):
        return repr(x).encode() if isinstance(x, bool | int | float | complex | str) else b""
    if x.layout is not torch.strided or x.is_meta or not (waits or x.device.type == "cpu"):
        return b""
    flat = x.detach().reshape(-1)
    few = flat[:: flat.numel() // _ELEMENTS | 1].cpu()  # an odd step, which no width of a power of two meets
    return (torch.view_as_real(few.resolve_conj()) if few.is_complex() else few).double().numpy().tobytes()


Map = Callable[[Any, Call], Any]


@attrs.frozen(eq=False)
class SplitBatch:
    """A batch after the stations `batch` and `split`: its microbatches, or what went wrong there."""

    batch: Any  # as it was given
    count: int  # of microbatches, here and on every other rank
    microbatches: list[Any] | None = None  # None where this rank needs none
    error: Exception | None = None
    parts: list[Any] | None = None  # the batch after the maps; of `Microbatches` every one of them


def split_batch(batch: Any, maps: tuple[Map, ...], split: Split, call: Call) -> SplitBatch:
    """Return a batch through its maps and the split. Raises `BatchError`.

    `Microbatches` are cut already: the maps are given each of them, which are as many as `split` makes.
    """
    is_cut = isinstance(batch, Microbatches)
    parts = [_mapped(part, maps, call, i) for i, part in enumerate(split.checked(batch) if is_cut else [batch])]
    microbatches = cut(parts, Split(1) if is_cut else split, call)
    return SplitBatch(batch, len(microbatches), microbatches, parts=parts)


def cut(parts: list[Any], split: Split, call: Call) -> list[Any]:
    """Return the microbatches of mapped parts of a batch, each cut by `split`. Raises `BatchError`."""
    if not random.draws(split):
        return [x for part in parts for x in contracts.microbatches(split(part), split)]
    share, _ = call.dimensions.share_of_batch
    microbatches: list[Any] = []
    for i, part in enumerate(parts):
        with seeded(call, [split], "split", share, i):
            microbatches += contracts.microbatches(split(part), split)
    return microbatches


def _mapped(batch: Any, maps: tuple[Map, ...], call: Call, part: int) -> Any:
    if not maps:
        return batch
    share, _ = call.dimensions.share_of_batch
    rows, original = [x for x in tree.leaves(batch) if isinstance(x, Tensor) and not x.is_inference()], batch
    versions = list(map(tree.version_of, rows))
    batch = tree.copied(batch)  # whose containers a map may fill
    for i, map_ in enumerate(maps):
        own_call = call.given_to(map_, "batch", i, share, part)
        with seeded(own_call, [map_]):
            batch = contracts.batch(map_(batch, own_call), batch, map_)
        if (now := list(map(tree.version_of, rows))) != versions:
            changed = {id(x) for x, a, b in zip(rows, now, versions, strict=True) if a != b}
            written = [place(path) for path, x in tree.paths(original).items() if id(x) in changed]
            raise contracts.written_rows(map_, tree.named(written))
    return batch
