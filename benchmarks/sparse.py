"""What sparse attention takes on a CPU beside torch's of all blocks: time and memory over lengths and densities.

    python -m benchmarks.sparse                         # or: make bench-sparse
    python -m benchmarks.sparse --quick                 # a few tokens, nothing written: does it all run?

The contenders are the reference of `fds.kernels.sparse_attention`, in torch's operators, and
`scaled_dot_product_attention` without a mask. Time is CPU time, which other programs on the machine change least. At
4,096 tokens and a tenth of the blocks, forward and backward are to take 0.25 of dense attention's time at most.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # as a module and as a file, from anywhere

import attrs
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from benchmarks import memory, report
from benchmarks.harness import Call, Series
from fds.attention_layouts import AttentionLayout, bigbird, bslongformer
from fds.kernels import select_blocks, sparse_attention

HEADER = ["contender", "tokens", "listed", "pass", "ms", "ms beside", "ratio", "95% interval", "claim"]
MEMORY_HEADER = ["contender", "tokens", "listed", "MB", "MB beside"]
BLOCK, HEAD_SIZE = 16, 64
PASSES = ("forward", "both")  # with backward
CLAIM, CLAIMED = 0.25, (4096, 0.1, PASSES[1])

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@attrs.frozen
class Case:
    """A length, a share of blocks that is asked for, and what attends to so many."""

    name: str
    tokens: int
    share: float
    density: float  # what is listed
    attention: Attention


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1024,4096,16384", help="lengths (%(default)s)")
    parser.add_argument("--shares", default="0.05,0.1,0.25", help="of blocks that are listed (%(default)s)")
    parser.add_argument("--heads", type=int, default=2, help="of 64 features (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="pairs, of the longest a third (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="128 and 256 tokens, a head, 2 rounds, nothing written")
    parser.add_argument("--out", default=report.RESULTS, help="where the table goes (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        options.tokens, options.shares, options.heads, options.rounds = "128,256", "0.5", 1, 2
    lengths = [int(x) for x in options.tokens.split(",")]
    console, rows, weighed, drawn = Console(), [], [], []
    for tokens in lengths:
        rounds = options.rounds if tokens == min(lengths) or tokens < max(lengths) else max(options.rounds // 3, 2)
        qkv = tuple(torch.randn(1, options.heads, tokens, HEAD_SIZE, requires_grad=True) for _ in range(3))
        of_dense = peak(dense, qkv)
        for case in cases(tokens, [float(x) for x in options.shares.split(",")], options.heads):
            for kind in PASSES:
                series = timed(called(case.attention, qkv, kind), called(dense, qkv, kind), rounds)
                claim = CLAIM if (tokens, case.share, kind) == CLAIMED and case.name != CHOSEN else None
                place = [case.name, f"{tokens}", f"{case.density:.0%}", kind]
                rows.append([*place, *report.timed(series), report.verdict(claim, series.reaches(claim))])
                drawn.append((case, kind, series))
                console.print(" ".join(rows[-1]), highlight=False)
            weighed.append([case.name, f"{tokens}", f"{case.density:.0%}", peak(case.attention, qkv), of_dense])
    tables = [
        (f"CPU time ({options.rounds} pairs, of the longest a third)", HEADER, rows),
        ("Peak of memory, forward and backward", MEMORY_HEADER, weighed),
    ]
    report.show_tables(tables, console)
    if not options.quick:
        path = report.write_tables(tables, "sparse", facts(options), folder=Path(options.out))
        draw(drawn, path.with_suffix(".png"))
        with path.open("a") as file:
            file.write(f"\n![ratios by length and density]({path.stem}.png)\n")
        console.print(f"written: {path}")
    return 0


WINDOW, RANDOM, CHOSEN = "bslongformer", "bigbird", "select_blocks"


def cases(tokens: int, shares: list[float], heads: int) -> list[Case]:
    """Return what attends to these shares of the blocks of so many tokens."""
    blocks = tokens // BLOCK
    made = []
    for share in shares:
        num = max(round(share * blocks), 4)  # of a row
        window = bslongformer(heads, blocks, block=BLOCK, num_sliding_window_blocks=(num - 2) | 1)
        random = bigbird(heads, blocks, block=BLOCK, num_random_blocks=max(num - 5, 0), different_layout_per_head=True)
        made += [Case(WINDOW, tokens, share, window.density, over(window))]
        made += [Case(RANDOM, tokens, share, random.density, over(random))]
        made += [Case(CHOSEN, tokens, share, num / blocks, choosing(num - 1))]
    return made


def over(layout: AttentionLayout) -> Attention:
    """Return attention over a layout."""
    return lambda q, k, v: sparse_attention(q, k, v, layout)


def choosing(top: int) -> Attention:
    """Return attention over blocks that blocks of queries choose, with the choice."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparse_attention(q, k, v, select_blocks(q, k, top=top, block=BLOCK, together=BLOCK, causal=False))

    return attention


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention over all blocks, by torch."""
    return F.scaled_dot_product_attention(q, k, v)


def called(attention: Attention, qkv: tuple[Tensor, ...], kind: str) -> Call:
    """Return a call of a pass."""

    def forward() -> Tensor:
        with torch.no_grad():
            return attention(*qkv)

    def both() -> Tensor:
        out = attention(*qkv)
        return torch.autograd.grad(out, qkv, torch.ones_like(out))[0]

    return forward if kind == PASSES[0] else both


def peak(attention: Attention, qkv: tuple[Tensor, ...]) -> str:
    """Return the megabytes that forward and backward take at most, as text."""
    weighed = memory.measure(lambda: called(attention, qkv, PASSES[1]), calls=1, device=torch.device("cpu"))
    return f"{weighed.peak_bytes / 1e6:.1f}"


def timed(call: Call, other: Call, rounds: int) -> Series:
    """Return the seconds of CPU time of two calls in alternating pairs, after a call of each."""
    call()
    other()
    times: list[tuple[float, float]] = []
    for i in range(rounds):
        pair = [seconds(x) for x in ((call, other) if i % 2 else (other, call))]
        times.append((pair[0], pair[1]) if i % 2 else (pair[1], pair[0]))
    return Series(*(tuple(x) for x in zip(*times, strict=True)))


def seconds(call: Call) -> float:
    """Return the seconds of CPU time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def draw(drawn: list[tuple[Case, str, Series]], path: Path) -> None:
    """Draw the ratios over densities, a panel for each pass and a line for each length and contender."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, len(PASSES), sharey=True)
    for axes, kind in zip(panels, PASSES, strict=True):
        lines: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for case, of_pass, series in drawn:
            if of_pass == kind:
                lines.setdefault((case.name, case.tokens), []).append((case.density, series.ratio))
        colors = {tokens: f"C{i}" for i, tokens in enumerate(sorted({tokens for _, tokens in lines}))}
        styles = {WINDOW: "-", RANDOM: "--", CHOSEN: ":"}
        for (name, tokens), points in lines.items():
            label = f"{name}, {tokens} tokens"
            axes.plot(*zip(*sorted(points), strict=True), styles[name], marker=".", color=colors[tokens], label=label)
        axes.plot([0, 0.3], [0, 0.3], color="black", linewidth=0.6)
        axes.set(title=kind, xlabel="share of blocks that is listed")
    panels[0].set_ylabel("time beside dense attention")
    panels[1].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def facts(options: argparse.Namespace) -> dict[str, str]:
    """Return what ran, for the file."""
    return {
        "what ran": f"attention, float32, one thread: {options.heads} heads of {HEAD_SIZE}, blocks of {BLOCK}, "
        "no mask, beside torch's scaled_dot_product_attention",
        "how": "alternating pairs, CPU time; both: forward and backward; memory beside q, k and v",
        "claim": f"{CLAIMED[0]} tokens, a tenth of the blocks, forward and backward: at most {CLAIM}",
        "bigbird": "a window of 3, 1 global block that sees all, the rest random, other blocks for each head",
        "select_blocks": "with the choice, of means of 16 queries",
    }


if __name__ == "__main__":
    sys.exit(main())
