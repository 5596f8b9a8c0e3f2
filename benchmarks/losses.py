"""What the main job learns on two ranks when messages lose something, beside the same steps without loss.

    make bench-losses                                   # some five minutes
    make bench-losses ARGS="--only '8 bits;1 bit' --steps 320"
    make bench-losses ARGS="--quick"                    # a tiny model, nothing written: does it all run?

The same model, text, steps and batches for all: the held-out loss at the end is at most 1% above that of the run
without loss, 2% where ranks train apart. It needs no cable.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]  # as a module and as a file, from anywhere

import torch
from rich.console import Console

from benchmarks import ranks, report
from benchmarks.losses_contenders import WAYS, learn
from benchmarks.report import Rows

SIZES = {"width": 64, "layers": 2, "heads": 2, "context": 128, "batch": 8, "eval_rows": 256}
TINY = {"width": 16, "layers": 1, "heads": 1, "context": 16, "batch": 4, "eval_rows": 4}

Curve = list[tuple[int, float]]


def main() -> int:
    """Run from the command line; the exit code says whether the claims are met."""
    options = parse()
    torch.set_num_threads(1)
    os.environ["PYTHONPATH"] = str(ROOT / "examples")
    ranks.prepare(["benchmarks.losses_contenders"])
    sizes = {**(TINY if options.quick else SIZES), "steps": options.steps, "eval_every": options.steps // 8}
    words = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--data", str(ROOT / "fds")] if options.quick else []
    console, curves = Console(), {}
    for name in options.only:
        curves[name] = ranks.launch(learn, name, words)[0]
        console.print(f"[dim]{name}: {curves[name][-1][1]:.4f}[/]", highlight=False)
    tables = [table_of_losses(curves), table_of_curves(curves)]
    report.show_tables(tables, console)
    if options.out:
        facts = {
            "what": "the main job (examples/train_gpt.py: Python's standard library, bytes), float32, 2 gloo ranks",
            "sizes": ", ".join(f"{name} {value}" for name, value in sizes.items()),
            "loss": "held out, in bits per byte, of the same windows for all",
        }
        console.print(f"written: {report.write_tables(tables, options.name, facts, folder=Path(options.out))}")
    return 0 if options.quick or all(above <= WAYS[name].within for name, above in excess(curves).items()) else 1


def excess(curves: dict[str, Curve]) -> dict[str, float]:
    """Return by how much each final loss is above that of the run without loss that ran too, relative to it."""
    pairs = {name: WAYS[name].beside for name in curves if WAYS[name].beside in curves.keys() - {name}}
    return {name: curves[name][-1][1] / curves[beside][-1][1] - 1 for name, beside in pairs.items()}


def table_of_losses(curves: dict[str, Curve]) -> Rows:
    """Return the losses at the end."""
    rows, above = [], excess(curves)
    for name, curve in curves.items():
        cells = ["", "", ""]
        if name in above:
            way, more = WAYS[name], above[name]
            cells = [way.beside, f"{more:+.2%}", report.verdict(1 + way.within, more <= way.within)]
        rows.append([name, f"{curve[-1][1]:.4f}", *cells])
    return "Held-out loss at the end", ["contender", "bits per byte", "without loss", "above", "claim"], rows


def table_of_curves(curves: dict[str, Curve]) -> Rows:
    """Return the losses on the way."""
    steps = [str(done) for done, _ in next(iter(curves.values()))]
    rows = [[name, *(f"{loss:.4f}" for _, loss in curve)] for name, curve in curves.items()]
    return "Held-out loss after steps", ["contender", *steps], rows


def parse() -> argparse.Namespace:
    """Return the options, `only` as a list of names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAMES", help="contenders, with ; between")
    parser.add_argument("--steps", type=int, default=1280, help="a multiple of 128 (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps, nothing written")
    parser.add_argument("--out", default=str(report.RESULTS), help="where the table goes (benchmarks/results)")
    parser.add_argument("--name", default="losses", help="in the name of the table (%(default)s)")
    options = parser.parse_args()
    options.only = list(WAYS) if options.only is None else [name.strip() for name in options.only.split(";")]
    if options.quick:
        options.steps, options.out = 8, None
    elif options.steps < 1 or options.steps % 128:
        parser.error("--steps is a multiple of 128: evaluations are right after turns of local updates")
    if unknown := [name for name in options.only if name not in WAYS]:
        parser.error(f"no such contender: {', '.join(unknown)}; there are {'; '.join(WAYS)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
