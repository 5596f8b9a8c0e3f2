"""What compiling takes off a step: `fds.compile()` of the loss, and `fds.compile(whole=True)`, beside loops.

    python -m benchmarks.compiling                      # needs a C++ compiler; or: make bench-compiling
    python -m benchmarks.compiling --quick              # backend aot_eager, 4 leaves, nothing written: does it all run?

Layers so small that all time is the host's: one thread of the CPU, the models of benchmarks/host.py. No claim is made.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # as a module and as a file, from anywhere

import torch
from rich.console import Console
from torch import Tensor

import fds
from benchmarks import host, report
from benchmarks.harness import Call, Series

HEADER = ["case", "contender", "beside", "ms", "ms beside", "ratio", "95% interval"]
LOOP, COMPILED_LOOP, PLAIN = "loop", "loop, torch.compile(model)", "fds"
LOSS, WHOLE, AGAIN = "fds.compile()", "fds.compile(whole=True)", "fds.compile(whole=True) anew (A/A)"
PAIRS = [(PLAIN, LOOP), (LOSS, PLAIN), (WHOLE, PLAIN), (WHOLE, LOSS), (LOSS, COMPILED_LOOP), (WHOLE, COMPILED_LOOP)]
CALLS = 10  # of a timing


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda text: text.split(","), default=["linears-74"], help="linears-N")
    parser.add_argument("--rounds", type=int, default=60, help="in each of which all take their turn (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="4 leaves by aot_eager, 4 rounds, nothing written")
    parser.add_argument("--out", default=report.RESULTS, help="where the table goes (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        options.cases, options.rounds = ["linears-4"], 4
    console, rows = Console(), []
    for name in options.cases:
        times = in_turns(contenders(name, "aot_eager" if options.quick else "inductor"), options.rounds)
        for one, other in (*PAIRS, (AGAIN, WHOLE)):
            rows.append([name, one, other, *report.timed(Series(times[one], times[other]))])
    tables = [(f"Time of a step ({options.rounds} rounds)", HEADER, rows)]
    report.show_tables(tables, console)
    if not options.quick:
        console.print(f"written: {report.write_tables(tables, 'compiling', facts(), folder=Path(options.out))}")
    return 0


def contenders(name: str, backend: str) -> dict[str, Call]:
    """Return who takes turns, compiled."""
    fds_step = lambda *parts: host.by_fds(name, (fds.donate(), *parts))
    calls = {
        LOOP: host.by_hand(name, 1),
        COMPILED_LOOP: by_compiled_hand(name, backend),
        PLAIN: fds_step(),
        LOSS: fds_step(fds.compile(backend=backend)),
        WHOLE: fds_step(fds.compile(backend=backend, whole=True)),
        AGAIN: fds_step(fds.compile(backend=backend, whole=True)),
    }
    for call in calls.values():
        for _ in range(2 * CALLS):
            call()
    return calls


def in_turns(calls: dict[str, Call], rounds: int) -> dict[str, tuple[float, ...]]:
    """Return the seconds a call of each, one after another in every round, each round beginning with another."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            call = calls[name]
            call()  # its caches
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            times[name].append((time.perf_counter() - start) / CALLS)
    return {name: tuple(seconds) for name, seconds in times.items()}


def by_compiled_hand(name: str, backend: str) -> Call:
    """Return a turn of the loop of PyTorch's tutorials, whose module is compiled."""
    module, batch, loss_of = host.model(name)
    optimizer = torch.optim.AdamW(module.parameters(), host.LR, fused=True)
    compiled = torch.compile(module, backend=backend)

    def call() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(compiled(batch))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return call


def facts() -> dict[str, str]:
    """Return what ran, for the file."""
    return {
        "what ran": "one training step, float32 on one thread of the CPU; `linears-N` is nn.Sequential of N / 2 "
        "nn.Linear(8, 8), N leaves, 8 rows; AdamW",
        "how": f"all in turns, {CALLS} calls each, alone on the machine; compiled before they are timed, by inductor",
        "fds": "compose(adamw, donate()), and what stands in the table",
        "whole": "forward, backward and update are one graph, of which inductor makes loops in C++",
        "loop": "zero_grad(set_to_none=True), loss.backward(), torch.optim.AdamW(fused=True).step()",
    }


if __name__ == "__main__":
    sys.exit(main())
