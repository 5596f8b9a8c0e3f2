"""Leaves in files of other programs: opened without running code, whole or in pieces, read by elements, and renamed."""

from __future__ import annotations

import os
import re
import stat
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter

from fds.errors import StorageError, did_you_mean
from fds.storage.disk.files import refusal
from fds.storage.format.manifest import SavedLeaf
from fds.storage.format.tensors import DTYPES, dtype_name
from fds.storage.source import Source

_admitting = threading.Lock()  # the classes that torch.load admits are global


def _renew() -> None:
    """Renew the lock in the child of a fork, where the thread that held it does not exist."""
    global _admitting
    _admitting = threading.Lock()


os.register_at_fork(after_in_child=_renew)


class Inert:
    """A stand-in for an object of a class that is admitted by name: its attributes, without behaviour."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments


def open_torch(path: Path, inert: Iterable[str] = ()) -> Any:
    """Return what torch.save wrote, with tensors mapped from the file.

    Objects of the classes in `inert` (dotted names) become `Inert`. Raises `StorageError` for a file that is missing,
    truncated, of the format before torch 1.6, or that names another class or function that torch does not admit.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise StorageError("this is not a file", where=str(path), want="a file that torch.save wrote")
        with _admitting, torch.serialization.safe_globals([(Inert, name) for name in inert]):
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        _check_storages(path, content)
        return content
    except StorageError:
        raise
    except FileNotFoundError as error:
        raise StorageError("a file is missing", where=str(path)) from error
    except Exception as error:  # torch may raise any error: KeyError, AssertionError, RecursionError, ...
        raise _refusal(path, error) from error


def _check_storages(path: Path, content: Any) -> None:
    """Raise `ValueError` for storages that are not in the zip directory: torch maps the size that the pickle states."""
    with zipfile.ZipFile(path) as file:
        entries = [entry for entry in file.infolist() if entry.filename.split("/")[-2:-1] == ["data"]]
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("its tensors are compressed")
    storages = {(storage.data_ptr(), storage.nbytes()) for storage in _storages(content) if storage.nbytes()}
    if beyond := Counter(size for _, size in storages) - Counter(entry.file_size for entry in entries):
        raise ValueError(f"tensors of {next(iter(beyond))} bytes, but fewer in the file")


def _storages(content: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of all tensors in what torch.load returned."""
    seen, left = set(), [content]
    while left:
        x = left.pop()
        if isinstance(x, Tensor):
            if x.layout == torch.strided and x.device.type == "cpu":
                yield x.untyped_storage()
        elif isinstance(x, dict | list | tuple | Inert) and id(x) not in seen:
            seen.add(id(x))
            left += vars(x).values() if isinstance(x, Inert) else x.values() if isinstance(x, dict) else x


def _refusal(path: Path, error: BaseException) -> StorageError:
    text = str(error)
    if match := re.search(r"(?:GLOBAL|class|function) ([\w.<>']+)", text):
        return StorageError(
            "a file names a class or function that is not admitted",
            where=str(path),
            got=match[1][:200],
            want="tensors, numbers, text, lists and dicts",
            hint="no code was run; save the file again without it",
        )
    if "mmap can only be used" in text:
        return StorageError(
            "a file is of a format that cannot be read in parts",
            where=str(path),
            want="the zip format of torch 1.6 and later",
            hint="torch.save(torch.load(path, weights_only=True), path)",
        )
    return StorageError(
        "a file cannot be read",
        where=str(path),
        want="a whole file that torch.save wrote",
        got=f"{type(error).__name__}: {text}"[:300],
    )


PIECE = 2**20  # elements that are held in memory at a time


@attrs.frozen(eq=False)
class ForeignLeaf:
    """A leaf, and `read(start, out)`, which fills `out` (length,) with its flattened elements from `start` on.

    Leaves with the same `place` are one tensor under several names.
    """

    leaf: SavedLeaf
    read: Callable[[int, Tensor], None]
    place: Hashable = None


def source_of(where: str, kept: Mapping[str, ForeignLeaf], extra: dict[str, Any], composition: Sequence[str]) -> Source:
    """Return a source of these leaves by key path."""

    def read(name: str, start: int, out: Tensor) -> None:
        leaf = kept[name].leaf
        numel = torch.Size(leaf.shape).numel()
        if out.dtype != DTYPES[leaf.dtype] or start < 0 or start + out.numel() > numel:
            got = f"{start} to {start + out.numel()}, {out.dtype}"
            raise refusal("a leaf has no such elements", f"{where}: {name}", got, f"0 to {numel}, torch.{leaf.dtype}")
        if out.numel():
            kept[name].read(start, out)

    first: dict[Hashable, str] = {}
    aliases = {name: first.setdefault(item.place, name) for name, item in kept.items() if item.place is not None}
    leaves = {name: item.leaf for name, item in kept.items()}
    return Source(where, leaves, read, extra, tuple(composition), aliases)


def number(value: float, dtype: torch.dtype) -> ForeignLeaf:
    """Return a leaf of shape () with this value."""
    return whole(torch.tensor(value, dtype=dtype, device="cpu"), where="")


def whole(x: Any, where: str) -> ForeignLeaf:
    """Return a tensor as a leaf. Raises `StorageError` for anything but a tensor that a state can hold."""
    check_tensor(x, where)
    place = (x.data_ptr(), x.shape, x.stride()) if x.numel() else None
    leaf = SavedLeaf(dtype_name(x.dtype), tuple(x.shape), ())
    return ForeignLeaf(leaf, lambda start, out: _copy(x, start, out), place)


def join(shape: Sequence[int], pieces: Sequence[Tensor], where: str) -> ForeignLeaf:
    """Return the concatenation of flat tensors as a leaf; additional elements are padding.

    Raises `StorageError` for pieces that are not tensors, have several dtypes, or too few elements.
    """
    for piece in pieces:
        check_tensor(piece, where)
    numel, ends = torch.Size(shape).numel(), list(accumulate(piece.numel() for piece in pieces))
    if len({piece.dtype for piece in pieces}) != 1 or ends[-1] < numel:
        got = ", ".join(f"{dtype_name(piece.dtype)} {tuple(piece.shape)}" for piece in pieces)[:200] or "none"
        want = f"{numel} elements of one dtype, for shape {tuple(shape)}"
        raise refusal("the pieces of a tensor do not fit its shape", where, got, want)

    def read(start: int, out: Tensor) -> None:
        for piece, end in zip(pieces, ends, strict=True):
            first = end - piece.numel()
            low, high = max(start, first), min(start + out.numel(), end)
            if low < high:
                _copy(piece, low - first, out[low - start : high - start])

    return ForeignLeaf(SavedLeaf(dtype_name(pieces[0].dtype), tuple(shape), ()), read)


def equal(a: ForeignLeaf, b: ForeignLeaf) -> bool:
    """Return whether two leaves have the same elements, read a piece at a time."""
    if str(a.leaf) != str(b.leaf):
        return False
    numel = torch.Size(a.leaf.shape).numel()
    for start in range(0, numel, PIECE):
        x, y = (torch.empty(min(PIECE, numel - start), dtype=DTYPES[a.leaf.dtype], device="cpu") for _ in range(2))
        a.read(start, x)
        b.read(start, y)
        if not torch.equal(x, y):
            return False
    return True


def check_tensor(x: Any, where: str) -> Tensor:
    """Return `x` if it is a dense CPU tensor of a dtype that files can hold. Raises `StorageError`."""
    plain = type(x) in (Tensor, Parameter) and x.layout == torch.strided and x.device.type == "cpu"
    if not plain or x.dtype not in _KNOWN:
        got = f"{type(x).__name__}" + (f" {x.dtype}, {x.layout}, {x.device}" if isinstance(x, Tensor) else "")
        raise refusal("this is not a tensor that a state can hold", where, got, f"a dense one of {', '.join(DTYPES)}")
    return x


def _copy(x: Tensor, start: int, out: Tensor) -> None:
    """Copy elements of a flattened tensor of any strides, using no more memory than `out`."""
    x = x.detach()
    if x.dim() <= 1 or x.is_contiguous():
        flat = x.view(-1) if x.is_contiguous() else x.reshape(-1)  # with 0 or 1 dimensions also a view
        out.copy_(flat[start : start + out.numel()])
        return
    row, done = x[0].numel(), 0
    while done < out.numel():
        index, offset = divmod(start + done, row)
        if offset == 0 and (rows := (out.numel() - done) // row):
            out[done : done + rows * row].view(rows, *x.shape[1:]).copy_(x[index : index + rows])
            done += rows * row
        else:
            length = min(row - offset, out.numel() - done)
            _copy(x[index], offset, out[done : done + length])
            done += length


_KNOWN = frozenset(DTYPES.values())


def renamed(source: Source, rename: Mapping[str, str] | Callable[[str], str]) -> Source:
    """Return a source with other names of parameters and buffers, in the optimizer's state too.

    Args:
        source: leaves "params.<name>", "opt.<slot>.<name>" and "buffers.<name>" are renamed; others stay.
        rename: new names by old ones, where others stay the same; or a function from old to new name.

    Raises `StorageError` for an unknown old name, a new name that is not a string, and two leaves with the same new
    name.
    """
    places = {path: place for path in source.leaves if (place := _place(path)) is not None}
    names = dict.fromkeys(name for _, name in places.values())
    if isinstance(rename, Mapping):
        for name in rename:
            if name not in names:
                hint = did_you_mean(str(name), names)
                raise refusal("there is nothing of this name to rename", source.where, repr(name)[:80], hint=hint)
        new = {name: rename.get(name, name) for name in names}
    else:
        new = {name: rename(name) for name in names}
    for name, other in new.items():
        if not isinstance(other, str) or not other:
            raise refusal("a new name is not a string", f"{source.where}: {name}", repr(other)[:80], "a name")
    old: dict[str, str] = {}
    for path in source.leaves:
        prefix, name = places.get(path, (path, ""))
        path_new = prefix + new[name] if path in places else path
        if path_new in old:
            got = f"{old[path_new]} and {path}"
            raise refusal("two leaves would have one name", source.where, got, f"one of them as {path_new}")
        old[path_new] = path

    def read(path: str, start: int, out: Tensor) -> None:
        source.read(old[path], start, out)

    now = {was: path for path, was in old.items()}
    return attrs.evolve(
        source,
        leaves={path: source.leaves[was] for path, was in old.items()},
        read=read,
        read_box=None,
        aliases={now[name]: now[first] for name, first in source.aliases.items()},
    )


def _place(path: str) -> tuple[str, str] | None:
    """Split a key path before the name in it; None if it has no name."""
    num_parts = {"params": 1, "buffers": 1, "opt": 2}.get(path.split(".")[0], 0)
    parts = path.split(".", num_parts)
    return (path.removesuffix(parts[-1]), parts[-1]) if num_parts and len(parts) > num_parts else None
