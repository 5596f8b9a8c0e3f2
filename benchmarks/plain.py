"""The fds step beside a plain PyTorch loop, on the model of `examples/train_gpt.py`.

    python -m benchmarks.plain                # or: make bench-plain
    python -m benchmarks.plain --quick        # a tiny model, nothing written: does it all run?

Claims: the donated step takes at most 1.02 of the loop's time, and at most 1.02 of its peak memory.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]  # as a module and as a file, from anywhere

import torch
import train_gpt
from gpt.model import criterion, gpt
from gpt.text import random_starts, read, windows
from rich.console import Console
from torch import Tensor, nn

import fds
from benchmarks import memory, report
from benchmarks.harness import Call, Contender, Row, compare

LR, BETAS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 0.1


def main() -> int:
    """Run from the command line; the exit code says whether the claims are met."""
    options = parse()
    torch.set_num_threads(options.threads)
    console, device = Console(), torch.device(options.device)
    batches = draw_batches(options, device)
    rows = contenders(options, batches, device)
    if options.peak:
        return show_peaks(rows, console, device)
    most = max(options.pairs, options.most)
    comparison = compare(
        rows,
        device=device,
        pairs=options.pairs,
        most=most,
        width=options.interval,
        progress=lambda text: console.print(f"[dim]{text}[/]"),
    )
    report.show(comparison, console)
    if options.out:
        size = sum(x.numel() for x in gpt_of(options).init(fds.random.key(0)).values())
        facts = {
            "what ran": f"one training step of the GPT of examples/train_gpt.py: {size:,} parameters (width "
            f"{options.width}, {options.layers} layers, {options.heads} heads), {options.batch} rows of "
            f"{options.context} bytes, float32 on {device}",
            "plain loop": "module, zero_grad(set_to_none=True), loss.backward(), torch.optim.AdamW(fused=True).step()",
            "the example by hand": "the plain loop with two groups, clip_grad_norm_ and a LambdaLR, as the example has",
        }
        path = report.write(comparison, options.name, facts, folder=Path(options.out))
        console.print(f"written: {path}")
    return 0 if comparison.met or options.quick else 1  # a tiny model is all overhead, and claims nothing


def contenders(options: argparse.Namespace, batches: list, device: torch.device) -> list[Row]:
    """Return who stands beside whom."""
    adamw = fds.adamw(LR, BETAS, weight_decay=WEIGHT_DECAY)
    donated = lambda: fds.compose(adamw, fds.donate())(gpt_of(options))
    pure = lambda: fds.compose(adamw)(gpt_of(options))
    example = lambda: train_gpt.training_step(options, fds.mesh(dp=-1))

    plain = Contender("plain loop", lambda: plain_loop(options, batches, device))
    by_hand = Contender("the example by hand", lambda: loop_of_the_example(options, batches, device))
    stepping = lambda name, make: Contender(name, lambda: fds_loop(make(), batches, device))
    return [
        Row(stepping("fds, donated", donated), plain, time_at_most=1.02, memory_at_most=1.02),
        Row(stepping("fds, pure", pure), plain),
        Row(stepping("fds, example's step", example), by_hand),
    ]


def fds_loop(step: fds.Step, batches: list, device: torch.device) -> Call:
    """Return a call that makes one step, on the next batch."""
    state, turn = step.init(initial(step, device)), 0

    def call() -> Tensor:
        nonlocal state, turn
        state, metrics = step(state, batches[turn % len(batches)])
        turn += 1
        return metrics["loss"]

    return call


def plain_loop(options: argparse.Namespace, batches: list, device: torch.device) -> Call:
    """Return the same, as PyTorch's tutorials write it."""
    model = Plain(gpt_of(options), device)
    optimizer = torch.optim.AdamW(model.parameters(), LR, BETAS, weight_decay=WEIGHT_DECAY, fused=True)
    return training(model, optimizer, batches)


def loop_of_the_example(options: argparse.Namespace, batches: list, device: torch.device) -> Call:
    """Return the loop that does all that the example composes."""
    model = Plain(gpt_of(options), device)
    named = model.named_like_the_example()
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named.items() if "norm" not in n]},
            {"params": [p for n, p in named.items() if "norm" in n], "weight_decay": 0.0},
        ],
        1.0,
        BETAS,
        weight_decay=options.weight_decay,
        fused=True,
    )
    curve = fds.schedules.warmup_cosine(
        options.lr, warmup_steps=options.steps // 20, total_steps=options.steps, kind="linear", end_ratio=0.02
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: float(curve(t)))
    clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return training(model, optimizer, batches, before=clip, then=schedule.step)


def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list,
    *,
    before: Callable = lambda: None,
    then: Callable = lambda: None,
) -> Call:
    """Return a call that does one turn of a training loop, with what comes before and after the update."""
    turn = 0

    def call() -> Tensor:
        nonlocal turn
        inputs, targets = batches[turn % len(batches)]
        turn += 1
        optimizer.zero_grad(set_to_none=True)
        loss, _ = criterion(model(inputs), targets)
        loss.backward()
        before()
        optimizer.step()
        then()
        return loss.detach()

    return call


class Plain(nn.Module):
    """The example's model as people write models: attributes and a forward."""

    def __init__(self, layers: fds.Layers, device: torch.device):
        super().__init__()
        embedding, *blocks, norm, _ = layers.layers
        self.embedding = embedding.build()
        self.blocks = nn.ModuleList(block.build() for block in blocks)
        self.norm = norm.build()
        self.to(device)
        first = layers.init(first_key())
        with torch.no_grad():
            for name, p in self.named_like_the_example().items():
                p.copy_(first[name])

    def named_like_the_example(self) -> dict[str, nn.Parameter]:
        """Return the parameters under the names that they have in `fds.Layers`."""
        places = {"embedding": "embedding", "norm": "final_norm"}
        places |= {f"blocks.{i}": str(i + 1) for i in range(len(self.blocks))}
        return {
            f"{place}.{name}": p
            for mine, place in places.items()
            for name, p in self.get_submodule(mine).named_parameters()
        }

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.embedding.logits(self.norm(x))


def gpt_of(options: argparse.Namespace) -> fds.Layers:
    """Return the loss of the example."""
    return gpt(width=options.width, layers=options.layers, heads=options.heads, dropout=options.dropout)


def first_key() -> Tensor:
    """Return where all contenders start."""
    return fds.random.fold_in(fds.random.key(0), "params")


def initial(step: fds.Step, device: torch.device) -> dict[str, Tensor]:
    """Return the first parameters, on the device."""
    return fds.tree.map(lambda x: x.to(device), step.loss.init(first_key()))


def draw_batches(options: argparse.Namespace, device: torch.device, *, count: int = 8) -> list[tuple[Tensor, Tensor]]:
    """Return the batches that all contenders go through, again and again."""
    text = read(context=options.context).train
    keys = [fds.random.fold_in(fds.random.key(0), "batch", i) for i in range(count)]
    starts = [random_starts(text, key, rows=options.batch, context=options.context) for key in keys]
    return [tuple(x.to(device) for x in windows(text, some, context=options.context)) for some in starts]


def show_peaks(rows: list[Row], console: Console, device: torch.device) -> int:
    """Print who had allocated what was live at the peak of each contender."""
    for one in dict.fromkeys(c for row in rows for c in (row.beside, row.contender)):
        found = memory.measure(one.make, calls=4, device=device)
        console.print(f"[bold]{one.name}[/]: peak {found.peak_bytes:,}, held {found.held_bytes:,}")
        for who, size in found.at_peak[:16]:
            console.print(f"  {size:>14,}  {who}", highlight=False)
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, of the command line unless others are given: the example's own, and this benchmark's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="at least (%(default)s)")
    parser.add_argument("--most", type=int, default=200, help="pairs, where the intervals stay wide (%(default)s)")
    parser.add_argument("--interval", type=float, default=0.01, help="width of the widest one to end at (%(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="the example's tiny model, 4 pairs, nothing written")
    parser.add_argument("--peak", action="store_true", help="only show who holds what at the peak of memory")
    parser.add_argument("--out", help="where the table goes (benchmarks/results; nowhere with --quick)")
    parser.add_argument("--name", default="plain", help="in the name of the table (%(default)s)")
    parser.add_argument("--device", default="cpu", help="(%(default)s)")
    mine = parser.parse_args(arguments)
    options = train_gpt.parse(["--quick"] if mine.quick else ["--steps", "1000"])
    if mine.quick:
        mine.pairs, mine.most = min(mine.pairs, 4), 4
    vars(options).update({**vars(mine), "dtype": "float32", "optimizer": "adamw"})
    options.out = mine.out or (None if mine.quick else report.RESULTS)
    return options


if __name__ == "__main__":
    sys.exit(main())
