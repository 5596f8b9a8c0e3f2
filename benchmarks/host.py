"""What a step takes of the host, beside a hand-written loop: layers so small that the device has nothing to do.

    python -m benchmarks.host                           # or: make bench-host
    python -m benchmarks.host --cases linears-300       # one of them; nothing written
    python -m benchmarks.host --quick                   # 20 leaves, nothing written: does it all run?

Claims: donated at most 1.3 of the loop's time, pure at most 1.5, stages 0 to 3 on one rank at most 1.5, accumulation
over 8 microbatches at most 1.3.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # as a module and as a file, from anywhere

import torch
from rich.console import Console
from torch import Tensor, nn

import fds
from benchmarks import report
from benchmarks.harness import Call, Contender, Row, Series, agreement, timed
from fds.step import Dimension, Shard, Step, fill, transform

LR = 1e-3
SIZES = (74, 300, 1200, 5000)
ROOM = "fds, stage 3, room for all"
CLAIMS = {"fds, donated": 1.3, "fds, pure": 1.5, **{f"fds, stage {i}": 1.5 for i in range(4)}, ROOM: 1.5}
ACCUMULATED = {"fds, donated, 8 microbatches": 1.3}
LLAMA = "llama-300"


def main() -> int:
    """Run from the command line; the exit code says whether the claims are met."""
    options = parse()
    torch.set_num_threads(1)
    console, rows, met, path = Console(), [], True, None
    header = ["case", "contender", "beside", "ms", "ms beside", "ratio", "95% interval", "agree", "claim"]
    tables = [(f"Time of a step ({options.pairs} pairs)", header, rows)]
    for name in options.cases:
        comparisons = contenders(name)
        agreements = [agreement(row.contender, row.beside) for row in comparisons]
        references = list(dict.fromkeys(row.beside for row in comparisons))
        duels = [*((row.contender, row.beside) for row in comparisons), *((one, one) for one in references)]
        progress = lambda text, name=name: console.print(f"[dim]{name}: {text}[/]", highlight=False)
        # One duel after another: between two steps of a program nobody else's step empties the caches.
        time = lambda duel, progress=progress: timed([duel], pairs=options.pairs, most=options.pairs, progress=progress)
        series = [time(duel)[0] for duel in duels]
        for row, times, agrees in zip(comparisons, series, agreements, strict=False):
            rows.append(cells(name, row, times, agrees))
            met &= times.reaches(row.time_at_most) is not False
        for one, times in zip(references, series[len(comparisons) :], strict=True):
            rows.append([name, one.name, "itself anew (A/A)", *report.timed(times), "", ""])
        if options.out:  # after every case: a run takes long, and what is cut off keeps what it has
            path = report.write_tables(tables, "host", facts(), folder=Path(options.out))
    report.show_tables(tables, console)
    if path is not None:
        console.print(f"written: {path}")
    return 0 if met or options.quick else 1


def cells(name: str, row: Row, times: Series, agrees: str) -> list[str]:
    """Return a line of the table."""
    claim = report.verdict(row.time_at_most, times.reaches(row.time_at_most))
    return [name, row.contender.name, row.beside.name, *report.timed(times), agrees, claim]


def contenders(name: str) -> list[Row]:
    """Return who stands beside whom in a case."""
    loop = Contender("loop", lambda: by_hand(name, 1))
    accumulated = Contender("loop, 8 microbatches", lambda: by_hand(name, 8))
    parts: dict[str, Callable[[], tuple]] = {"fds, donated": lambda: (fds.donate(),), "fds, pure": tuple}
    parts |= {f"fds, stage {i}": lambda i=i: (on_one_rank(i),) for i in range(4)}
    parts |= {ROOM: lambda: (on_one_rank(3, max_live_bytes=2**30),)}
    more = {"fds, donated, 8 microbatches": lambda: (fds.donate(), fds.accumulate(8))}
    made = lambda label, make: Contender(label, lambda: by_fds(name, make()))
    rows = [Row(made(label, make), loop, time_at_most=CLAIMS[label]) for label, make in parts.items()]
    return rows + [Row(made(label, make), accumulated, time_at_most=ACCUMULATED[label]) for label, make in more.items()]


@transform
def on_one_rank(stage: int, max_live_bytes: int | None = None):
    """Shard over an axis of one rank, which `fds.shard_optimizer` leaves out: buckets and hooks, nothing to send."""
    axis = fds.mesh(dp=-1)["dp"].channel("step")
    shard = Shard(axis, stage, axis, max_live_bytes=max_live_bytes)

    def apply(step: Step) -> Step:
        return fill(step, topology=Dimension(axis, "data", shard))

    return apply


def by_hand(name: str, microbatches: int) -> Call:
    """Return a turn of the loop that PyTorch's tutorials write."""
    module, batch, loss_of = model(name)
    optimizer = torch.optim.AdamW(module.parameters(), LR, fused=True)

    def call() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(())
        for part in batch.chunk(microbatches):
            loss = loss_of(module(part)) / microbatches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return call


def by_fds(name: str, parts: tuple) -> Call:
    """Return a step of the same."""
    module, batch, loss_of = model(name)
    apply, params, _ = fds.functional(module)
    step = fds.compose(fds.adamw(LR), *parts)(lambda p, x: loss_of(apply(p, x)))
    state = step.init(params)

    def call() -> Tensor:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return call


def model(name: str) -> tuple[nn.Module, Tensor, Callable[[object], Tensor]]:
    """Return the module of a case, its batch, and what makes a loss of its output."""
    torch.manual_seed(0)
    if name == LLAMA:
        return llama()
    layers = int(name.removeprefix("linears-")) // 2
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    return module, torch.randn(8, 8), lambda out: out.pow(2).mean()


def llama() -> tuple[nn.Module, Tensor, Callable[[object], Tensor]]:
    """Return a Hugging Face Llama of 300 layers of width 8."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=300,
        num_attention_heads=2,
        num_key_value_heads=2,
        use_cache=False,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config), torch.randint(0, 32, (8, 4)), lambda out: out.logits.pow(2).mean()


def facts() -> dict[str, str]:
    """Return what ran, for the file."""
    return {
        "what ran": "one training step, float32 on one thread of the CPU; `linears-N` is nn.Sequential of N / 2 "
        "nn.Linear(8, 8), N leaves, 8 rows; `llama-300` is Hugging Face's Llama of 300 layers of width 8, 2,703 "
        "leaves, 8 rows of 4 tokens",
        "how": "each contender in alternation with the loop alone; until 2026-11-22 all contenders of a case took "
        "turns, each with the caches that eight others had left",
        "loop": "zero_grad(set_to_none=True), loss.backward(), torch.optim.AdamW(fused=True).step()",
        "stages": "the buckets, hooks and gathers of shard_optimizer on an axis of one rank, which shard_optimizer "
        "itself leaves out (a step over one rank is the plain step): nothing is sent",
        "room for all": "max_live_bytes of 1 GiB: the parameters are gathered once, before the loss runs; at stage 3 "
        "otherwise each on use",
    }


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda text: text.split(","), help="linears-N, llama-300 (all that can run)")
    parser.add_argument("--pairs", type=int, default=20, help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="20 leaves, 4 pairs, nothing written")
    parser.add_argument("--out", help="where the table goes (benchmarks/results; nowhere with --cases or --quick)")
    options = parser.parse_args()
    whole = not options.cases and not options.quick
    if not options.cases:
        options.cases = [f"linears-{n}" for n in SIZES] + ([LLAMA] if find_spec("transformers") else [])
    if options.quick:
        options.cases, options.pairs = ["linears-20"], min(options.pairs, 4)
    options.out = options.out or (report.RESULTS if whole else None)
    return options


if __name__ == "__main__":
    sys.exit(main())
