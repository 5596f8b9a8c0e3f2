"""What the main job learns from as many tokens with a curriculum, random token dropping or layer drop as without.

    make bench-efficiency                        # a quarter of an hour
    make bench-efficiency ARGS="--seeds 1"
    make bench-efficiency ARGS="--quick"         # a tiny model, nothing written: does it all run?

The model and text of `examples/train_gpt.py`, float32, on one rank; positions go with the tokens, as dropping tokens
needs. Every run consumes as many tokens of text: with a curriculum that is more, shorter batches. No claim is made of
losses; time is not measured here.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]  # as a module and as a file, from anywhere

import torch
import train_gpt
from gpt import model as example
from gpt.text import read
from rich.console import Console
from torch import Tensor, nn

import fds
from benchmarks import report
from benchmarks.report import Rows
from fds import schedules

SIZES = {"width": 64, "layers": 6, "heads": 2, "context": 128, "batch": 16, "eval_rows": 256}
TINY = {"width": 16, "layers": 4, "heads": 1, "context": 16, "batch": 4, "eval_rows": 4}
POINTS = 8  # of a curve

Curve = list[tuple[int, float]]  # tokens and held-out bits per byte


class Placed(example.Embedding):
    """The embedding of the example, and the positions (1, T) of its tokens."""

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors (B, T, W), and positions."""
        return super().forward(tokens_BT), torch.arange(tokens_BT.shape[1])[None]


class Block(example.Block):
    """The block of the example, which is given the positions of its tokens; the last one passes none on."""

    def __init__(self, width: int, heads: int, layers: int, *, is_last: bool):
        super().__init__(width, heads, layers, 0.0)
        self.is_last = is_last

    def forward(self, given: tuple[Tensor, Tensor]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the output (B, T, W), and positions."""
        x, positions = given
        h = self.qkv(self.norm_attention(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        q, k, v = h.chunk(3, 1)
        frequencies = 10_000 ** (-torch.arange(0, q.shape[3], 2) / q.shape[3])
        turns = (positions[..., None] * frequencies)[:, None]
        rotated = (self.rotated(part, turns.cos(), turns.sin()) for part in (q, k))
        x = x + self.merge(example.attend(*rotated, v).transpose(1, 2).flatten(2))
        x = x + self.down(nn.functional.gelu(self.up(self.norm_mlp(x))))
        return x if self.is_last else (x, positions)

    @staticmethod
    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return queries or keys (B, H, T, D) turned by their positions."""
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def model(options: argparse.Namespace) -> fds.Layers:
    """Return the loss of `examples/gpt/model.py`, whose blocks are given positions."""
    width, heads, layers = options.width, options.heads, options.layers
    return fds.Layers(
        [
            fds.TiedLayerSpec("embedding", Placed, width),
            *(fds.LayerSpec(Block, width, heads, layers, is_last=i + 1 == layers) for i in range(layers)),
            fds.TiedLayerSpec("final_norm", nn.LayerNorm, width, bias=False),
            fds.TiedLayerSpec("embedding", Placed, width, forward_fn=Placed.logits),
        ],
        example.criterion,
    )


Schedule = Callable[[int], int]


def lengths(options: argparse.Namespace) -> Schedule:
    """Return lengths of sequences: from an eighth to whole ones in the first 0.3 of as many whole batches."""
    step = options.context // 8
    return schedules.fixed_linear(step, options.context, max(1, int(0.3 * options.steps)), difficulty_step=step)


def kept(options: argparse.Namespace) -> Schedule:
    """Return tokens that middle layers compute: from a half to all in the first 0.7 of the batches."""
    half, step = options.context // 2, options.context // 16
    return schedules.fixed_linear(half, options.context, max(1, int(0.7 * options.steps)), difficulty_step=step)


def whole(options: argparse.Namespace) -> Schedule:
    """Return the length of all sequences."""
    return lambda t: options.context


def curriculum(options: argparse.Namespace) -> list[Any]:
    """Return short sequences first."""
    return [fds.curriculum("seqlen", lengths(options))]


def dropping(options: argparse.Namespace) -> list[Any]:
    """Return fewer tokens in all blocks but the first and the last."""
    return [fds.random_ltd(range(2, options.layers), kept(options))]


def skipping(options: argparse.Namespace) -> list[Any]:
    """Return fewer blocks: a quarter of them is skipped in the end."""
    return [fds.layer_drop(0.5, 4 / options.steps, layers=range(1, options.layers))]


WAYS: dict[str, tuple[Callable[[argparse.Namespace], list[Any]], Callable[[argparse.Namespace], Schedule]]] = {
    "all tokens": (lambda options: [], whole),
    "curriculum": (curriculum, lengths),
    "random-LTD": (dropping, whole),
    "both": (lambda options: [*curriculum(options), *dropping(options)], lengths),
    "layer drop": (skipping, whole),
}


def learn(name: str, words: list[str], seed: int) -> Curve:
    """Train by as many tokens as `--steps` whole batches have; return held-out bits per byte on the way."""
    torch.set_num_threads(1)
    options = train_gpt.parse([*words, "--seed", str(seed)])
    text, axis = read(options.data, context=options.context), fds.mesh(dp=1)["dp"]
    transforms, length = WAYS[name][0](options), WAYS[name][1](options)
    rate = schedules.warmup_cosine(
        options.lr, warmup_steps=options.steps // 20, total_steps=options.steps, kind="linear", end_ratio=0.02
    )
    rate = rate if length(1) == options.context else schedules.by_tokens(rate, length, options.context)
    adam = fds.adamw(rate, (0.9, 0.95), weight_decay=options.weight_decay)
    step = fds.compose(*transforms, fds.clip_by_global_norm(1.0), adam, fds.donate())(model(options))
    state = step.init(train_gpt.initial_params(step, options), key=seed)
    budget, tokens, curve = options.steps * options.context, 0, []
    for call in itertools.count(1):
        state, _ = step(state, train_gpt.next_batch(text, state, options, axis))
        before, tokens = tokens, tokens + length(call)
        if tokens * POINTS // budget > before * POINTS // budget:
            curve.append((tokens * options.batch, train_gpt.held_out_bits(step, state, text, options, axis)))
        if tokens >= budget:
            return curve
    raise AssertionError


def learn_all(runs: list[tuple[str, int]], words: list[str], *, in_processes: bool) -> Iterator[Curve]:
    """Yield the curves of all runs, two at a time in processes of their own."""
    if not in_processes:
        yield from (learn(name, words, seed) for name, seed in runs)
        return
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for run in [pool.submit(learn, name, words, seed) for name, seed in runs]:
            yield run.result()


def main() -> int:
    """Run from the command line."""
    options = parse()
    sizes = {**(TINY if options.quick else SIZES), "steps": options.steps}
    words = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--data", str(ROOT / "fds")] if options.quick else []
    console = Console()
    runs: list[tuple[str, int]] = [(name, seed) for name in options.only for seed in range(options.seeds)]
    curves: dict[str, list[Curve]] = {name: [] for name in options.only}
    for (name, seed), curve in zip(runs, learn_all(runs, words, in_processes=not options.quick), strict=True):
        curves[name].append(curve)
        console.print(f"[dim]{name}, seed {seed}: {curve[-1][1]:.4f}[/]", highlight=False)
    tables = [table_of_losses(curves), table_of_curves(curves)]
    report.show_tables(tables, console)
    if options.out:
        facts = {
            "what": "the main job (examples/train_gpt.py: Python's standard library, bytes), float32, one rank",
            "sizes": ", ".join(f"{name} {value}" for name, value in sizes.items()),
            "tokens": f"as many of text for all: {options.steps} batches of whole rows",
            "curriculum": "sequences of an eighth to whole ones in the first 0.3; the learning rate follows tokens",
            "random-LTD": "all blocks but the first and last compute a half of the tokens to all in the first 0.7",
            "layer drop": "theta 0.5, gamma 4 / steps, all blocks but the last",
            "loss": "held out, in bits per byte, of the same windows for all; a seed is of parameters and batches",
        }
        console.print(f"written: {report.write_tables(tables, options.name, facts, folder=Path(options.out))}")
    return 0


def table_of_losses(curves: dict[str, list[Curve]]) -> Rows:
    """Return the losses at the end, of every seed, and by how much they are above those of all tokens."""
    ends = {name: [curve[-1][1] for curve in of] for name, of in curves.items()}
    rows = []
    for name, of in ends.items():
        beside = ends.get("all tokens", of)
        above = [mine / theirs - 1 for mine, theirs in zip(of, beside, strict=True)]
        cells = [", ".join(f"{x:+.2%}" for x in above), f"{statistics.mean(above):+.2%}"]
        rows.append([name, ", ".join(f"{x:.4f}" for x in of), f"{statistics.mean(of):.4f}", *cells])
    return "Held-out loss at the end", ["contender", "bits per byte, by seed", "mean", "above all tokens", "mean"], rows


def table_of_curves(curves: dict[str, list[Curve]]) -> Rows:
    """Return the losses on the way, means over seeds, by tokens of text."""
    marks = [f"{(i + 1) / POINTS:.3g}" for i in range(POINTS)]
    mean: Callable[[list[Curve], int], float] = lambda of, i: statistics.mean(curve[i][1] for curve in of)
    rows = [[name, *(f"{mean(of, i):.4f}" for i in range(POINTS))] for name, of in curves.items()]
    return "Held-out loss after a share of the tokens, mean over seeds", ["contender", *marks], rows


def parse() -> argparse.Namespace:
    """Return the options, `only` as a list of names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help="ways, with ; between")
    parser.add_argument("--steps", type=int, default=1000, help="whole batches whose tokens are consumed (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each way (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps, nothing written")
    parser.add_argument("--out", default=str(report.RESULTS), help="where the table goes (benchmarks/results)")
    parser.add_argument("--name", default="efficiency", help="in the name of the table (%(default)s)")
    options = parser.parse_args()
    options.only = list(WAYS) if options.only is None else [name.strip() for name in options.only.split(";")]
    if options.quick:
        options.steps, options.seeds, options.out = 16, 1, None
    if unknown := [name for name in options.only if name not in WAYS]:
        parser.error(f"no such way: {', '.join(unknown)}; there are {'; '.join(WAYS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
