"""Verify a save by reading all of it."""

from __future__ import annotations

import os
from pathlib import Path

from fds.errors import StorageError
from fds.storage.disk.folders import find, tags
from fds.storage.disk.paths import checked_path, read_errors
from fds.storage.format.blocks import spans
from fds.storage.opening import open_source
from fds.storage.source import piece


def verify(path: str | os.PathLike[str], tag: str | None = None) -> list[str]:
    """Read every byte of a save, compare every checksum, and return a line for each fault: none if it is whole.

    A fault of a whole file is reported once. One chunk is in memory at a time. Takes the arguments of `open_source`.
    Raises `StorageError` where there is no such save.
    """
    with read_errors("load", path):
        is_run = bool(tags(checked_path(path, "dir")))
        if is_run:
            find(Path(path), tag)  # a missing save is not a fault of a save
    try:
        source = open_source(path, tag)
    except StorageError as error:
        if not is_run:
            raise
        return [line(error)]
    found: dict[tuple, list[StorageError]] = {}
    for name, leaf in source.leaves.items():
        file_at = {(chunk.box, chunk.start): chunk.file for chunk in leaf.chunks}
        kept = ((chunk.box, chunk.start, chunk.length) for chunk in leaf.chunks)  # others are with other ranks
        for box, start, length in kept if is_run else ((None, *span) for span in spans(leaf)):
            try:
                piece(source, name, start, length, box)
            except StorageError as error:
                found.setdefault((file_at.get((box, start)), error.what, error.got, error.want), []).append(error)
    return [line(same[0]) + (f", and {len(same) - 1} more such chunks" if same[1:] else "") for same in found.values()]


def line(error: StorageError) -> str:
    """Return an error as one line."""
    fields = [f"{name} {text}" for name, text in (("got", error.got), ("want", error.want)) if text]
    return " ".join(f"{error.where}: {error.what}{' (' + ', '.join(fields) + ')' if fields else ''}".split())
