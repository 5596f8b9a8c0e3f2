"""What the main job loses when it is compressed, how small it becomes, and how fast its baked model is on this CPU.

    make bench-compressing                        # a quarter of an hour
    make bench-compressing ARGS="--only float;8 bits"
    make bench-compressing ARGS="--quick"         # a tiny model, nothing written: does it all run?

The model and text of `examples/train_gpt.py`, float32, on one rank. All runs have the same batches. Those "after
training" compress what the run in float ends with; the others are in float for 0.6 of the steps and compressed then.
The matrices of blocks are compressed, about all of the parameters. Before, a fake-quantized step is timed beside the
plain one: alternating pairs, in one process.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]  # as a module and as a file, from anywhere

import attrs
import train_gpt
from gpt.model import gpt
from gpt.text import Text, read
from rich.console import Console

import fds
from benchmarks import report
from benchmarks.harness import Series
from benchmarks.report import Rows
from fds import schedules

SIZES = {"width": 128, "layers": 4, "heads": 4, "context": 128, "batch": 16, "eval_rows": 128}
TINY = {"width": 16, "layers": 2, "heads": 2, "context": 16, "batch": 4, "eval_rows": 4}
MATRICES = "*.qkv.weight", "*.merge.weight", "*.up.weight", "*.down.weight"
PAIRS = 40  # of steps that are timed


@attrs.frozen
class Way:
    """A way to compress: transforms, given the update at which they begin and the options."""

    transforms: Callable[[int, argparse.Namespace], list[Any]]
    after: bool = False  # whether what a run in float ends with is compressed


def rounded(bits: int) -> Way:
    """Return weights of so many bits, a scale for each row, while training."""
    return Way(lambda offset, options: [fds.quantize_weights(*MATRICES, bits=bits, groups="rows", offset=offset)])


def sparse(**how: Any) -> Way:
    """Return weights of which single ones are 0."""
    return Way(lambda offset, options: [fds.prune_weights(*MATRICES, offset=offset, **how)])


def without_heads(offset: int, options: argparse.Namespace) -> list[Any]:
    """Return attention without half of its heads."""
    heads = {"num_heads": options.heads, "density": 0.5, "offset": offset}
    return [fds.prune_heads("*.merge.weight", related="*.qkv.weight", **heads)]


WAYS = {
    "float": Way(lambda offset, options: []),
    **{f"{bits} bits": rounded(bits) for bits in (8, 4, 2, 1)},
    **{f"{bits} bits, after training": attrs.evolve(rounded(bits), after=True) for bits in (8, 4, 2, 1)},
    "2:4": sparse(block="2:4"),
    "half of the weights": sparse(density=0.5),
    "half of the heads": Way(without_heads),
    "4 bits, half of the heads": Way(lambda *how: [*rounded(4).transforms(*how), *without_heads(*how)]),
}


@attrs.frozen
class Result:
    """What came of a way: held-out bits per byte, bytes of the matrices' model, and tokens a second of it."""

    bits: float
    num_bytes: int
    tokens: float  # a second, of the baked model
    plain: float  # of the same numbers in float


def learn(way: Way, options: argparse.Namespace, text: Text) -> tuple[fds.Step, fds.State]:
    """Train with a way from 0.6 of the steps on, or in float where it comes after; return step and state."""
    axis = fds.mesh(dp=1)["dp"]
    rate = schedules.warmup_cosine(
        options.lr, warmup_steps=options.steps // 20, total_steps=options.steps, kind="linear", end_ratio=0.02
    )
    adam = fds.adamw(rate, (0.9, 0.95), weight_decay=options.weight_decay)
    loss = gpt(width=options.width, layers=options.layers, heads=options.heads)
    transforms = [] if way.after else way.transforms(int(0.6 * options.steps), options)
    step = fds.compose(*transforms, fds.clip_by_global_norm(1.0), adam, fds.donate())(loss)
    state = step.init(train_gpt.initial_params(step, options), key=options.seed)
    for _ in range(options.steps):
        state, _ = step(state, train_gpt.next_batch(text, state, options, axis))
    return step, state


def measured(step: fds.Step, state: fds.State, options: argparse.Namespace, text: Text) -> Result:
    """Return the held-out loss of an evaluation, and bytes and speed of the baked model."""
    axis = fds.mesh(dp=1)["dp"]
    bits = train_gpt.held_out_bits(step, state, text, options, axis)
    baked = fds.bake(step, state)
    tokens, _ = train_gpt.next_batch(text, state, options, axis)
    speed = baked.measure(tokens)
    return Result(bits, baked.num_bytes, *(1000 * tokens.numel() / ms for ms in (speed.baked_ms, speed.plain_ms)))


def results(names: list[str], options: argparse.Namespace, console: Console) -> dict[str, Result]:
    """Return what came of each way."""
    text, ends = read(options.data, context=options.context), dict[str, Any]()
    measurements: dict[str, Result] = {}
    for name in names:
        way = WAYS[name]
        trained = "float" if way.after else name
        if trained not in ends:
            ends[trained] = learn(WAYS[trained], options, text)
        step, state = ends[trained]
        if way.after:
            step = fds.compose(*way.transforms(0, options), fds.sgd(0.0))(step.loss)
            state = step.init(ends[trained][0].params(state))
        measurements[name] = measured(step, state, options, text)
        console.print(f"[dim]{name}: {measurements[name]}[/]", highlight=False)
    return measurements


def ratios(options: argparse.Namespace) -> Rows:
    """Return the time of a fake-quantized step over that of the plain one, of alternating pairs."""
    text, axis = read(options.data, context=options.context), fds.mesh(dp=1)["dp"]
    runs: dict[str, Any] = {}
    for name, transforms in {
        "plain": [],
        "plain again": [],
        **{f"{bits} bits": WAYS[f"{bits} bits"].transforms(0, options) for bits in (8, 4, 2, 1)},
    }.items():
        loss = gpt(width=options.width, layers=options.layers, heads=options.heads)
        step = fds.compose(*transforms, fds.clip_by_global_norm(1.0), fds.adamw(1e-4), fds.donate())(loss)
        runs[name] = step, step.init(train_gpt.initial_params(step, options), key=0)
    batch = train_gpt.next_batch(text, runs["plain"][1], options, axis)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for pair in range(options.pairs + 2):
        for name in list(runs) if pair % 2 else list(runs)[::-1]:
            step, state = runs[name]
            start = time.perf_counter()
            state, _ = step(state, batch)
            if pair > 1:
                times[name].append(time.perf_counter() - start)
            runs[name] = step, state
    rows = []
    for name, taken in times.items():
        series = Series(tuple(taken), tuple(times["plain"]))
        low, high = series.interval()
        rows.append([name, f"{series.medians_ms()[0]:.1f}", f"{series.ratio:.3f}", f"{low:.3f} to {high:.3f}"])
    return "A step beside the plain one", ["contender", "ms", "ratio", "95% interval"], rows


def table(measurements: dict[str, Result]) -> Rows:
    """Return losses, bytes and tokens a second."""
    rows = [
        [name, f"{x.bits:.4f}", f"{x.num_bytes:,}", f"{x.tokens:,.0f}", f"{x.plain:,.0f}"]
        for name, x in measurements.items()
    ]
    columns = ["contender", "held-out bits per byte", "bytes", "baked, tokens/s", "same numbers in float, tokens/s"]
    return "Compressed models of the main job", columns, rows


def draw(measurements: dict[str, Result], path: Path) -> None:
    """Draw losses over bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    in_order = sorted(measurements.items(), key=lambda pair: -pair[1].bits)
    for i, (name, x) in enumerate(in_order):  # the names stand in a column, since points lie close together
        color, at = "tab:orange" if WAYS[name].after else "tab:blue", (x.num_bytes / 2**20, x.bits)
        axes.plot(*at, "o", color=color)
        line = {"arrowstyle": "-", "linewidth": 0.4, "color": color, "relpos": (0, 0.5)}
        to = (1.04, 1 - (i + 0.5) / len(in_order))
        axes.annotate(
            f"{name}: {x.bits:.3f}", at, to, textcoords="axes fraction", fontsize=8, va="center", arrowprops=line
        )
    axes.set(
        xlabel="MiB of the baked model",
        ylabel="held-out bits per byte",
        xscale="log",
        xticks=[0.25, 0.5, 1, 2, 3],
        yscale="log",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}" if axis is axes.yaxis else "")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> int:
    """Run from the command line."""
    options = parse()
    console = Console()
    sizes = {**(TINY if options.quick else SIZES), "steps": options.steps}
    words = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--data", str(ROOT / "fds")] if options.quick else []
    settings = train_gpt.parse(words)
    settings.pairs = options.pairs
    tables = [ratios(settings)] if options.pairs else []
    measurements = results(options.only, settings, console)
    tables.insert(0, table(measurements))
    report.show_tables(tables, console)
    if options.out:
        facts = {
            "what": "the main job (examples/train_gpt.py: Python's standard library, bytes), float32, one rank",
            "sizes": ", ".join(f"{name} {value}" for name, value in sizes.items()),
            "compressed": "qkv, merge, up and down of all blocks, a scale for each row, from 0.6 of the steps on",
            "after training": "what the run in float ends with, rounded, without a further step",
            "loss": "held out, in bits per byte, of the same windows for all; one seed",
            "speed": "the median of 20 calls of 2,048 tokens, in turns with the same numbers in float",
        }
        path = report.write_tables(tables, options.name, facts, folder=Path(options.out))
        draw(measurements, path.with_suffix(".png"))
        with path.open("a") as file:
            file.write(f"\n![losses over bytes]({path.stem}.png)\n")
        console.print(f"written: {path}")
    return 0


def parse() -> argparse.Namespace:
    """Return the options, `only` as a list of names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help="ways, with ; between")
    parser.add_argument("--steps", type=int, default=400, help="updates of each run (%(default)s)")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="of steps that are timed (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps, nothing written")
    parser.add_argument("--out", default=str(report.RESULTS), help="where the table goes (benchmarks/results)")
    parser.add_argument("--name", default="compressing", help="in the name of the table (%(default)s)")
    options = parser.parse_args()
    options.only = list(WAYS) if options.only is None else [name.strip() for name in options.only.split(";")]
    if options.quick:
        options.steps, options.pairs, options.out = 10, 2, None
    if unknown := [name for name in options.only if name not in WAYS]:
        parser.error(f"no such way: {', '.join(unknown)}; there are {'; '.join(WAYS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
