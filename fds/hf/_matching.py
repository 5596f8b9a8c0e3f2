"""Which tensors of files are which parameters of a model: none is missing or left over, and their shapes are equal."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from fds.errors import StorageError, StorageWarning, did_you_mean
from fds.hf._names import Sources, by_target
from fds.storage import Source
from fds.storage.disk.files import refusal
from fds.storage.foreign import weights
from fds.storage.foreign.foreign_leaf import ForeignLeaf, equal
from fds.storage.format.tensors import DTYPES

Leaf = tuple[ForeignLeaf, Sources]
OLD_BUFFERS = ("rotary_emb.inv_freq", "position_ids")  # which older releases saved, and models compute


@attrs.frozen
class Differences:
    """What a folder and a model do not have in common."""

    folder: Path
    missing: Sequence[str]  # parameters
    unexpected: Sequence[str]  # tensors of the files
    mismatched: Mapping[str, str]  # by parameter, tensors and shapes in the files
    shapes: Mapping[str, tuple[int, ...]]  # of the model

    def check(self) -> None:
        """Raise `StorageError` for the first of them."""
        hint = "strict=False initialises these as the model does, and ignores what it lacks"
        for name, got in self.mismatched.items():
            want = f"{self.shapes[name]}, as {name} of the model"
            raise refusal("a tensor has another shape", f"{self.folder}: {name}", got, want, hint)
        for name in self.missing:
            near = did_you_mean(name, self.unexpected)
            more = f"{len(self.missing)} are missing in all" * (len(self.missing) > 1)
            raise refusal(
                "a parameter is missing in the files", f"{self.folder}: {name}", "nothing", str(self.shapes[name]),
                "\n".join(filter(None, (near, more, hint))),
            )  # fmt: skip
        for name in self.unexpected:
            near = did_you_mean(name, self.shapes)
            raise refusal(
                "the model has no such parameter", f"{self.folder}: {name}",
                want="a tensor of the model", hint="\n".join(filter(None, (near, hint))),
            )  # fmt: skip

    def warn(self, stacklevel: int) -> None:
        """Warn of all of them."""
        if self.missing or self.unexpected or self.mismatched:
            lists = list(self.missing), list(self.unexpected), list(self.mismatched)
            warnings.warn(StorageWarning(str(self.folder), *lists), stacklevel=stacklevel + 1)


def files_of(folder: Path) -> Source:
    """Open the files of weights in a folder: those that transformers takes, if there are others too."""
    usual = (folder / name for name in ("model.safetensors", "model.safetensors.index.json"))
    return weights(next((path for path in usual if path.exists()), folder))


def matched(module: Any, folder: Path, opened: Source, strict: bool) -> dict[str, Leaf]:
    """Return by parameter its leaf in the files and the tensors of which it is, and fill the buffers that they have.

    Raises `StorageError`, if `strict`, for what is missing, left over or of another shape; warns of it otherwise.
    """
    leaves = {name: ForeignLeaf(leaf, _read(opened, name)) for name, leaf in opened.leaves.items()}
    have = by_target(module, {name.removeprefix("params."): leaf for name, leaf in leaves.items()}, str(folder))
    first = {id(p): name for name, p in module.named_parameters()}
    name_of = {name: first[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    buffers = dict(module.named_buffers())
    chosen: dict[str, Leaf] = {}
    unexpected: list[str] = []
    mismatched: dict[str, str] = {}
    for target, (leaf, names) in have.items():
        name = name_of.get(target)
        if name is None:
            if target in buffers and buffers[target].shape == leaf.leaf.shape:
                _fill(buffers[target], leaf)
            elif not _is_ignored(module, target, buffers):
                unexpected += names
        elif leaf.leaf.shape != shapes[name]:
            mismatched[name] = f"{', '.join(names[:3])} {leaf.leaf.shape}"
        elif name in chosen:
            _check_tied(folder, name, chosen[name], (leaf, names))
        else:
            chosen[name] = leaf, names
    computed = module._keys_to_ignore_on_load_missing
    missing = [n for n in shapes if n not in chosen and n not in mismatched and not matches(computed, n)]
    differences = Differences(folder, missing, unexpected, mismatched, shapes)
    if strict:
        differences.check()
    differences.warn(3)
    return {name: leaf for name, leaf in chosen.items() if name not in mismatched}


def _read(opened: Source, name: str) -> Any:
    return lambda start, out: opened.read(name, start, out)


def _fill(buffer: torch.Tensor, leaf: ForeignLeaf) -> None:
    values = torch.empty(leaf.leaf.shape, dtype=DTYPES[leaf.leaf.dtype], device="cpu")
    leaf.read(0, values.view(-1))
    buffer.copy_(values)


def _check_tied(folder: Path, name: str, a: Leaf, b: Leaf) -> None:
    """Raise `StorageError` for two tensors of one parameter that differ."""
    if not equal(a[0], b[0]):
        raise StorageError(
            "two tensors are one parameter of the model, and differ",
            where=f"{folder}: {name}",
            got=f"{a[1][0]} and {b[1][0]}",
            want="one tensor, or equal ones",
            hint="config.tie_word_embeddings = False; fds.hf.lazy(path, config=config) makes them two",
        )


def _is_ignored(module: Any, name: str, buffers: Collection[str]) -> bool:
    """Say whether a tensor that a model lacks is one that it does without: a buffer that it computes, an old name."""
    if matches(module._keys_to_ignore_on_load_unexpected, name):
        return True
    return any(name.endswith(end) and any(b.endswith(end) for b in buffers) for end in OLD_BUFFERS)


def matches(patterns: Iterable[str] | None, name: str) -> bool:
    """Say whether one of transformers' patterns describes a part of a name."""
    return any(re.search(pattern, name) for pattern in patterns or ())
