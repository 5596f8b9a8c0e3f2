"""Products beside the messages of a tensor axis: two gloo ranks, over the loopback and over a cable.

    make bench-overlap                                    # needs root and iproute2; five minutes, quiet
    make bench-overlap ARGS="--parts sequence --rates 1gbit --rounds 4"
    make bench-overlap ARGS="--parts host,waits"          # a tiny layer, beside torch's DTensor
    make bench-overlap ARGS="--quick"                     # tiny, nothing written: does it all run?

A feed-forward layer cut in two, up by columns and down by rows, forward and backward, in `chunks` pieces beside the
same messages and products one after another. A layer so tiny that a call is all host: without messages (host), and with
them (waits). Parts add up in --runs; the table is of all in there.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]  # as a module and as a file, from anywhere

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from benchmarks import cable, ranks, report
from benchmarks.harness import PAIRS_PER_MAKING, Call, Series
from benchmarks.report import Rows
from fds import collectives as c
from fds.collectives.functional import copy_in, sum_out
from fds.collectives.links import DONE
from fds.nn.parallel.overlapped import copied_linear, gathered_linear, linear_scattered, linear_summed

PARTS = ["sequence", "whole", "host", "waits"]
LOOPBACK, RATES = "loopback", ["loopback", "1gbit"]
CHUNKS = (1, 2, 4, 8)
RECOMMENDED = 4
APART, AGAIN = "one after another", "one after another, again"
DTENSOR, CALLS = "DTensor", 50  # a timing of the host is of so many calls
HOST_AT_MOST = 0.5


@attrs.frozen
class Case:
    """A feed-forward layer and what it is given."""

    part: str  # sequence, whole, host or waits
    rate: str = LOOPBACK
    width: int = 768
    hidden: int = 3072
    rows: int = 4
    context: int = 1024

    def __str__(self) -> str:
        return f"{self.part}, {self.width} -> {self.hidden} -> {self.width}, {self.rows} x {self.context}, {self.rate}"

    @property
    def is_tiny(self) -> bool:
        """Whether a timing is of many calls."""
        return self.part in ("host", "waits")

    @property
    def contenders(self) -> dict[str, Callable[[], Call]]:
        """Return what is timed, the one that others stand beside first."""
        if self.is_tiny:
            apart = functools.partial(self.layer, whole_apart)
            return {DTENSOR: self.dtensor, APART: apart, "fds": functools.partial(self.layer, whole_pieces(1))}
        apart, pieces = (sequence_apart, sequence_pieces) if self.part == "sequence" else (whole_apart, whole_pieces)
        made = {f"{n} chunks": functools.partial(self.layer, pieces(n)) for n in CHUNKS}
        return {APART: functools.partial(self.layer, apart), **made, AGAIN: functools.partial(self.layer, apart)}

    def layer(self, forward: Callable[..., Tensor]) -> Call:
        """Return a call of forward and backward on this rank's pieces."""
        axis = c.mesh(tp=-1)["tp"]
        if self.part == "host":
            axis = attrs.evolve(axis, link=Silent())
        torch.manual_seed(axis.index)
        up = (torch.randn(self.hidden // axis.size, self.width) / self.width**0.5).requires_grad_()
        bias = torch.zeros(len(up), requires_grad=True)
        down = (torch.randn(self.width, len(up)) / self.hidden**0.5).requires_grad_()
        context = self.context // (axis.size if self.part == "sequence" else 1)
        torch.manual_seed(axis.index if self.part == "sequence" else 0)
        x = torch.randn(self.rows, context, self.width, requires_grad=True)

        def call() -> Tensor:
            y = forward(x, up, bias, down, axis)
            gradients = torch.autograd.grad(y, [x, up, bias, down], x.detach())
            return gradients[0].sum()

        return self.repeated(call)

    def dtensor(self) -> Call:
        """Return a call of the same layer by torch's own plan."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        from torch.testing._internal.distributed import fake_pg  # a backend that sends nothing

        assert fake_pg
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(self.width, self.hidden), nn.GELU(), nn.Linear(self.hidden, self.width))
        module[2].bias = None
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        group = dist.new_group(backend="fake" if self.part == "host" else "gloo")
        module = parallelize_module(module, DeviceMesh.from_group(group, "cpu"), plan)
        x = torch.randn(self.rows, self.context, self.width, requires_grad=True)
        parameters = [x, *module.parameters()]

        def call() -> Tensor:
            return torch.autograd.grad(module(x), parameters, x.detach())[0].sum()

        return self.repeated(call)

    def repeated(self, call: Call) -> Call:
        """Return many calls as one, of so small a layer that a call is all host."""
        return (lambda: [call() for _ in range(CALLS)][-1]) if self.is_tiny else call


class Silent:
    """A link that sends nothing."""

    def start(self, *collective: object) -> c.Work:
        """Return what is done at once."""
        return DONE


def sequence_apart(x: Tensor, up: Tensor, bias: Tensor, down: Tensor, axis: c.Axis) -> Tensor:
    """Gather, multiply, multiply, sum and scatter."""
    h = F.gelu(F.linear(c.all_gather(x, axis, 1), up, bias))
    return c.reduce_scatter(F.linear(h, down), axis, 1)


def sequence_pieces(chunks: int) -> Callable[..., Tensor]:
    """Return the same in pieces."""

    def forward(x: Tensor, up: Tensor, bias: Tensor, down: Tensor, axis: c.Axis) -> Tensor:
        (h,) = gathered_linear(x, [up], [bias], axis, dim=1, chunks=chunks)
        return linear_scattered(F.gelu(h), down, axis, dim=1, chunks=chunks)

    return forward


def whole_apart(x: Tensor, up: Tensor, bias: Tensor, down: Tensor, axis: c.Axis) -> Tensor:
    """Multiply, multiply and sum; in backward sum again."""
    h = F.gelu(F.linear(copy_in(x, axis), up, bias))
    return sum_out(F.linear(h, down), axis)


def whole_pieces(chunks: int) -> Callable[..., Tensor]:
    """Return the same in pieces."""

    def forward(x: Tensor, up: Tensor, bias: Tensor, down: Tensor, axis: c.Axis) -> Tensor:
        (h,) = copied_linear(x, [up], [bias], axis)
        return linear_summed(F.gelu(h), down, axis, chunks)

    return forward


def compete(case: Case, rounds: int, turn: int) -> dict[str, list[float]]:
    """Time all contenders in turns, on every rank."""
    clock = time.thread_time if case.part == "host" else time.perf_counter
    return ranks.take_turns(case.contenders, rounds=rounds, first_calls=2, turn=turn, clock=clock).seconds


@attrs.frozen
class Timed:
    """The seconds of each contender, round by round."""

    case: Case
    seconds: dict[str, list[float]]


def main() -> int:
    """Run from the command line; the exit code says whether the claims are met."""
    options = parse()
    if set(options.rates) - {LOOPBACK} and options.rounds and (why := cable.missing()):
        print(f"no cable here: {why}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    ranks.prepare(["benchmarks.overlap"])
    console = Console()
    timed = [read(line) for line in options.runs.read_text().splitlines()] if options.runs.exists() else []
    for case in options.cases if options.rounds else []:
        timed.append(measured(case, options, console))
        if not options.quick:
            options.runs.parent.mkdir(parents=True, exist_ok=True)
            with options.runs.open("a") as file:
                file.write(json.dumps(attrs.asdict(timed[-1])) + "\n")
    tables = [table(timed)]
    report.show_tables(tables, console)
    if options.out:
        facts = {
            "what": "forward and backward of a feed-forward layer, float32, on 2 gloo ranks of one thread each",
            "parts": "of the sequence gathered and scattered (sequence), or all of it on both ranks (whole)",
            "host, waits": f"{CALLS} calls of a tiny layer, whole; host: without messages, seconds of the thread that "
            "calls; DTensor is ColwiseParallel and RowwiseParallel",
        }
        console.print(f"written: {report.write_tables(tables, 'overlap', facts, folder=Path(options.out))}")
    met = [series(one, name).reaches(claim(one, name)) for one in timed for name in one.seconds]
    return 1 if False in met and not options.quick else 0


def measured(case: Case, options: argparse.Namespace, console: Console) -> Timed:
    """Return what came of one comparison."""
    seconds: dict[str, list[float]] = {}
    for turn in range(0, options.rounds, PAIRS_PER_MAKING):
        some = min(PAIRS_PER_MAKING, options.rounds - turn)
        found, *_ = ranks.launch(compete, case, some, turn, over=case.rate.replace(LOOPBACK, ""))
        for name, times in found.items():
            seconds.setdefault(name, []).extend(times)
    lines = ", ".join(f"{name} {1e3 * statistics.median(times):.4g}" for name, times in seconds.items())
    console.print(f"[dim]{case}: {lines} ms[/]", highlight=False, soft_wrap=True)
    return Timed(case, seconds)


def series(one: Timed, name: str) -> Series:
    """Return the times of a contender beside those of the first."""
    return Series(tuple(one.seconds[name]), tuple(next(iter(one.seconds.values()))))


def claim(one: Timed, name: str) -> float | None:
    """Return what is claimed of a contender's ratio."""
    if one.case.is_tiny:
        return HOST_AT_MOST if name == "fds" and one.case.part == "host" else None
    is_worth_it = name == f"{RECOMMENDED} chunks" and one.case.rate != LOOPBACK  # whose messages take the same cores
    return 1.0 if is_worth_it else None


def table(timed: list[Timed]) -> Rows:
    """Return the ratios of all."""
    rows = []
    for one in timed:
        first, *others = one.seconds
        for name in others:
            at = series(one, name)
            verdict = report.verdict(claim(one, name), at.reaches(claim(one, name)))
            rows.append([name, str(one.case), first, str(len(at.ratios)), *report.timed(at), verdict])
    return "Time", ["contender", "case", "beside", "rounds", "ms", "ms beside", "ratio", "95% interval", "claim"], rows


def read(line: str) -> Timed:
    """Return what a line of --runs says."""
    found = json.loads(line)
    return Timed(Case(**found["case"]), found["seconds"])


def parse() -> argparse.Namespace:
    """Return the options, `cases` as a list of `Case`."""
    words = lambda text: [word.strip() for word in text.split(",")]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=words, default=PARTS, help="of sequence, whole, host, waits (all)")
    parser.add_argument("--rates", type=words, default=RATES, help="of the cable (1gbit), and loopback")
    parser.add_argument("--rounds", type=int, default=8, help="of all contenders (%(default)s); 0: tables only")
    parser.add_argument("--quick", action="store_true", help="a tiny layer, 2 rounds, no cable, nothing written")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/overlap.jsonl"), help="where runs are added (%(default)s)"
    )
    parser.add_argument("--out", default=str(report.RESULTS), help="where the table goes (benchmarks/results)")
    options = parser.parse_args()
    size: dict[str, int] = {}
    tiny = {"width": 8, "hidden": 16, "rows": 1, "context": 8}
    if options.quick:
        options.rates, options.rounds, options.out, size = [LOOPBACK], 2, None, tiny
        options.runs = Path("/dev/null")
    options.cases = [Case(part, rate, **size) for part in options.parts for rate in options.rates]
    tinies = [Case(part, **tiny) for part in options.parts if Case(part).is_tiny]
    options.cases = [case for case in options.cases if not case.is_tiny] + tinies
    return options


if __name__ == "__main__":
    sys.exit(main())
