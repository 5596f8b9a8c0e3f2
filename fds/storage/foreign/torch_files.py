"""Open files of torch.save without running code from them; tensors are mapped."""

from __future__ import annotations

import os
import re
import stat
import threading
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fds.errors import StorageError

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
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        _check_storages(path, found)
        return found
    except StorageError:
        raise
    except FileNotFoundError as error:
        raise StorageError("a file is missing", where=str(path)) from error
    except Exception as error:  # torch may raise any error: KeyError, AssertionError, RecursionError, ...
        raise _refusal(path, error) from error


def _check_storages(path: Path, found: Any) -> None:
    """Raise `ValueError` for storages that are not in the zip directory: torch maps the size that the pickle states."""
    with zipfile.ZipFile(path) as file:
        entries = [entry for entry in file.infolist() if entry.filename.split("/")[-2:-1] == ["data"]]
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("its tensors are compressed")
    storages = {(storage.data_ptr(), storage.nbytes()) for storage in _storages(found) if storage.nbytes()}
    if beyond := Counter(size for _, size in storages) - Counter(entry.file_size for entry in entries):
        raise ValueError(f"tensors of {next(iter(beyond))} bytes, but fewer in the file")


def _storages(found: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of all tensors in what torch.load returned."""
    seen, left = set(), [found]
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
    if found := re.search(r"(?:GLOBAL|class|function) ([\w.<>']+)", text):
        return StorageError(
            "a file names a class or function that is not admitted",
            where=str(path),
            got=found[1][:200],
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
