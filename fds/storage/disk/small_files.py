"""Small files that are read at once, and JSON in them."""

from __future__ import annotations

import collections
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any


def open_regular(path: str | Path, flags: int, *, folder: int | None = None) -> int:
    """Return a descriptor of a regular file, without following links or blocking. Raises `OSError`.

    `path` is relative to `folder`, the descriptor of an open folder, if that is given.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def read_small(path: str | Path, most: int, *, folder: int | None = None) -> bytes:
    """Return the bytes of a regular file of at most `most` bytes. Raises `OSError`."""
    with open(open_regular(path, os.O_RDONLY, folder=folder), "rb") as file:
        too_large = os.fstat(file.fileno()).st_size > most  # before memory is allocated
        found = b"" if too_large else file.read(most + 1)
    if too_large or len(found) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes", str(path))
    return found


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises `ValueError`, also for a repeated key in an object."""
    return json.loads(text, object_pairs_hook=unique_keys)


class RepeatedKeys(ValueError):
    """An object in a JSON text has `keys` (sorted) repeatedly, among its `count` pairs."""

    def __init__(self, keys: list[str], count: int):
        super().__init__("a key stands twice in one object")
        self.keys, self.count = keys, count


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs, as an `object_pairs_hook`. Raises `RepeatedKeys` for a repeated key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        raise RepeatedKeys(sorted(name for name, count in counts.items() if count > 1), len(pairs))
    return found
