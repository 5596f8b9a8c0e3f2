"""What training an adapter takes of a full step: `fds.lora` in its two forms, and on weights of 4 bits.

    python -m benchmarks.adapters                       # or: make bench-adapters
    python -m benchmarks.adapters --quick               # a tiny model, nothing written: does it all run?

The model has the main job's blocks, of a width at which factors are as small as beside models that have adapters: of
rank 16 they add a thirtieth to a matrix of 1024, but an eighth to one of 256. All matrices of all blocks have factors.
A step with factors in layers is to take 0.75 of a full one's time at most.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # as a module and as a file, from anywhere
sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import torch
from gpt import model as gpt  # pyright: ignore[reportMissingImports]
from rich.console import Console
from torch import Tensor, nn

import fds
from benchmarks import report
from benchmarks.harness import Call, in_turns

HEADER = ["contender", "beside", "ms", "ms beside", "ratio", "95% interval"]
FULL, AGAIN, LAYER, VIEW, FOUR = "full", "full anew (A/A)", "lora, layer", "lora, view", "lora, layer, 4 bits"
DORA = "lora, layer, dora"
MATRICES = "*.(qkv|merge|up|down).weight"


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024, help="of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="rows (%(default)s)")
    parser.add_argument("--context", type=int, default=256, help="tokens of a row (%(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="of the factors (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="in each of which all take their turn (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="width 16, 2 layers, 4 rounds, nothing written")
    parser.add_argument("--out", default=report.RESULTS, help="where the table goes (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        options.width, options.layers, options.batch, options.context, options.rounds = 16, 2, 2, 16, 4
        options.rank = 2
    calls, held = contenders(options)
    series = in_turns(calls, options.rounds, FULL)
    rows = [[name, FULL, *report.timed(series[name])] for name in (AGAIN, LAYER, DORA, FOUR, VIEW)]
    state = [[name, f"{held[name]['params']:,}", f"{held[name]['opt']:,}"] for name in (FULL, LAYER, DORA, FOUR)]
    tables = [
        (f"Time of a step ({options.rounds} rounds)", HEADER, rows),
        ("Bytes of a state", ["contender", "parameters", "moments"], state),
    ]
    console = Console()
    report.show_tables(tables, console)
    if not options.quick:
        console.print(f"written: {report.write_tables(tables, 'adapters', facts(options), folder=Path(options.out))}")
    return 0


def contenders(options: argparse.Namespace) -> tuple[dict[str, Call], dict[str, dict[str, int]]]:
    """Return who takes turns, and the bytes of their states."""
    blocks = [fds.LayerSpec(gpt.Block, options.width, 4, options.layers, 0.0) for _ in range(options.layers)]
    loss = fds.Layers(
        [
            fds.TiedLayerSpec("embedding", gpt.Embedding, options.width),
            *blocks,
            fds.TiedLayerSpec("final_norm", nn.LayerNorm, options.width, bias=False),
            fds.TiedLayerSpec("embedding", gpt.Embedding, options.width, forward_fn=gpt.Embedding.logits),
        ],
        gpt.criterion,
    )
    rows = torch.randint(gpt.NUM_BYTES, (options.batch, options.context + 1))
    batch, held = (rows[:, :-1], rows[:, 1:]), dict[str, dict[str, int]]()

    def by(name: str, *parts: fds.Transform) -> Call:
        step = fds.compose(*parts, fds.donate(), fds.adamw(1e-3))(loss)
        state = [step.init(loss.init)]
        held[name] = dict(step.describe(state[0]).num_bytes)

        def call() -> Tensor:
            state[0], metrics = step(state[0], batch)
            return metrics["loss"]

        return call

    layer = fds.lora(MATRICES, rank=options.rank)
    parts = {
        FULL: [],
        LAYER: [layer],
        DORA: [fds.lora(MATRICES, rank=options.rank, dora=True)],
        VIEW: [fds.lora(MATRICES, rank=options.rank, form="view")],
        FOUR: [fds.quantize_frozen(bits=4), layer],
        AGAIN: [],
    }
    return {name: by(name, *more) for name, more in parts.items()}, held


def facts(options: argparse.Namespace) -> dict[str, str]:
    """Return what ran, for the file."""
    return {
        "what ran": f"a training step, float32, one thread: {options.layers} blocks of width {options.width}, "
        f"{options.batch} x {options.context} bytes, AdamW, donated",
        "how": "all in turns, one call each, in an order that turns",
        "factors": f"of rank {options.rank} beside all matrices of the blocks; in layers to take 0.75 at most",
    }


if __name__ == "__main__":
    sys.exit(main())
