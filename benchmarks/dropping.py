"""What dropping tokens or layers takes off a step of the main job's model: `fds.random_ltd`, `fds.layer_drop`.

    python -m benchmarks.dropping                       # or: make bench-dropping
    python -m benchmarks.dropping --quick               # a tiny model, nothing written: does it all run?

The model is that of examples/train_gpt.py, but that the angles of rotary positions come with the tokens. All layers
but the first and the last keep half of the tokens: the step is to take 0.75 of its time at most.
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
PLAIN, AGAIN, HALF, LAYERS = "fds", "fds anew (A/A)", "fds, half the tokens in the middle", "fds, layer_drop"
HEADS = 4


class Block(gpt.Block):
    """The block, which is given the angles of its tokens."""

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, cos, sin = given
        self.angles = cos[:, None], sin[:, None]
        return super().forward(x), cos, sin

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, dim=1)
        y = gpt.attend(self.turned(q), self.turned(k), v)
        return self.merge(y.transpose(1, 2).flatten(2))

    def turned(self, x: Tensor) -> Tensor:
        (cos, sin), (left, right) = self.angles, x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def with_angles(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    cos, sin = gpt.angles(x.shape[1], x.shape[2] // HEADS, x.dtype, x.device)
    return x, cos[None], sin[None]


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256, help="of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="of the model (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="rows (%(default)s)")
    parser.add_argument("--context", type=int, default=256, help="tokens of a row (%(default)s)")
    parser.add_argument("--rounds", type=int, default=12, help="in each of which all take their turn (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="width 16, 3 layers, 4 rounds, nothing written")
    parser.add_argument("--out", default=report.RESULTS, help="where the table goes (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        options.width, options.layers, options.batch, options.context, options.rounds = 16, 3, 2, 16, 4
    series = in_turns(contenders(options), options.rounds, PLAIN)
    rows = [[name, PLAIN, *report.timed(series[name])] for name in (AGAIN, HALF, LAYERS)]
    tables = [(f"Time of a step ({options.rounds} rounds)", HEADER, rows)]
    console = Console()
    report.show_tables(tables, console)
    if not options.quick:
        console.print(f"written: {report.write_tables(tables, 'dropping', facts(options), folder=Path(options.out))}")
    return 0


def contenders(options: argparse.Namespace) -> dict[str, Call]:
    """Return who takes turns."""
    blocks = [fds.LayerSpec(Block, options.width, HEADS, options.layers, 0.0) for _ in range(options.layers)]
    loss = fds.Layers(
        [
            fds.TiedLayerSpec("embedding", gpt.Embedding, options.width),
            with_angles,
            *blocks,
            lambda given: given[0],
            fds.TiedLayerSpec("final_norm", nn.LayerNorm, options.width, bias=False),
            fds.TiedLayerSpec("embedding", gpt.Embedding, options.width, forward_fn=gpt.Embedding.logits),
        ],
        gpt.criterion,
    )
    rows = torch.randint(gpt.NUM_BYTES, (options.batch, options.context + 1))
    batch, numbers = (rows[:, :-1], rows[:, 1:]), range(2, 2 + options.layers)
    half = fds.random_ltd(numbers[1:-1], lambda t: options.context // 2)

    def by(*parts: fds.Transform) -> Call:
        step = fds.compose(*parts, fds.donate(), fds.adamw(1e-3))(loss)
        state = [step.init(loss.init)]

        def call() -> Tensor:
            state[0], metrics = step(state[0], batch)
            return metrics["loss"]

        return call

    return {PLAIN: by(), HALF: by(half), LAYERS: by(fds.layer_drop(0.5, 9.0, layers=numbers)), AGAIN: by()}


def facts(options: argparse.Namespace) -> dict[str, str]:
    """Return what ran, for the file."""
    return {
        "what ran": f"a training step, float32, one thread: {options.layers} blocks of width {options.width}, "
        f"{options.batch} x {options.context} bytes, AdamW, donated",
        "how": "all in turns, one call each, in an order that turns",
        "half the tokens": f"in {options.layers - 2} of {options.layers} blocks; to take 0.75 at most",
        "layer_drop": "theta 0.5, from the third call on: of 6 blocks 1.75 fewer in the mean",
    }


if __name__ == "__main__":
    sys.exit(main())
