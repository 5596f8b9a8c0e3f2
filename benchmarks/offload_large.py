"""A GPT whose state is larger than the memory of the machine: moments, masters and gradients on disk, one process.

    make bench-offload-large                                         # 3 billion parameters: 50 GB of disk
    make bench-offload-large ARGS="--layers 8 --width 1024 --check"  # 100M, beside the same in memory and on two ranks

Tells the losses, seconds a step, the bytes that went from and to disk and what fraction of its raw speed that is, and
the most memory that was resident. With `--check` the same steps in memory must give the same bits, and two ranks at
stage 3, each with half of the rows, the same losses to rounding.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]  # as a module and as a file, from anywhere

import torch
from rich.console import Console
from torch import Tensor, nn

import fds
from benchmarks import ranks, report
from benchmarks.raw_disk import RawFile, disk_bytes
from benchmarks.sharding_contenders import VOCABULARY, Block, loss_of
from fds import tree

GB, GIB = 1e9, 2**30
MOST_RESIDENT = 8 * GIB


class Embed(nn.Module):
    """Tokens and positions."""

    def __init__(self, context: int, width: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)

    def forward(self, x_BT: Tensor) -> Tensor:
        return self.tokens(x_BT) + self.positions.weight


class Head(nn.Module):
    """The last norm, and a score for every token."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x_BTW: Tensor) -> Tensor:
        return self.scores(self.norm(x_BTW))


def gpt(options: argparse.Namespace) -> fds.Layers:
    """Return the model as specifications of its layers, of which nothing is built."""
    return fds.Layers(
        [
            fds.LayerSpec(Embed, options.tokens, options.width),
            *[fds.LayerSpec(Block, options.width) for _ in range(options.layers)],
            fds.LayerSpec(Head, options.width),
        ],
        loss_of,
    )


def batch_of(options: argparse.Namespace, i: int) -> tuple[Tensor, Tensor]:
    """Return the batch of a call: two rows; a target is a function of its input."""
    inputs = torch.randint(VOCABULARY, (2, options.tokens), generator=torch.Generator().manual_seed(i))
    return inputs, (5 * inputs + 3) % VOCABULARY


def step_of(options: argparse.Namespace, *more: Any) -> tuple[Any, fds.Layers]:
    """Return the step at stage 3, and its model."""
    layers = gpt(options)
    largest = 4 * 4 * options.width**2
    shard = fds.shard_optimizer(
        fds.mesh(dp=-1)["dp"], stage=3, bucket_bytes=largest, max_live_bytes=4 * largest, prefetch=1
    )
    parts = [fds.checkpoint_activations(), shard, fds.clip_by_global_norm(1.0), fds.adamw(1e-4), fds.donate()]
    return fds.compose(*more, *parts)(layers), layers


def train(
    options: argparse.Namespace, more: list[Any], tell: Callable[..., None] = lambda *_: None
) -> tuple[list[float], Any]:
    """Train; return the losses and the state."""
    step, layers = step_of(options, *more)
    start, before = time.perf_counter(), disk_bytes()
    state = step.init(layers.init, key=0)
    tell(f"the first state took {time.perf_counter() - start:.0f} s", before)
    losses = []
    for i in range(options.steps):
        start, before = time.perf_counter(), disk_bytes()
        state, metrics = step(state, batch_of(options, i))
        losses.append(float(metrics["loss"]))
        tell(f"step {i}: loss {losses[-1]:.6f}, {time.perf_counter() - start:.0f} s", before)
    return losses, state


def on_two_ranks(options: argparse.Namespace) -> list[float]:
    """Return the losses of two ranks at stage 3 in memory, each with one of the two rows."""

    def body() -> list[float]:
        step, layers = step_of(options)
        state = step.init(layers.init, key=0)
        rank, losses = fds.mesh(dp=-1)["dp"].index, []
        for i in range(options.steps):
            state, metrics = step(state, tuple(x[rank : rank + 1] for x in batch_of(options, i)))
            losses.append(float(metrics["loss"]))
        return losses

    return fds.simulate(body, 2)[0]


def main() -> int:
    """Run from the command line; the exit code says whether all that was asked for holds."""
    options = parse()
    console = Console()
    with torch.device("meta"):
        size = sum(p.numel() for p in Block(options.width).parameters()) * options.layers
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix=".offload-", dir=options.dir) as folder:
        raw = RawFile(Path(folder), 2 * 2**30)
        fastest = lambda **count: raw.size / min(map(min, raw.fastest(rounds=1, **count).values())) / GB
        speeds = {"read": fastest(read=raw.size), "write": fastest(write=raw.size)}
        raw.close()
        console.print(f"{size / 1e9:.2f} billion parameters; the disk reads {speeds['read']:.2f} GB/s raw, "
                      f"and writes {speeds['write']:.2f}")  # fmt: skip
        clock = [time.perf_counter()]

        def tell(text: str, before: tuple[int, int]) -> None:
            now, (read, written) = time.perf_counter(), (b - a for a, b in zip(before, disk_bytes(), strict=True))
            took, clock[0] = now - clock[0], now
            least = read / speeds["read"] / GB + written / speeds["write"] / GB
            cells = [text, f"{read / GB:.1f}", f"{written / GB:.1f}", f"{least / took:.2f}"]
            cells.append(f"{ranks.high_water(reset=True) / GIB:.2f}")
            rows.append(cells)
            console.print(", ".join(cells))

        disk = fds.disk(folder)
        losses, state = train(options, [fds.offload(moments=disk, masters=disk, gradients=disk)], tell)
        held = max(float(row[-1]) for row in rows) * GIB
        met = held < MOST_RESIDENT
        if options.check:
            plain, at_home = train(options, [])
            same = all(torch.equal(a, b) for a, b in zip(tree.leaves(state), tree.leaves(at_home), strict=True))
            both = on_two_ranks(options)
            apart = max(abs(a - b) / b for a, b in zip(losses, both, strict=True))
            console.print(f"in memory: bit-equal {same and plain == losses}; two ranks: losses {apart:.1g} apart")
            met &= same and plain == losses and apart < 1e-4
        del state
        gc.collect()
    head = ["what", "GB read", "GB written", "of the raw speed", "GiB resident at most"]
    tables: list[report.Rows] = [(f"{size / 1e9:.2f} billion parameters, {options.tokens} tokens a row", head, rows)]
    report.show_tables(tables, console)
    if options.out:
        report.write_tables(tables, "offload-large", {"raw disk": str(speeds)}, folder=Path(options.out))
    return 0 if met else 1


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=32, help="of each of the two rows (%(default)s)")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dir", default=".", help="a folder on the disk to use (%(default)s)")
    parser.add_argument("--check", action="store_true", help="train in memory and on two simulated ranks too")
    parser.add_argument("--out", help="where the table goes")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
