"""From the tensors of files to those of a model: transformers' own rules of names, and its conversions.

transformers renames tensors when it loads them (prefixes of base models, names of old releases), and puts some together
or cuts them apart: the matrices of all experts of a layer are one. Its rules are run here on names, and its conversions
on the numbers of rows, which says from which rows of which tensors each row of a parameter is read.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fds.errors import ComposeError, StorageError
from fds.storage.foreign.foreign_leaf import ForeignLeaf
from fds.storage.format.manifest import SavedLeaf
from fds.storage.format.tensors import DTYPES, dtype_name

Sources = tuple[str, ...]  # the names of tensors in files


def package() -> Any:
    """Return transformers, of a release that has rules of names. Raises `ComposeError` where there is none."""
    try:
        for module in ("conversion_mapping", "core_model_loading"):
            importlib.import_module(f"transformers.{module}")
    except ImportError as error:
        raise ComposeError(
            "a model of transformers needs transformers",
            where="fds.hf",
            got=str(error)[:200],
            want="transformers 5 or later",
            hint="pip install 'fds[hf]'",
        ) from error
    return importlib.import_module("transformers")


def by_target(module: Any, leaves: Mapping[str, ForeignLeaf], where: str) -> dict[str, tuple[ForeignLeaf, Sources]]:
    """Return what files have by the names of a model, also names that it lacks: a leaf, and the tensors of which it is.

    Raises `StorageError` for tensors that cannot be converted.
    """
    loading = importlib.import_module("transformers.core_model_loading")
    rules = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(module)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    want, prefix = module.state_dict(), module.base_model_prefix
    named: dict[str, tuple[ForeignLeaf, Sources]] = {}
    groups: dict[str, Conversion] = {}
    last: list[tuple[Conversion, dict[str, Tensor]]] = []
    for name in sorted(leaves, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, want)
        if target not in want and name in want:  # it has the model's name already
            target, pattern = name, None
        if pattern is None:
            named[target] = leaves[name], (name,)
        else:
            group = groups.setdefault(target, Conversion(converter_of[pattern], target, module, where, last))
            group.sources.append((name, pattern, leaves[name]))
    for group in groups.values():
        named |= group.leaves()
    return named


@attrs.define(eq=False)
class Conversion:
    """A converter of transformers for the tensors of one parameter, or of those that one is cut into."""

    converter: Any
    target: str  # the first of its parameters
    module: nn.Module
    where: str
    last: list[tuple[Conversion, dict[str, Tensor]]]  # the one that was run last whole, for all conversions
    sources: list[tuple[str, str, ForeignLeaf]] = attrs.field(factory=list)  # name, pattern that it matches, leaf

    def leaves(self) -> dict[str, tuple[ForeignLeaf, Sources]]:
        """Return its parameters as leaves, and the names of the tensors that they are read from."""
        meta = self.run(lambda i: torch.empty(self.shape(i), dtype=self.dtype(i), device="meta"))
        names, rows = tuple(name for name, _, _ in self.sources), self.rows(meta)
        made: dict[str, tuple[ForeignLeaf, Sources]] = {}
        for name, x in meta.items():
            read = self.read_whole(name) if rows is None else self.read_rows(rows[name], x.shape[-1])
            made[name] = ForeignLeaf(SavedLeaf(dtype_name(x.dtype), tuple(x.shape), ()), read), names
        return made

    def shape(self, i: int) -> tuple[int, ...]:
        """Return the shape of a tensor in the files."""
        return self.sources[i][2].leaf.shape

    def dtype(self, i: int) -> torch.dtype:
        """Return the dtype of a tensor in the files."""
        return DTYPES[self.sources[i][2].leaf.dtype]

    def run(self, make: Callable[[int], Tensor]) -> dict[str, Tensor]:
        """Return what the converter makes of tensors: `make` returns each of the sources, by number."""
        converter = copy.deepcopy(self.converter)
        try:
            for i, (name, pattern, _) in enumerate(self.sources):
                converter.add_tensor(self.target, name, pattern, make(i))
            out = converter.convert(self.target, model=self.module, config=getattr(self.module, "config", None))
        except StorageError:
            raise
        except Exception as error:
            raise StorageError(
                "tensors cannot be converted to those of the model",
                where=f"{self.where}: {', '.join(name for name, _, _ in self.sources[:3])}",
                got=f"{type(error).__name__}: {error}"[:200],
                want=f"what {self.target} is made of",
            ) from error
        return {name: x[0] if isinstance(x, list) else x for name, x in out.items()}

    def rows(self, meta: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return by parameter which row each of its rows is, of the sources one after another; None where rows change.

        The converter is run on rows of two numbers that say which row it is: what does more than move them is seen.
        """
        counts = [math.prod(self.shape(i)[:-1]) for i in range(len(self.sources))]
        first = [sum(counts[:i]) for i in range(len(counts))]
        lengths = {shape[-1:] for shape in (*map(self.shape, range(len(counts))), *(x.shape for x in meta.values()))}
        if len(lengths) != 1 or lengths == {()} or len({self.dtype(i) for i in range(len(counts))}) != 1:
            return None

        def numbers(i: int) -> Tensor:
            rows = torch.arange(first[i], first[i] + counts[i], device="cpu").view(self.shape(i)[:-1])
            return torch.stack([2 * rows, 2 * rows + 1], -1)

        try:
            moved = self.run(numbers)
        except StorageError:
            return None
        origins = {name: x[..., 0].reshape(-1) // 2 for name, x in moved.items() if x.shape[-1:] == (2,)}
        for name, x in meta.items():
            if name not in origins or moved[name].shape[:-1] != x.shape[:-1]:
                return None
            if not torch.equal(moved[name].reshape(-1, 2), torch.stack([2 * origins[name], 2 * origins[name] + 1], -1)):
                return None
        return origins

    def read_rows(self, rows: Tensor, length: int) -> Callable[[int, Tensor], None]:
        """Return what reads elements of a parameter from the rows of the sources that it is made of."""
        counts = torch.tensor([math.prod(self.shape(i)[:-1]) for i in range(len(self.sources))])
        ends = counts.cumsum(0)
        of = torch.bucketize(rows, ends, right=True)
        edges = (torch.diff(rows) != 1) | (torch.diff(of) != 0)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), edges.nonzero().view(-1) + 1, torch.tensor([len(rows)])])
        source = of[starts[:-1]]
        inside = rows[starts[:-1]] - (ends - counts)[source]

        def read(start: int, out: Tensor) -> None:
            done, end = start, start + out.numel()
            at = int(torch.searchsorted(starts, start // length, right=True)) - 1
            while done < end:
                low, high = int(starts[at]) * length, int(starts[at + 1]) * length
                stop = min(end, high)
                leaf = self.sources[int(source[at])][2]
                leaf.read(int(inside[at]) * length + done - low, out[done - start : stop - start])
                done, at = stop, at + 1

        return read

    def read_whole(self, name: str) -> Callable[[int, Tensor], None]:
        """Return what reads elements of a parameter by converting all of it."""

        def whole(i: int) -> Tensor:
            x = torch.empty(self.shape(i), dtype=self.dtype(i), device="cpu")
            self.sources[i][2].read(0, x.view(-1))
            return x

        def read(start: int, out: Tensor) -> None:
            if not self.last or self.last[0][0] is not self:
                self.last.clear()  # before the next ones are in memory
                self.last.append((self, self.run(whole)))
            x = self.last[0][1][name].reshape(-1)
            out.copy_(x[start : start + out.numel()])
            if start + out.numel() == x.numel():
                self.last.clear()

        return read
