"""Small: ordinary files that are read whole or locked, and their JSON; a link, a pipe or a device is neither."""

from __future__ import annotations

import collections
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any


def open_ordinary(path: str | Path, flags: int, *, folder: int | None = None) -> int:
    """Return a descriptor of an ordinary file, without following a link or waiting. Raises `OSError`.

    `folder` is the descriptor of an open folder that `path` is a name in.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return fd


def read_small(path: str | Path, most: int, *, folder: int | None = None) -> bytes:
    """Return the bytes of an ordinary file, opened by `open_ordinary`, of at most `most` bytes. Raises `OSError`."""
    with open(open_ordinary(path, os.O_RDONLY, folder=folder), "rb") as file:
        too_large = os.fstat(file.fileno()).st_size > most  # before memory is taken for it
        found = b"" if too_large else file.read(most + 1)
    if too_large or len(found) > most:
        raise OSError(errno.EFBIG, f"more than {most} bytes", str(path))
    return found


def parsed(text: str | bytes) -> Any:
    """Return what a JSON text says. Raises `ValueError`, also for a key that stands twice in one object."""
    return json.loads(text, object_pairs_hook=unique_keys)


class RepeatedKeys(ValueError):
    """An object in a JSON text has `keys` (sorted) more than once, among its `count` pairs."""

    def __init__(self, keys: list[str], count: int):
        super().__init__("a key stands twice in one object")
        self.keys, self.count = keys, count


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs, for `object_pairs_hook`. Raises `RepeatedKeys` where a key stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        raise RepeatedKeys(sorted(name for name, count in counts.items() if count > 1), len(pairs))
    return found
