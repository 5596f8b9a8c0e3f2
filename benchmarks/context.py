"""Sequences of 8,192 tokens on two gloo ranks of one thread: Ulysses and the ring beside one rank that has all tokens.

    make bench-context                                    # two minutes, quiet
    make bench-context ARGS="--parts memory"              # of time, memory; nothing written
    make bench-context ARGS="--only 'ulysses;ring' --rounds 8"

Claims: activations of a step at their peak at most 0.55 of one rank's, and attention sends the bytes of the formula.
torch's own `context_parallel` (torch.distributed.tensor.experimental) has no contender here: it knows the attention of
GPUs alone (`_scaled_dot_product_flash_attention_for_cpu` has no sharding strategy in torch 2.13).
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]  # as a module and as a file, from anywhere

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import fds
from benchmarks import memory, ranks, report
from benchmarks.harness import Call, Series
from benchmarks.report import Rows
from fds.collectives import Axis, counted

ONE = "one rank"
METHODS: dict[str, dict[str, Any]] = {
    "ulysses": {"method": "ulysses"},
    "ring": {"method": "ring"},
    "ring, zigzag": {"method": "ring", "layout": "zigzag"},
}
HEAD_SIZE, VOCABULARY, LR, MEMORY_AT_MOST = 64, 256, 1e-3, 0.55
FLOAT_BYTES = 4


@attrs.frozen
class Case:
    """A GPT and the length of the one row that a step sees."""

    width: int = 256
    layers: int = 2
    tokens: int = 8192


class Block(nn.Module):
    """Causal attention over the ranks of an axis and a perceptron, each added to what comes in."""

    def __init__(self, width: int, axis: Axis | None, how: dict[str, Any]):
        super().__init__()
        self.axis, self.how = axis, how
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTW: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x_BTW)).unflatten(-1, (3, -1, HEAD_SIZE)).permute(2, 0, 3, 1, 4)
        y_BHTD = fds.nn.attention(q, k, v, axis=self.axis, causal=True, **self.how)
        x_BTW = x_BTW + self.out(y_BHTD.transpose(1, 2).flatten(2))
        return x_BTW + self.down(F.gelu(self.up(self.norm_mlp(x_BTW))))


class Model(nn.Module):
    """Pre-norm, with learned positions; always the same first numbers."""

    def __init__(self, case: Case, axis: Axis | None, how: dict[str, Any]):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, case.width), nn.Embedding(case.tokens, case.width)
        self.blocks = nn.ModuleList(Block(case.width, axis, how) for _ in range(case.layers))
        self.norm, self.head = nn.LayerNorm(case.width), nn.Linear(case.width, VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        x_BTW = self.tokens(tokens_BT) + self.positions(positions_BT)
        for block in self.blocks:
            x_BTW = block(x_BTW)
        return self.head(self.norm(x_BTW))


def trained(case: Case, axis: Axis | None, *parts: Any, **how: Any) -> Call:
    """Return a call that takes a step on this rank's tokens of the same row, and returns the loss of the whole row."""
    apply, params, _ = fds.functional(Model(case, axis, how))

    def loss(params: Any, batch: Any) -> fds.Mean:
        tokens, targets, positions = batch
        logits = apply(params, tokens, positions)
        return fds.Mean(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel())

    step = fds.compose(*parts, fds.adamw(LR), fds.donate())(loss)
    state = step.init(params)
    del params
    tokens = torch.randint(VOCABULARY, (1, case.tokens), generator=torch.Generator().manual_seed(0))
    whole = tokens, (5 * tokens + 3) % VOCABULARY, torch.arange(case.tokens)[None]
    batch = tuple(own(x, axis, how.get("layout")) for x in whole)

    def call() -> Tensor:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return call


def own(x_BT: Tensor, axis: Axis | None, layout: str | None) -> Tensor:
    """Return this rank's tokens of whole rows."""
    if axis is None or layout == "zigzag":
        return fds.nn.zigzag(x_BT, axis)
    return x_BT.chunk(axis.size, 1)[axis.index].clone()


def together(case: Case, how: dict[str, Any]) -> Call:
    """Return the step of two ranks."""
    axis = fds.mesh(sp=ranks.NUM_RANKS)["sp"]
    return trained(case, axis, fds.context_parallel(axis, layout=how.get("layout", "contiguous")), **how)


def alone(case: Case) -> Call:
    """Return the step of one rank, for whose loss the other waits."""
    call = trained(case, None) if dist.get_rank() == 0 else lambda: torch.zeros(())

    def with_the_other() -> Tensor:
        loss = call().detach().clone()
        dist.broadcast(loss, 0)
        return loss

    return with_the_other


def maker(case: Case, name: str) -> Callable[[], Call]:
    """Return what makes a contender."""
    return functools.partial(alone, case) if name == ONE else functools.partial(together, case, METHODS[name])


def compete(case: Case, names: list[str], rounds: int) -> ranks.Turns:
    """Run on every rank: time these contenders in turns."""
    return ranks.take_turns({name: maker(case, name) for name in names}, rounds=rounds, first_calls=1, turn=0)


def weigh(case: Case, name: str) -> int:
    """Run on every rank: return the bytes of activations and gradients at the peak of a step, of the rank with most.

    They are those of all tensors less those that are held between steps.
    """
    found = memory.measure(maker(case, name), calls=2, device=torch.device("cpu"))
    most = torch.tensor(found.peak_bytes - found.held_bytes)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def send(case: Case, name: str) -> tuple[int, int]:
    """Run on every rank: return the bytes that this one sends in a step, for attention and in all."""
    call = maker(case, name)()
    with counted() as traffic:
        call()
    return sum(traffic[op, "sp"].bytes_sent for op in ("all_to_all", "send")), traffic.bytes_sent


def formula(case: Case, name: str) -> int:
    """Return the bytes that a rank sends for attention in a step; docs/sequence.md has it for fewer heads of keys."""
    n, heads = ranks.NUM_RANKS, case.width // HEAD_SIZE
    head = FLOAT_BYTES * case.tokens // n * HEAD_SIZE  # of a rank's tokens
    forward = (n - 1) * 4 * heads * head // n if name == "ulysses" else (n - 1) * 2 * heads * head
    gradients = 0 if name == "ulysses" else n * 2 * heads * head  # of keys and values, which go home
    return case.layers * (2 * forward + gradients)


def num_parameters(case: Case) -> int:
    """Return the number of the model's parameters."""
    with torch.device("meta"):
        return sum(p.numel() for p in Model(case, None, {}).parameters())


def main() -> int:
    """Run from the command line; the exit code says whether the claims are met."""
    options = parse()
    torch.set_num_threads(1)
    case = Case(width=2 * HEAD_SIZE, layers=1, tokens=256) if options.quick else Case()
    ranks.prepare(["benchmarks.context", "fds.nn"])
    tables: list[Rows] = []
    if "time" in options.parts:
        tables.append(table_of_times(ranks.launch(compete, case, [ONE, *options.only], options.rounds)[0]))
    if "memory" in options.parts:
        peaks = {name: ranks.launch(weigh, case, name)[0] for name in [ONE, *options.only]}
        tables.append(table_of_peaks(peaks))
        tables.append(table_of_bytes(case, {name: ranks.launch(send, case, name)[0] for name in options.only}))
    console = Console()
    report.show_tables(tables, console)
    if options.out:
        console.print(f"written: {report.write_tables(tables, 'context', facts(case), folder=Path(options.out))}")
    return 0 if options.quick or not any("NO" in row[-1] for *_, rows in tables for row in rows) else 1


def table_of_times(turns: ranks.Turns) -> Rows:
    """Return the table of seconds. Raises `AssertionError` where losses differ."""
    losses = [values[0] for values in turns.losses.values()]
    assert max(losses) <= (1 + 1e-4) * min(losses), f"the losses do not agree: {turns.losses}"
    pairs = [(name, ONE) for name in turns.seconds if name != ONE]
    if {"ring", "ring, zigzag"} <= turns.seconds.keys():
        pairs.append(("ring, zigzag", "ring"))
    rows = [
        [name, beside, str(len(turns.seconds[name])), *report.timed(series)]
        for name, beside in pairs
        for series in [Series(tuple(turns.seconds[name]), tuple(turns.seconds[beside]))]
    ]
    return (
        "A step (of the slower rank)",
        ["contender", "beside", "rounds", "ms", "ms beside", "ratio", "95% interval"],
        rows,
    )


def table_of_peaks(peaks: dict[str, int]) -> Rows:
    """Return the table of activations."""
    rows = []
    for name, peak in peaks.items():
        ratio = peak / peaks[ONE]
        claim = "" if name == ONE else report.verdict(MEMORY_AT_MOST, ratio <= MEMORY_AT_MOST)
        rows.append([name, f"{peak / 1e6:.1f}", f"{ratio:.3f}", claim])
    title = "Activations and gradients at the peak of a step (of the rank with most; less what is held between steps)"
    return title, ["contender", "MB", "of one rank's", "claim"], rows


def table_of_bytes(case: Case, sent: dict[str, tuple[int, int]]) -> Rows:
    """Return the table of messages."""
    gradients = 2 * FLOAT_BYTES * num_parameters(case) * (ranks.NUM_RANKS - 1) // ranks.NUM_RANKS
    rows = []
    for name, (of_attention, in_all) in sent.items():
        told = formula(case, name)
        equal = "equal: " + ("yes" if of_attention == told else "NO")
        rest = in_all - of_attention
        rows.append([name, f"{of_attention:,}", f"{told:,}", f"{rest:,}", f"{gradients:,}", equal])
    header = ["contender", "attention", "formula", "the rest", "a sum of gradients", "claim"]
    return "Bytes sent by a rank in a step", header, rows


def facts(case: Case) -> dict[str, str]:
    """Return what ran, for the file."""
    return {
        "what ran": f"one training step, float32, of a row of {case.tokens:,} tokens on {ranks.NUM_RANKS} gloo ranks "
        "of one thread each; one rank: all of the row on one of them, while the other waits",
        "model": f"GPT: width {case.width}, {case.layers} layers, heads of {HEAD_SIZE}, {VOCABULARY} tokens, "
        f"{num_parameters(case):,} parameters; adamw, donate",
        "attention": "fds.nn.attention of all; without an axis, and in Ulysses, it is torch's "
        "scaled_dot_product_attention (its flash kernel for CPUs); the ring runs that kernel block by block",
        "formula": "in units of B S/N D elements of float32, for N ranks and H heads: Ulysses 2 (N - 1)/N 4H "
        "(all-to-alls of q, k, v and of out, and of their gradients); ring 2 (N - 1) 2H + N 2H (keys and "
        "values in forward and in backward, and their gradients)",
        "torch's context_parallel": "does not run on CPUs: its dispatcher has no sharding strategy for "
        "aten._scaled_dot_product_flash_attention_for_cpu",
    }


def parse() -> argparse.Namespace:
    """Return the options."""
    words = lambda text: [word.strip() for word in text.split(";")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=words, default=list(METHODS), help="of 'ulysses;ring;ring, zigzag' (all)")
    parser.add_argument("--parts", type=words, default=["time", "memory"], help="of time;memory (both)")
    parser.add_argument("--rounds", type=int, default=4, help="each a step of every contender (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds, nothing written")
    parser.add_argument("--out", help="where the table goes (nowhere)")
    options = parser.parse_args()
    if options.quick:
        options.rounds = min(options.rounds, 2)
    return options


if __name__ == "__main__":
    sys.exit(main())
