"""Record the layouts of sparse attention that DeepSpeed makes, of random parameters.

    DS_ACCELERATOR=cpu .venv-peers/bin/python tests/golden/attention_layouts.py

attention_layouts.json: `hashes[i]`, the beginning of the SHA-256 of a layout (heads, blocks, blocks), uint8, for
`parameters(i)`, or the name of the exception that was raised in its place; `cropped[i]` likewise of the layout that
DeepSpeed's module crops from that of twice as many blocks and three; `whole`, of some of them, the rows as text.
Python's generator is seeded with i before each layout.
"""

import hashlib
import json
import random
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
CASES = 3000
WHOLE = range(0, CASES, 250)
MODES = ("dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window")


def parameters(case):
    """Return mode, heads, blocks and the other parameters of a case, some of them out of range."""
    draw = random.Random(case)
    mode, heads, blocks = draw.choice(MODES), draw.randint(1, 6), draw.choice([1, 2, 3, 5, 8, 13, 16, 21, 30])
    attention = draw.choice(["bidirectional", "unidirectional"] * 8 + ["sideways"])
    per_head = draw.random() < 0.5
    if mode == "dense":
        return mode, heads, blocks, {}
    if mode == "fixed":
        g = draw.choice([1, 1, 2, 3, 4])
        local = g * draw.randint(1, 4) + (draw.random() < 0.05)
        most = max(local // g, 1)
        return (
            mode,
            heads,
            blocks,
            {
                "num_local_blocks": local,
                "num_global_blocks": g,
                "attention": attention,
                "horizontal_global_attention": draw.random() < (0.5 if attention == "bidirectional" else 0.05),
                "num_different_global_patterns": draw.randint(1, most) if per_head else draw.choice([1] * 19 + [2]),
                "different_layout_per_head": per_head,
            },
        )
    if mode in ("variable", "bslongformer"):
        indices = sorted({draw.randrange(blocks) for _ in range(draw.randint(0, 3))})
        ends = [index + draw.randint(1, 3) for index in indices] if draw.random() < 0.5 else None
        if draw.random() < 0.05:
            indices = [*indices, blocks + draw.randint(0, 4)]
        common = {"global_block_indices": indices, "global_block_end_indices": ends, "attention": attention}
        if mode == "bslongformer":
            return mode, heads, blocks, {"num_sliding_window_blocks": draw.randint(1, 7), **common}
        return (
            mode,
            heads,
            blocks,
            {
                "num_random_blocks": draw.choice([0, 0, 1, 2, 3]),
                "local_window_blocks": [draw.randint(1, 6) for _ in range(draw.randint(1, 3))],
                "horizontal_global_attention": draw.random() < (0.5 if attention == "bidirectional" else 0.05),
                "different_layout_per_head": per_head,
                **common,
            },
        )
    if mode == "bigbird":
        return (
            mode,
            heads,
            blocks,
            {
                "num_random_blocks": draw.choice([0, 1, 1, 2, 3]),
                "num_sliding_window_blocks": draw.randint(1, 7),
                "num_global_blocks": draw.randint(0, 3),
                "attention": attention,
                "different_layout_per_head": per_head,
            },
        )
    return mode, heads, blocks, {"num_sliding_window_blocks": draw.randint(1, 7), "attention": attention}


def longer(blocks):
    """Return the length from which layouts are cropped."""
    return 2 * blocks + 3


def digest(array):
    """Return the beginning of a hash of a layout (heads, blocks, blocks)."""
    import numpy as np

    return hashlib.sha256(np.ascontiguousarray(array, dtype=np.uint8).tobytes()).hexdigest()[:8]


def rows(array):
    """Return a layout as text, heads apart by a blank line."""
    return "\n\n".join("\n".join("".join(".#"[int(x)] for x in row) for row in head) for head in array)


def generate():
    """Ask DeepSpeed."""
    from deepspeed.ops.sparse_attention import sparsity_config as theirs

    assert version("deepspeed") == "0.19.6"
    names = {"bslongformer": "BSLongformer", "bigbird": "BigBird"}
    hashes, cropped, whole = [], [], {}
    for case in range(CASES):
        mode, heads, blocks, options = parameters(case)
        name = names.get(mode) or "".join(word.capitalize() for word in mode.split("_"))
        make = getattr(theirs, f"{name}SparsityConfig")
        for into, length in ((hashes, blocks), (cropped, longer(blocks))):
            random.seed(case)
            try:
                layout = make(heads, **options).make_layout(16 * length)[:, :blocks, :blocks].numpy()
            except (ValueError, NotImplementedError, ZeroDivisionError) as error:
                into.append(type(error).__name__)
                continue
            into.append(digest(layout))
            if into is hashes and case in WHOLE:
                whole[case] = rows(layout)
    text = json.dumps({"hashes": " ".join(hashes), "cropped": " ".join(cropped), "whole": whole}, indent=0)
    (HERE / "attention_layouts.json").write_text(text + "\n")


if __name__ == "__main__":
    generate()
