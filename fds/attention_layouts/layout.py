"""`AttentionLayout`: which blocks of keys each block of queries sees, per head, in memory of what is listed.

Queries and keys are cut into `blocks` blocks of `block` tokens. A `Pattern` lists, row after row, the columns that each
row sees (compressed sparse rows). Heads of the same pattern share it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fds.attention_layouts.arguments import as_array
from fds.attention_layouts.pattern import Pattern, of_array
from fds.errors import AttentionLayoutError, is_a, is_int

WIDEST = 64  # cells of a picture in text, if no width is asked for
_SHADES = ".123456789#"  # of none, tenths, and all blocks of a cell
_PIXELS = 512  # cells of a picture in a file, at most

_KEYS = itertools.count(1)
_LIVING: weakref.WeakValueDictionary[int, AttentionLayout] = weakref.WeakValueDictionary()


@attrs.frozen(slots=False, repr=False)
class AttentionLayout:
    """Which blocks of keys each block of queries sees, of each head.

    Layouts of the same sizes combine: `a | b` lists what either does, `a & b` what both do. `str` draws a layout, and
    equal layouts are equal and have the same hash.

    Attributes:
        patterns: the patterns of blocks, each once.
        heads: of each head, the index of its pattern.
        block: tokens of a block.
        blocks: number of blocks of queries, and of keys.
        key: a number of this object, by which operators in a compiled graph find it (`by_key`).

    Raises `AttentionLayoutError` for no patterns, patterns of other blocks than the first, and heads without one.

    >>> from fds.attention_layouts import fixed
    >>> layout = fixed(2, 6, block=32, num_local_blocks=3, attention="unidirectional")
    >>> layout
    AttentionLayout(2 heads, 6 x 6 blocks of 32 tokens, 42% listed)
    >>> print(layout)
    heads 0-1: 15 of 36 blocks
     0 #.....
     1 ##....
     2 ###...
     3 ..##..
     4 ..###.
     5 ..####
    """

    patterns: tuple[Pattern, ...]
    heads: tuple[int, ...]
    block: int = 16
    blocks: int = attrs.field(init=False, eq=False)
    key: int = attrs.field(init=False, eq=False, factory=lambda: next(_KEYS))

    def __attrs_post_init__(self) -> None:
        check_block("AttentionLayout", self.block)
        _check_patterns(self.patterns, self.heads)
        object.__setattr__(self, "blocks", self.patterns[0].blocks)
        _LIVING[self.key] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return AttentionLayout, (self.patterns, self.heads, self.block)  # a copy has a key of its own

    @classmethod
    def of(cls, patterns: Sequence[Pattern], block: int) -> AttentionLayout:
        """Return the layout in which head h has the h-th of some patterns; equal ones are stored once."""
        indices: dict[Pattern, int] = {}
        heads = tuple(indices.setdefault(pattern, len(indices)) for pattern in patterns)
        return cls(tuple(indices), heads, block)

    @classmethod
    def from_dense(cls, array: ArrayLike, *, block: int = 16) -> AttentionLayout:
        """Return the layout of an array or tensor (heads, blocks, blocks), such as DeepSpeed's: zero is not listed.

        Raises `AttentionLayoutError` for what is no array of numbers, another shape, and a block that is not a positive
        integer.
        """
        array = as_array("from_dense", array, "(heads, blocks, blocks)")
        if array.ndim != 3 or array.shape[1] != array.shape[2] or 0 in array.shape:
            raise AttentionLayoutError(
                "an array is not a layout", where="from_dense", got=str(array.shape), want="(heads, blocks, blocks)"
            )
        check_block("from_dense", block)
        return cls.of([of_array(head) for head in array], block)

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return len(self.heads)

    @property
    def tokens(self) -> int:
        """Number of tokens of the blocks."""
        return self.blocks * self.block

    @property
    def nonzeros(self) -> int:
        """Number of listed blocks, over all heads."""
        return sum(self.patterns[i].nonzeros for i in self.heads)

    @property
    def density(self) -> float:
        """The share of blocks that is listed, over all heads."""
        return self.nonzeros / (self.num_heads * self.blocks**2)

    @property
    def nbytes(self) -> int:
        """Bytes of the indices."""
        return sum(pattern.starts.nbytes + pattern.columns.nbytes for pattern in self.patterns)

    def of_head(self, head: int) -> Pattern:
        """Return the pattern of a head."""
        return self.patterns[self.heads[head]]

    def __or__(self, other: AttentionLayout) -> AttentionLayout:
        return self._combined(other, "|", 1)

    def __and__(self, other: AttentionLayout) -> AttentionLayout:
        return self._combined(other, "&", 2)

    def _combined(self, other: AttentionLayout, sign: str, least: int) -> AttentionLayout:
        if not is_a(other, AttentionLayout):
            return NotImplemented
        _check_alike([self, other], f"layout {sign} layout")
        pairs = dict.fromkeys(zip(self.heads, other.heads, strict=True))
        merged = {(i, j): self.patterns[i].merged(other.patterns[j], least) for i, j in pairs}
        return self.of([merged[pair] for pair in zip(self.heads, other.heads, strict=True)], self.block)

    def _each(self, function: Callable[[Pattern], Pattern]) -> AttentionLayout:
        patterns = [function(pattern) for pattern in self.patterns]
        return self.of([patterns[i] for i in self.heads], self.block)

    def causal(self) -> AttentionLayout:
        """Return the layout without blocks of keys that follow the queries' own.

        On the diagonal blocks stay whole: within them `sparse_attention(causal=True)` hides what follows.
        """
        return self._each(lambda pattern: pattern.filtered(lambda rows, columns: columns <= rows, self.blocks))

    def cropped(self, blocks: int) -> AttentionLayout:
        """Return the layout of the first blocks alone.

        DeepSpeed's module makes a layout once, for 2048 tokens, and crops it to each length: `fixed(heads, 2048 //
        block).cropped(n)` is that one, and `fixed(heads, n)` is made for n blocks; the two may differ at the end.

        Raises `AttentionLayoutError` for a number of blocks that the layout does not have.
        """
        if not is_int(blocks, 1) or blocks > self.blocks:
            raise AttentionLayoutError(
                "a layout is cropped to fewer blocks",
                where="cropped",
                got=repr(blocks),
                want=f"1 to {self.blocks}",
                hint="make the layout for the longest sequence, then crop it",
            )
        inside = lambda rows, columns: (rows < blocks) & (columns < blocks)
        return self._each(lambda pattern: pattern.filtered(inside, blocks))

    def as_array(self) -> NDArray[np.bool_]:
        """Return (heads, blocks, blocks) bool, True where a block is listed: DeepSpeed's form, which is quadratic."""
        arrays = [pattern.as_array() for pattern in self.patterns]
        return np.stack([arrays[i] for i in self.heads])

    def __repr__(self) -> str:
        heads = f"{self.num_heads} head{'s' * (self.num_heads != 1)}"
        size = f"{self.blocks} x {self.blocks} blocks of {self.block} tokens"
        share = 100 * self.density
        return f"AttentionLayout({heads}, {size}, {share:.{0 if share >= 10 else 1}f}% listed)"

    def __str__(self) -> str:
        return draw_text(self)


def by_key(key: int) -> AttentionLayout:
    """Return the layout of a key. Raises `AttentionLayoutError` where it is gone."""
    layout = _LIVING.get(key)
    if layout is None:
        raise AttentionLayoutError(
            "the layout of a compiled graph is gone",
            where="by_key",
            got=f"key {key}",
            hint="keep it as long as that runs",
        )
    return layout


def per_head(layouts: Sequence[AttentionLayout]) -> AttentionLayout:
    """Return the layout whose heads are those of some layouts, one after another.

    Raises `AttentionLayoutError` for no layout, and for layouts of other blocks than the first.

    >>> from fds.attention_layouts import dense, local_sliding_window
    >>> per_head([local_sliding_window(3, 4), dense(1, 4)])
    AttentionLayout(4 heads, 4 x 4 blocks of 16 tokens, 58% listed)
    """
    _check_alike(layouts, "per_head", same_heads=False)
    patterns = [layout.of_head(h) for layout in layouts for h in range(layout.num_heads)]
    return AttentionLayout.of(patterns, layouts[0].block)


def check_block(function: str, block: Any) -> None:
    """Raise `AttentionLayoutError` unless a block is a positive number of tokens."""
    if not is_int(block, 1):
        raise AttentionLayoutError(f"{function}: block is a number of tokens", got=repr(block), want="an int >= 1")


def _check_patterns(patterns: Any, heads: Any) -> None:
    is_list = is_a(patterns, tuple) and patterns and all(isinstance(pattern, Pattern) for pattern in patterns)
    if not is_list or len({pattern.blocks for pattern in patterns}) > 1:
        raise AttentionLayoutError(
            "a layout has patterns of as many blocks", where="patterns", got=repr(patterns)[:80], want="a tuple of them"
        )
    if not is_a(heads, tuple) or not heads or not all(is_int(i, 0) and i < len(patterns) for i in heads):
        raise AttentionLayoutError(
            "each head has a pattern", where="heads", got=repr(heads)[:80], want=f"indices below {len(patterns)}"
        )


def _check_alike(layouts: Any, where: str, same_heads: bool = True) -> None:
    want = "layouts of as many blocks, of as many tokens" + ", and of as many heads" * same_heads
    if not is_a(layouts, Sequence) or not layouts or not all(isinstance(layout, AttentionLayout) for layout in layouts):
        raise AttentionLayoutError("layouts are combined", where=where, got=repr(layouts)[:80], want=want)
    size = lambda layout: (layout.blocks, layout.block, layout.num_heads * same_heads)
    for i, layout in enumerate(layouts[1:], 1):
        if size(layout) != size(layouts[0]):
            raise AttentionLayoutError(
                "layouts of other sizes do not combine",
                where=f"{where}, layout {i}",
                got=f"{layouts[0]!r}\n{layout!r}",
                want=want,
                hint="cropped(blocks) shortens the longer; per_head([layout] * n) repeats one of a single head",
            )


def draw_text(layout: AttentionLayout, *, width: int = WIDEST) -> str:
    """Return a grid for each pattern, a line for a row of blocks: `#` is listed, `.` is not.

    Where there are more blocks than `width`, a cell is a square of several, and a digit says how many tenths of them
    are listed, rounded up, 9 for all but a few. A line begins with the number of its first row.

    Raises `AttentionLayoutError` for what is no layout, and a width that is no positive integer.

    >>> from fds.attention_layouts import bslongformer
    >>> print(draw_text(bslongformer(1, 12), width=6))
    head 0: 54 of 144 blocks, 2 x 2 in a cell
      0 #85555
      2 8#3...
      4 53#3..
      6 5.3#3.
      8 5..3#3
     10 5...3#
    """
    check_layout(layout, "draw_text")
    if not is_int(width, 1):
        raise AttentionLayoutError("draw_text: width is a number of cells", got=repr(width)[:80], want="an int >= 1")
    lines: list[str] = []
    for index, pattern in enumerate(layout.patterns):
        parts, size = shares(pattern, width)
        cells = f", {size} x {size} in a cell" if size > 1 else ""
        lines.append(f"{heads_of(layout, index)}: {pattern.nonzeros} of {pattern.blocks**2} blocks{cells}")
        levels = np.clip(np.ceil(parts * 10), 0, 9).astype(int)
        levels[parts >= 1] = 10
        margin = len(str(pattern.blocks - 1)) + 1
        lines += [f"{r * size:>{margin}} {''.join(_SHADES[x] for x in row)}" for r, row in enumerate(levels.tolist())]
    return "\n".join(lines)


def shares(pattern: Pattern, cells: int) -> tuple[NDArray[Any], int]:
    """Return which share of each cell is listed, in at most so many cells a side, and the blocks of a cell's side."""
    size = -(-pattern.blocks // cells)
    cells = -(-pattern.blocks // size)
    sums = np.zeros(cells * cells, np.int64)
    for _, _, rows, columns in pattern.pairs():
        sums += np.bincount(rows.astype(np.int64) // size * cells + columns // size, minlength=cells * cells)
    sides = np.minimum(size, pattern.blocks - np.arange(cells) * size)
    return sums.reshape(cells, cells) / np.outer(sides, sides), size


def heads_of(layout: AttentionLayout, index: int) -> str:
    """Return the heads of a pattern as text: `head 0`, `heads 0-3, 6`."""
    heads = [h for h, i in enumerate(layout.heads) if i == index]
    runs: list[list[int]] = []
    for h in heads:
        if runs and runs[-1][-1] == h - 1:
            runs[-1].append(h)
        else:
            runs.append([h])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"head{'s' * (len(heads) > 1)} {text}"


def check_layout(layout: Any, where: str) -> None:
    """Raise `AttentionLayoutError` for what is no layout."""
    if not is_a(layout, AttentionLayout):
        raise AttentionLayoutError("not a layout", where=where, got=repr(layout)[:80], want="an AttentionLayout")


def draw_png(layout: AttentionLayout, path: str | Path, *, title: str | None = None) -> None:
    """Draw each pattern as a square of blocks, darker where more of them are listed.

    Needs matplotlib, the extra `plot`; pyplot's state is not changed. Raises `AttentionLayoutError` if matplotlib is
    missing, for what is no layout, and if the file cannot be written.
    """
    check_layout(layout, "draw_png")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        hint = "pip install matplotlib"
        raise AttentionLayoutError("a PNG needs matplotlib", where="draw_png", hint=hint) from error
    columns = min(len(layout.patterns), 4)
    rows = -(-len(layout.patterns) // columns)
    figure = Figure(figsize=(0.6 + 3.2 * columns, 0.8 + 3.4 * rows), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for index, pattern in enumerate(layout.patterns):
        axes: Any = figure.add_subplot(rows, columns, index + 1)
        image, _ = shares(pattern, _PIXELS)
        end = pattern.blocks
        axes.imshow(image**0.5, cmap="Blues", vmin=0, vmax=1, extent=(0, end, end, 0), interpolation="nearest")
        axes.set(xlabel="block of keys", ylabel="block of queries")
        axes.set_title(f"{heads_of(layout, index)}: {pattern.nonzeros / end**2:.1%}")
    if title is not None:
        figure.suptitle(title)
    try:
        canvas.print_png(str(path))
    except OSError as error:
        raise AttentionLayoutError("the picture cannot be written", where=str(path), got=str(error)) from error
