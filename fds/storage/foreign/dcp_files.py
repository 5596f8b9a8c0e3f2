"""Files of torch.distributed.checkpoint (DCP): what a folder holds, and how elements of it are read.

A folder has `.metadata`, a pickle that the save writes last, and files of items, one after another: a box of a tensor,
or any other value, each as torch.save writes it. torch's own reader runs code from `.metadata`, and reads items whole.
Here a pickle may name nothing but the few classes that DCP writes, which become inert, and of an item those bytes are
read that are asked for.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import StorageError
from fds.layout import Box
from fds.media.locks import open_regular
from fds.storage.disk.files import read_small, refusal
from fds.storage.disk.writer import BLOCK
from fds.storage.foreign.foreign_leaf import Inert
from fds.storage.format import boxes
from fds.storage.format.manifest import is_too_large
from fds.storage.format.tensors import DTYPES, as_bytes, dtype_name

Keys = tuple[str, ...]  # that lead to something in a state dict
METADATA = ".metadata"
MAX_METADATA, MAX_VALUE = 2**31, 2**24  # bytes
_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem", "pathlib")
_MODULES += ("pathlib._local", "torch.distributed._shard.sharded_tensor.metadata")  # of Python 3.13; before torch 2.3
_TENSOR = ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
_NAMES = {"torch.serialization._get_layout", "collections.OrderedDict", *(f"torch._utils.{name}" for name in _TENSOR)}
_WANT = "a checkpoint that torch.distributed.checkpoint wrote"


class Record(Inert):
    """A stand-in for an object of a class of DCP: what its constructor was given, and its attributes."""

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


class _Inert(Unpickler):
    """Reads a pickle in which the classes of DCP are stand-ins, and others are refused before anything is called."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name == "Size":
            return torch.Size
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        storage = module in ("torch", "torch.storage") and name.endswith("Storage")
        if module in _MODULES or storage or f"{module}.{name}" in _NAMES:
            return type(name.rpartition(".")[2], (Record,), {})
        raise UnpicklingError(f"it names {module}.{name}"[:200])

    def persistent_load(self, pid: Any) -> Any:
        return pid


@attrs.frozen
class Item:
    """Where an item is: its file, its first byte there, its bytes; of a tensor the box that it is."""

    folder: Path
    file: str
    offset: int
    length: int
    box: Box = ()

    def __str__(self) -> str:
        return f"{self.folder / self.file}, bytes {self.offset} to {self.offset + self.length}"


@attrs.frozen
class SavedTensor:
    """A tensor in boxes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    items: tuple[Item, ...]


@attrs.frozen(eq=False)
class Folder:
    """What a checkpoint holds, by its place in the state dict that was saved: the keys that lead there."""

    where: str
    tensors: dict[Keys, SavedTensor]
    values: dict[Keys, Item]


def open_folder(folder: Path) -> Folder:
    """Read what a checkpoint holds. Raises `StorageError` for one that is missing, unfinished, damaged or another's."""
    path = folder / METADATA
    if not path.is_file():
        raise _missing(folder)
    try:
        metadata = _Inert(io.BytesIO(read_small(path, MAX_METADATA))).load()
        tensors, values = _items(folder, metadata)
    except StorageError:
        raise
    except Exception as error:  # whatever a damaged pickle leads to
        got, hint = f"{type(error).__name__}: {error}"[:300], "no code was run"
        raise refusal("the metadata of a checkpoint cannot be read", str(path), got, _WANT, hint) from error
    return Folder(str(folder), tensors, values)


def _missing(folder: Path) -> StorageError:
    if not folder.is_dir():
        return StorageError("there is no such checkpoint", where=str(folder), want=f"a folder with {METADATA}")
    inside = sorted(os.listdir(folder))
    if any(name.endswith(".distcp") or name.startswith(METADATA) for name in inside):
        what, hint = "a checkpoint is unfinished", "its save did not end: an earlier one is whole"
    else:
        what, hint = "this is no checkpoint of torch.distributed.checkpoint", ""
        if below := [name for name in inside if (folder / name / METADATA).is_file()]:
            hint = f"give the folder of one: {folder / below[-1]}"
    return refusal(what, str(folder), f"{', '.join(inside[:5]) or 'nothing'}", f"{METADATA}, written last", hint)


def _items(folder: Path, metadata: Any) -> tuple[dict[Keys, SavedTensor], dict[Keys, Item]]:
    """Return the tensors and the other values, in the order of the state dict."""
    sizes: dict[str, int] = {}

    def item(info: Any, box: Box = ()) -> Item:
        name, offset, length = info.relative_path, info.offset, info.length
        if not isinstance(name, str) or Path(name).name != name or name.startswith(".") or "\0" in name:
            raise ValueError(f"a file {name!r:.80}")
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{name} is compressed by {info.transform_descriptors!r:.60}")
        if not (type(offset) is type(length) is int and offset >= 0 <= length):
            raise ValueError(f"bytes {offset!r:.20} and {length!r:.20}")
        if name not in sizes:
            try:
                sizes[name] = os.stat(folder / name).st_size
            except FileNotFoundError as error:
                raise StorageError("a file of the checkpoint is missing", where=str(folder / name)) from error
        if offset + length > sizes[name]:
            got, want = f"{sizes[name]} bytes", f"{offset + length} or more"
            raise refusal("a file of the checkpoint is cut off", str(folder / name), got, want)
        return Item(folder, name, offset, length, box)

    places = {
        (index.fqn, tuple(x) if (x := getattr(index, "offset", None)) is not None else None): info
        for index, info in metadata.storage_data.items()
    }
    tensors, values = dict[Keys, SavedTensor](), dict[Keys, Item]()
    named, keys = metadata.state_dict_metadata, getattr(metadata, "planner_data", None) or {}
    for name in [*(n for n in keys if n in named), *(n for n in named if n not in keys)]:
        about, path = named[name], tuple(map(str, keys.get(name, (name,))))
        if not hasattr(about, "chunks"):
            values[path] = item(places[name, None])
            continue
        dtype, shape = about.properties.state[0], _sizes(about.size)
        cells = [(tuple(zip(_sizes(c.offsets), _sizes(c.sizes), strict=True)), c) for c in about.chunks]
        items = [item(places[name, tuple(c.offsets)], box) for box, c in cells if boxes.numel(box)]
        _check_boxes(name, shape, [x.box for x in items])
        tensors[path] = SavedTensor(DTYPES[dtype_name(dtype)], shape, tuple(items))
    return tensors, values


def _sizes(size: Any) -> tuple[int, ...]:
    listed = tuple(size)
    if not all(type(n) is int and n >= 0 for n in listed) or is_too_large(listed):
        raise ValueError(f"a size {listed}"[:100])
    return listed


def _check_boxes(name: str, shape: tuple[int, ...], cells: Sequence[Box]) -> None:
    """Raise `ValueError` unless boxes are inside a tensor, and have as many elements as it."""
    inside = all(
        len(box) == len(shape) and all(i + n <= m for (i, n), m in zip(box, shape, strict=True)) for box in cells
    )
    if not inside or sum(map(boxes.numel, cells)) != boxes.numel(boxes.whole(shape)):
        raise ValueError(f"the parts of {name} do not make a tensor {shape}"[:200])


def read_value(item: Item) -> Any:
    """Return a value that is no tensor, or a small one. Raises `StorageError`; no code of the file is run."""
    try:
        if item.length > MAX_VALUE:
            raise ValueError(f"{item.length} bytes")
        return torch.load(io.BytesIO(_Part(item).read()), map_location="cpu", weights_only=True)
    except Exception as error:  # torch may raise any error
        got = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
        raise refusal(
            "a value of the checkpoint cannot be read", str(item), got, "numbers, text, lists, dicts"
        ) from error


class _Part(io.RawIOBase):
    """The bytes of an item as a file."""

    def __init__(self, item: Item):
        self.item, self.at = item, 0
        self.fd = open_regular(item.folder / item.file, os.O_RDONLY)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = max(0, offset + (0, self.at, self.item.length)[whence])
        return self.at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.item.length - self.at)
        size = left if size is None or size < 0 else min(size, left)
        data = os.pread(self.fd, size, self.item.offset + self.at)
        self.at += len(data)
        return data

    def fill(self, at: int, out: Tensor) -> None:
        """Fill a contiguous tensor with bytes from one on. Raises `OSError` for a file that ends before."""
        into, done = as_bytes(out).numpy().data, 0
        while done < len(into):
            count = os.preadv(self.fd, [into[done : done + BLOCK]], self.item.offset + at + done)
            if not count:
                raise OSError(0, "the file ends early", str(self.item.folder / self.item.file))
            done += count

    def close(self) -> None:
        if not self.closed:
            os.close(self.fd)
        super().close()


def read_box(tensor: SavedTensor, box: Box, start: int, out: Tensor) -> None:
    """Fill `out`, contiguous (length,), with elements of a flattened box of a tensor. Raises `StorageError`."""
    wanted, count = boxes.rectangles(box, start, start + out.numel()), 0
    for item in tensor.items:
        shared = [(at, rectangle, boxes.common(rectangle, item.box)) for at, rectangle in wanted]
        parts = [(at, rectangle, both) for at, rectangle, both in shared if both is not None]
        if not parts:
            continue
        try:
            with _Part(item) as part:
                begin, strides = _layout(part, tensor, item)
                for at, rectangle, both in parts:
                    inside = lambda origin, both=both: tuple(
                        (i - o, n) for (i, n), (o, _) in zip(both, origin, strict=True)
                    )
                    view = boxes.view(out, at, rectangle, both)
                    x = view if view.is_contiguous() else torch.empty_like(view, memory_format=torch.contiguous_format)
                    _read(part, begin, strides, boxes.sizes(item.box), inside(item.box), x)
                    if x is not view:
                        view.copy_(x)
                    count += x.numel()
        except StorageError:
            raise
        except Exception as error:  # of a damaged zip, or pickle
            got = f"{type(error).__name__}: {error}"[:200]
            raise refusal("a tensor of the checkpoint cannot be read", str(item), got, _WANT) from error
    if count != out.numel():  # parts that overlap, of as many elements as the tensor has
        where = str(tensor.items[0]) if tensor.items else ""
        raise refusal("the parts of a tensor do not make it", where, f"{count} elements", f"{out.numel()}")


def _read(part: _Part, begin: int, strides: tuple[int, ...], shape: tuple[int, ...], inside: Box, out: Tensor) -> None:
    """Fill `out`, contiguous in the shape of a box, with that box of an item of these strides."""
    flat, size = out.view(-1), out.element_size()
    if strides == _contiguous(shape):
        for first, at, length in boxes.runs(shape, [(0, inside)]):
            part.fill(begin + first * size, flat[at : at + length])
        return
    whole = torch.empty(boxes.numel(boxes.whole(shape)), dtype=out.dtype, device="cpu")
    part.fill(begin, whole)
    out.copy_(boxes.view(whole.as_strided(shape, strides).reshape(-1), 0, boxes.whole(shape), inside))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _layout(part: _Part, tensor: SavedTensor, item: Item) -> tuple[int, tuple[int, ...]]:
    """Return the first byte of a tensor's elements in its item, and its strides, in elements.

    Raises `ValueError` for what is not such a tensor, stored as torch.save stores it.
    """
    with zipfile.ZipFile(part) as archive:  # pyright: ignore[reportArgumentType]
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        if entries["data.pkl"].file_size > MAX_VALUE:
            raise ValueError("a large data.pkl")
        made = _Inert(io.BytesIO(archive.read(entries["data.pkl"]))).load()
        order = archive.read(entries["byteorder"]) if "byteorder" in entries else b"little"
    if type(made).__name__ not in _TENSOR or order != b"little":
        raise ValueError(f"it is a {type(made).__name__}, in {order!r:.20} bytes")
    storage, first, shape, strides = made.arguments[:4]
    data = entries[f"data/{storage[2]}"]
    shape, strides, size = _sizes(shape), _sizes(strides), tensor.dtype.itemsize
    last = first + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else -1
    dense = boxes.numel(boxes.whole(shape)) * size == data.file_size and first == 0 and last * size < data.file_size
    if shape != boxes.sizes(item.box) or data.compress_type != zipfile.ZIP_STORED or not dense:
        raise ValueError(f"{data.file_size} bytes of shape {shape}, where {tensor.dtype} of {item.box} should be")
    head = os.pread(part.fd, 30, item.offset + data.header_offset)  # of a local file of a zip
    if head[:4] != b"PK\3\4":
        raise ValueError("an entry of the zip is not where it should be")
    return data.header_offset + 30 + sum(int.from_bytes(head[i : i + 2], "little") for i in (26, 28)), strides
