"""Draw the layouts of docs/long-rows.md, a head each: rows of 2,048 tokens, in blocks of 16."""

from __future__ import annotations

import sys
from pathlib import Path

from fds.attention_layouts import AttentionLayout, bigbird, bslongformer, draw_png, fixed, per_head

BLOCKS = 128


def layouts() -> AttentionLayout:
    """Return the four that the page compares."""
    window = bslongformer(1, BLOCKS, num_sliding_window_blocks=17)
    random = bigbird(1, BLOCKS, num_sliding_window_blocks=9, num_random_blocks=8)
    sides = fixed(1, BLOCKS, num_local_blocks=16)
    return per_head([window, random, sides, window.causal()])


def main(folder: Path) -> None:
    """Write the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_png(layouts(), folder / "layouts.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "assets")
