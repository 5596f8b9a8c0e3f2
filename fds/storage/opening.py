"""Open what is stored as a source, verify a save by reading all of it, and compare two states leaf by leaf."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch
from torch import Tensor

from fds.errors import StorageError, expanded
from fds.storage import foreign
from fds.storage.disk.files import OpenFolder, check_path, read_errors
from fds.storage.disk.folders import find, tags
from fds.storage.foreign.weight_files import INDEX, SAFETENSORS, TORCH
from fds.storage.format.manifest import NAME, read_manifest
from fds.storage.format.tensors import as_bytes
from fds.storage.source import Source, blocks, piece, save_source, spans

DEEPSPEED = "*model_states.pt"
WEIGHTS = (SAFETENSORS, *TORCH, INDEX)


def open_source(path: str | os.PathLike[str], tag: str | None = None, *, verify: bool = True) -> Source:
    """Open the save under a tag of a run's directory, by default the last.

    `path` may also be a DeepSpeed checkpoint directory, the folder of a checkpoint of torch.distributed.checkpoint, or
    anything that `import_weights` takes. Bytes of a save are
    compared with their checksums when they are read, unless `verify` is false. Raises `StorageError`.
    """
    path = check_path(path, "dir")
    with read_errors("load", path):
        if path.is_dir() and not tags(path):
            if any(path.glob(DEEPSPEED)) or any(path.glob(f"*/{DEEPSPEED}")):
                return foreign.deepspeed(path, tag)
            if tag is None and (path / foreign.METADATA).is_file():
                return foreign.dcp([path])
            if tag is None and any(p.name.endswith(WEIGHTS) for p in path.iterdir()):
                return foreign.weights(path)
        if tag is None and path.is_file() and path.name.endswith(WEIGHTS):
            return foreign.weights(path)
        folder = OpenFolder.of(find(path, tag))
        return save_source(read_manifest(folder), [folder], verify=verify)


def verify(path: str | os.PathLike[str], tag: str | None = None) -> list[str]:
    """Read every byte of a save, compare every checksum, and return a line for each fault: none if it is whole.

    A fault of a whole file is reported once. One chunk is in memory at a time. Takes the arguments of `open_source`.
    Raises `StorageError` where there is no such save.
    """
    with read_errors("load", path):
        is_run = bool(tags(check_path(path, "dir")))
        if is_run:
            find(Path(path), tag)  # a missing save is not a fault of a save
    try:
        source = open_source(path, tag)
    except StorageError as error:
        if not is_run:
            raise
        return [line(error)]
    faults: dict[tuple, list[StorageError]] = {}
    for name, leaf in source.leaves.items():
        file_at = {(chunk.box, chunk.start): chunk.file for chunk in leaf.chunks}
        kept = ((chunk.box, chunk.start, chunk.length) for chunk in leaf.chunks)  # others are with other ranks
        for box, start, length in kept if is_run else ((None, *span) for span in spans(leaf)):
            try:
                piece(source, name, start, length, box)
            except StorageError as error:
                faults.setdefault((file_at.get((box, start)), error.what, error.got, error.want), []).append(error)
    return [line(same[0]) + (f", and {len(same) - 1} more such chunks" if same[1:] else "") for same in faults.values()]


def line(error: StorageError) -> str:
    """Return an error as one line."""
    fields = [f"{name} {text}" for name, text in (("got", error.got), ("want", error.want)) if text]
    return " ".join(f"{error.where}: {error.what}{' (' + ', '.join(fields) + ')' if fields else ''}".split())


STEP = 2**18  # elements that are compared at a time: 2 MiB in float64
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.frozen
class Difference:
    """The difference of a leaf in two states.

    Attributes:
        name: its key path.
        left, right: dtype and shape in each, empty where it is missing.
        numel: how many elements were compared: 0 where it is missing or of another shape.
        num_different: how many of them differ, in their bits if dtypes are equal, else in value.
        max_abs: the largest |a - b|, in float64; infinite if one is NaN.
        max_relative: the largest |a - b| / max(|a|, |b|).
    """

    name: str
    left: str
    right: str
    numel: int = 0
    num_different: int = 0
    max_abs: float = 0.0
    max_relative: float = 0.0


def differences(a: str | os.PathLike[str] | Source, b: str | os.PathLike[str] | Source) -> list[Difference]:
    """Return the leaves in which two states differ, in the order of the first, then those that only the second has.

    Each is a `Source` or a path as for `locate`. Two blocks of 8 MiB are in memory at a time. Raises `StorageError`.
    """
    first, second = (x if isinstance(x, Source) else open_source(*locate(x)) for x in (a, b))
    differing = []
    for name in {**first.leaves, **second.leaves}:
        left, right = first.leaves.get(name), second.leaves.get(name)
        difference = Difference(name, str(left or ""), str(right or ""))
        if left is not None and right is not None and left.shape == right.shape:
            difference = _compare(difference, first, second)
        if difference.num_different or difference.left != difference.right:
            differing.append(difference)
    return differing


def locate(text: str | os.PathLike[str], tag: str | None = None) -> tuple[Path, str | None]:
    """Return the path of a run and the tag in `DIR`, `DIR:TAG` or `DIR/TAG`.

    Raises `StorageError` for a second tag.

    >>> locate("runs/gpt:step00000012")
    (PosixPath('runs/gpt'), 'step00000012')
    """
    path, named = Path(expanded(text)), None
    if (path / NAME).is_file():
        path, named = path.resolve().parent, path.resolve().name
    elif not path.exists() and ":" in path.name:
        name, _, named = path.name.rpartition(":")
        path = path.parent / name
    if named is not None and tag is not None and named != tag:
        raise StorageError("two tags are named", where=str(text), got=f"{named} and {tag}"[:200], want="one tag")
    return path, named if tag is None else tag


def _compare(leaf: Difference, first: Source, second: Source) -> Difference:
    for x, y in _pairs(first, second, leaf.name):
        differ = _differ(x, y)
        count = int(differ.sum())
        if count:
            far, relative = _distances(x[differ], y[differ])
            leaf = attrs.evolve(
                leaf,
                num_different=leaf.num_different + count,
                max_abs=max(leaf.max_abs, far),
                max_relative=max(leaf.max_relative, relative),
            )
        leaf = attrs.evolve(leaf, numel=leaf.numel + len(x))
    return leaf


def _pairs(first: Source, second: Source, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same elements of both, reading each block of either once."""
    left, right = blocks(first, name), blocks(second, name)
    x = y = torch.empty(0)
    remaining = math.prod(first.leaves[name].shape)
    while remaining:
        x = x if len(x) else next(left)[1]
        y = y if len(y) else next(right)[1]
        n = min(len(x), len(y), STEP)
        yield x[:n], y[:n]
        x, y, remaining = x[n:], y[n:], remaining - n


def _differ(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype == y.dtype:
        bits = BITS[x.element_size()]
        return as_bytes(x).view(bits) != as_bytes(y).view(bits)
    x, y = _wide(x), _wide(y)
    return (x != y) & ~(x.isnan() & y.isnan())


def _distances(x: Tensor, y: Tensor) -> tuple[float, float]:
    x, y = _wide(x), _wide(y)
    far = (x - y).abs()
    relative = torch.where(far == 0, 0.0, far / torch.maximum(x.abs(), y.abs()))
    largest = lambda d: float(d.nan_to_num(math.inf, math.inf).max())
    return largest(far), largest(relative)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)
