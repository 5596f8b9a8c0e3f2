"""Files of weights: safetensors, state dicts of torch.save, and either in shards with an index."""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from fds.errors import StorageError
from fds.storage.disk.files import parse_json, read_small, refusal
from fds.storage.foreign.foreign_leaf import ForeignLeaf, open_torch, source_of, whole
from fds.storage.format.manifest import SavedLeaf, is_too_large
from fds.storage.format.tensors import CODES, as_bytes, dtype_name
from fds.storage.source import Source

INDEX = ".index.json"
SAFETENSORS, TORCH = ".safetensors", (".bin", ".pt", ".pth")
NESTED = ("state_dict", "model", "module")
MAX_HEADER = 100_000_000  # bytes, also of an index; as in the safetensors library
_DTYPES = {code: dtype for dtype, code in CODES.items()}


def weights(path: str | os.PathLike[str]) -> Source:
    """Open the parameters in files of Hugging Face or torch.save, as "params.<name>".

    Args:
        path: a .safetensors file; a state dict of torch.save (.bin, .pt, .pth), at the top level or as the only
            one of "state_dict", "model" and "module"; the .index.json of shards of either kind; or a directory with one
            of these.

    Only names, dtypes and shapes are read until elements are requested. Tensors that share storage are separate leaves.
    Raises `StorageError` for files that are missing, truncated or ambiguous, for values that are not tensors, for
    shards outside the index's directory, and for a name in two shards.
    """
    path = Path(path)
    file = _in_directory(path) if path.is_dir() else path
    kept = dict(_read_index(file) if file.name.endswith(INDEX) else _tensors(file).items())
    return source_of(str(path), {f"params.{name}": leaf for name, leaf in kept.items()}, {}, ())


def _in_directory(folder: Path) -> Path:
    """Return the file of weights in a directory: an index or safetensors before others."""
    kinds = (f"*{SAFETENSORS}{INDEX}", f"*{SAFETENSORS}", f"*.bin{INDEX}", "pytorch_model.bin")
    kinds += tuple(f"*{ending}" for ending in TORCH)
    for kind in kinds:
        paths = sorted(folder.glob(kind))
        if len(paths) > 1:
            got, hint = ", ".join(p.name for p in paths[:5]), f"give the file: weights({str(paths[0])!r})"
            raise refusal(
                "a directory has several files of weights", str(folder), got, "one, or an index of them all", hint
            )
        if paths:
            return paths[0]
    got = ", ".join(sorted(os.listdir(folder))[:5])
    raise refusal("there are no weights here", str(folder), got, f"one of {', '.join(kinds)}")


def _tensors(file: Path) -> dict[str, ForeignLeaf]:
    if file.name.endswith(SAFETENSORS):
        return dict(_safetensors(file))
    if file.name.endswith(TORCH):
        tensors = _state_dict(open_torch(file), str(file))
        return {name: whole(x, f"{file}: {name}") for name, x in tensors.items()}
    where, want = str(file), f"a name that ends in {', '.join((SAFETENSORS, *TORCH, INDEX))}"
    raise refusal("this is not a file of weights", where, file.name[:80] if os.path.exists(file) else "nothing", want)


def _read_index(index: Path) -> Iterator[tuple[str, ForeignLeaf]]:
    """Yield the leaves of an index. Each must be in its shard, and in no other."""
    try:
        record = parse_json(read_small(Path(os.path.realpath(index)), MAX_HEADER))
        table: dict[str, str] = record["weight_map"]
        if not table or not all(isinstance(name, str) for name in (*table, *table.values())):
            raise ValueError("weight_map is not a table of names")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        got = f"{type(error).__name__}: {error}"[:200]
        raise refusal("an index cannot be read", str(index), got, '{"weight_map": {name: file, ...}}') from error
    seen: dict[str, str] = {}
    for shard in dict.fromkeys(table.values()):
        if Path(shard).name != shard or shard.startswith(".") or "\0" in shard or shard.endswith(INDEX):
            got = repr(shard)[:80]
            raise refusal("an index leads out of its directory", str(index), got, "the name of a file beside it")
        for name, leaf in _tensors(index.parent / shard).items():
            if name in seen:
                where = f"{index}: {name}"
                raise refusal("two shards have a tensor of the same name", where, f"{seen[name]} and {shard}")
            seen[name] = shard
            yield name, leaf
    for name, shard in table.items():
        if seen.get(name) != shard:
            got = f"in {seen[name]}" if name in seen else "nowhere"
            raise refusal("a tensor is missing from its shard", f"{index}: {name}", got, f"in {shard}")
    if unknown := seen.keys() - table.keys():
        name = min(unknown)
        where, hint = f"{index}: {name}", "the shards are of another model than the index"
        raise refusal("a shard has a tensor that the index does not name", where, f"in {seen[name]}", hint=hint)


def _state_dict(content: Any, where: str) -> dict[str, Any]:
    """Return the state dict in what torch.save wrote: the dict itself, or the only one in it."""
    if not isinstance(content, dict):
        raise StorageError("a file does not hold a state dict", where=where, got=type(content).__name__, want="a dict")
    if "ds_version" in content:  # a file of a DeepSpeed checkpoint, whose module may hold all weights, or names only
        module = content.get("module")
        if not isinstance(module, dict) or any(isinstance(x, Tensor) and not x.numel() for x in module.values()):
            hint = "give its directory: fds.import_deepspeed(dir, ...)"
            raise refusal("this is a file of a DeepSpeed checkpoint without the weights", where, hint=hint)
        content = {"module": module}
    nested = [key for key in NESTED if isinstance(content.get(key), dict)]
    if len(nested) > 1 or (nested and any(isinstance(x, Tensor) for x in content.values())):
        got, want = ", ".join(map(str, content))[:200], f"tensors, or one of {', '.join(NESTED)}"
        raise refusal("it is not clear which of these is the state dict", where, got, want)
    content = content[nested[0]] if nested else content
    if not content:
        raise StorageError("a state dict is empty", where=where)
    for name in content:
        if not isinstance(name, str):
            raise StorageError("a name in a state dict is not a string", where=where, got=repr(name)[:80])
    return content


def _safetensors(file: Path) -> Iterator[tuple[str, ForeignLeaf]]:
    """Yield the leaves of a safetensors file, which must cover every byte after the header."""
    try:
        with open(file, "rb", opener=_open) as opened:
            about = os.fstat(opened.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ValueError("it is not a regular file")
            length = int.from_bytes(opened.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER, about.st_size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {about.st_size}")
            header = parse_json(opened.read(length))
        header.pop("__metadata__", None)
        places = {name: _place(**entry) for name, entry in header.items()}
        end = 0
        for name, (_, _, first, last) in sorted(places.items(), key=lambda item: item[1][2:]):
            if first != end:
                raise ValueError(f"{name} begins at byte {first} of the data, and what is before it ends at {end}")
            end = last
        if 8 + length + end != about.st_size:
            raise ValueError(f"{8 + length + end} bytes by its header, and {about.st_size} in the file")
    except FileNotFoundError as error:
        raise StorageError("a file is missing", where=str(file)) from error
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise refusal("a file cannot be read", str(file), str(error)[:300], "a whole safetensors file") from error
    for name, (code, shape, first, _) in places.items():
        leaf = SavedLeaf(dtype_name(_DTYPES[code]), shape, ())
        yield name, ForeignLeaf(leaf, _reader(file, 8 + length + first, about.st_size))


def _place(dtype: str, shape: list[int], data_offsets: list[int]) -> tuple[str, tuple[int, ...], int, int]:
    first, last = data_offsets
    if dtype not in _DTYPES:
        raise ValueError(f"a tensor of dtype {dtype!r:.40}, not one of {', '.join(_DTYPES)}")
    if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
        raise ValueError("sizes and offsets that are not non-negative integers")
    if is_too_large(shape):
        raise ValueError(f"a tensor {shape}"[:200])
    if last - first != math.prod(shape) * _DTYPES[dtype].itemsize:
        raise ValueError(f"{last - first} bytes for a tensor {dtype} {shape}"[:200])
    return dtype, tuple(shape), first, last


def _reader(file: Path, offset: int, size: int) -> Callable[[int, Tensor], None]:
    """Return a function that reads elements of a tensor at an offset in a file of this size."""

    def read(start: int, out: Tensor) -> None:
        into, done = as_bytes(out).numpy().data, 0
        try:
            with open(file, "rb", buffering=0, opener=_open) as opened:
                if os.fstat(opened.fileno()).st_size != size:
                    raise OSError("it has another size than before")
                while done < len(into):
                    at = offset + start * out.element_size() + done
                    if not (more := os.preadv(opened.fileno(), [into[done:]], at)):
                        raise OSError("it ends before its tensors do")
                    done += more
        except OSError as error:
            raise StorageError("a file was changed while it was read", where=str(file), got=str(error)) from error

    return read


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # or opening a pipe would wait for a writer
