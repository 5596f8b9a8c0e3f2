"""The text: the standard library of this Python, or files of the user; a part of it is always held out."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

import fds

# left out: tests, tables, third-party packages
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "pydoc_data"}


@attrs.frozen(eq=False)
class Text:
    """The text for training, and the held-out text for evaluation."""

    train: Tensor  # (N,) uint8
    held_out: Tensor  # (M,) uint8
    digest: str  # of both: a resumed run must use the same bytes

    def to(self, device: torch.device) -> Text:
        """Return the text on a device."""
        return attrs.evolve(self, train=self.train.to(device), held_out=self.held_out.to(device))


def read(paths: Sequence[str] = (), *, context: int) -> Text:
    """Read the given files and folders, else the sources of the standard library.

    One file in twenty, by a hash of its name, is held out; where that leaves either side without a window of
    `context` bytes, the last twentieth of all bytes is.

    Raises `FdsError` for a path that is missing or without text, and for too little text.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for name, file in sorted(standard_library() if not paths else named(paths)):
        parts[is_held_out(name)].append(file.read_bytes())
    train, held_out = (b"\n\n".join(part) for part in parts)
    if min(len(train), len(held_out)) <= context:
        train += held_out
        cut = len(train) - max(len(train) // 20, context + 1)
        train, held_out = train[: max(cut, 0)], train[max(cut, 0) :]
    if len(train) <= context:
        raise fds.FdsError(
            "there is too little text",
            where=", ".join(map(str, paths)),
            got=f"{len(train) + len(held_out):,} bytes",
            want=f"at least {2 * context + 2:,}: a window of --context {context} to learn, and one held out",
        )
    digest = hashlib.sha256(train + b"\0" + held_out).hexdigest()[:16]
    return Text(*(torch.frombuffer(bytearray(b), dtype=torch.uint8) for b in (train, held_out)), digest)


def windows(text: Tensor, starts: Tensor, *, context: int) -> tuple[Tensor, Tensor]:
    """Return `(inputs, targets)`, both (B, context) int64: the bytes from each of `starts` (B,), and each next byte."""
    places = starts.to(text.device)[:, None] + torch.arange(context + 1, device=text.device)
    found = text[places].long()
    return found[:, :-1], found[:, 1:]


def random_starts(text: Tensor, key: Tensor, *, rows: int, context: int) -> Tensor:
    """Return where `rows` windows start, drawn from `key` only."""
    return torch.randint(len(text) - context, (rows,), generator=fds.random.generator(key))


def even_starts(text: Tensor, *, rows: int, context: int) -> Tensor:
    """Return where `rows` windows start, evenly spaced and the same in every run."""
    return torch.linspace(0, len(text) - context - 1, rows, dtype=torch.float64).long()


def is_held_out(name: str) -> bool:
    """Return whether the file of this name is held out: one in twenty is."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0


def standard_library() -> Iterator[tuple[str, Path]]:
    """Yield the sources of the standard library, by relative name."""
    root = Path(sysconfig.get_path("stdlib"))
    for file in root.rglob("*.py"):
        name = file.relative_to(root)
        if not SKIPPED & set(name.parts):
            yield name.as_posix(), file


def named(paths: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield the given files, and the text files below given folders; hidden ones are skipped."""
    for path in map(Path, paths):
        if path.is_file():
            yield path.name, path
            continue
        found = sorted(files_below(path)) if path.is_dir() else []
        if not found:
            raise fds.FdsError(
                "there is no text here", where="--data", got=str(path), want="a file, or a folder with text files in it"
            )
        yield from ((file.relative_to(path).as_posix(), file) for file in found)


def files_below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder that hold text: no null byte at their start."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in (Path(root, name) for name in names if not name.startswith(".")):
            if file.is_file() and b"\0" not in file.read_bytes()[:4096]:
                yield file
