"""A picture of a layout in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fds.attention_layouts.layout import AttentionLayout, check_layout, heads_of, shares
from fds.errors import AttentionLayoutError

_PIXELS = 512  # cells of a picture in a file, at most


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
