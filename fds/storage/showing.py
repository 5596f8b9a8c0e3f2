"""The contents of a run's directory, and of one save, as text and tables."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from fds.errors import StorageError, escaped
from fds.storage.disk.folders import find, tags
from fds.storage.format.manifest import SavedLeaf, read_manifest
from fds.storage.format.tensors import DTYPES
from fds.storage.opening import Difference, line
from fds.storage.source import Source

WIDEST = 10_000  # columns where the output is not a terminal, so that lines are not wrapped


def show(parts: Iterable[RenderableType]) -> None:
    """Print text and tables to standard output."""
    width = None if sys.stdout.isatty() else WIDEST
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str | Text))


def run(dir: Path) -> Iterator[RenderableType]:
    """Yield the saves in a run's directory, and which of them is the last."""
    rows = []
    for tag in tags(dir):
        try:
            manifest = read_manifest(find(dir, tag))
            size = sum(file.bytes for file in manifest.files.values())
            part = "" if manifest.part is None else f"part {manifest.part[0]} of {manifest.part[1]}"
            rows.append([tag, f"{manifest.calls:,}", manifest.saved, decimal(size), manifest.run or "", part])
        except StorageError as error:
            rows.append([tag, "", "", "", "", error.what])
    yield table(["tag", "calls >", "saved", "bytes >", "run", ""], rows)
    try:
        yield f"latest: {escaped(find(dir, None).name)}"
    except StorageError as error:
        yield f"latest: {escaped(line(error))}"


def save(source: Source) -> Iterator[RenderableType]:
    """Yield the contents of a save: its composition, its leaves, totals, and the user's extra."""
    yield escaped(source.where)
    if source.composition:
        yield "\ncomposition:\n" + "\n".join(f"  {escaped(transform)}" for transform in source.composition)
    rows = [[name, leaf.dtype, str(leaf.shape), files(leaf)] for name, leaf in source.leaves.items()]
    yield ""
    yield table(["leaf", "dtype", "shape", "files"], rows)
    totals: dict[str, list[SavedLeaf]] = {}
    for name, leaf in source.leaves.items():
        words = name.split(".")
        totals.setdefault(".".join(words[: 2 if words[0] in ("opt", "slots") else 1]), []).append(leaf)
    totals["total"] = list(source.leaves.values())
    yield ""
    yield table(
        ["", "leaves >", "elements >", "bytes >"],
        [
            [name, f"{len(of):,}", f"{sum(math.prod(x.shape) for x in of):,}", decimal(sum(map(num_bytes, of)))]
            for name, of in totals.items()
        ],
    )
    if source.extra:
        yield f"\nextra: {json.dumps(source.extra, indent=2)}"


def comparison(differences: list[Difference], num_leaves: int) -> Iterator[RenderableType]:
    """Yield in which leaves two states differ, and how."""
    if not differences:
        yield f"equal: {num_leaves:,} leaves"
        return
    rows = []
    for d in differences:
        numbers = [f"{d.num_different:,} of {d.numel:,}", f"{d.max_abs:.4g}", f"{d.max_relative:.4g}"]
        rows.append(
            [
                d.name,
                d.left or "missing",
                d.right if d.right != d.left else "same" if d.right else "missing",
                *(numbers if d.numel else ["", "", ""]),
            ]
        )
    yield table(["leaf", "left", "right", "differing >", "max abs >", "max relative >"], rows)
    yield f"{len(differences):,} of {num_leaves:,} leaves differ"


def table(columns: list[str], rows: list[list[str]]) -> Table:
    """Return a table; columns whose names end in ` >` are aligned right; long cells are folded."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        side = "right" if name.endswith(" >") else "left"
        made.add_column(name.removesuffix(" >"), justify=side, overflow="fold")
    for row in rows:
        made.add_row(*(Text(escaped(cell)) for cell in row))
    return made


def files(leaf: SavedLeaf) -> str:
    """Return the names of the files that hold a leaf; of many, the first and the last."""
    names = list(dict.fromkeys(chunk.file.removesuffix(".safetensors") for chunk in leaf.chunks))
    return " ".join(names) if len(names) < 4 else f"{names[0]} ... {names[-1]} ({len(names)})"


def num_bytes(leaf: SavedLeaf) -> int:
    """Return the bytes of a leaf's elements."""
    return math.prod(leaf.shape) * DTYPES[leaf.dtype].itemsize
