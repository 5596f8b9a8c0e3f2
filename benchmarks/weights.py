"""Stream whole weights to a consumer on two ranks, beside plain collectives of torch.distributed with the same bytes.

`step.weights` at stage 3, in float32 and cast to bfloat16, where the consumer looks at nothing. Beside it buckets of as
many bytes, of the same state into memory that is used again: by torch's own all_gather, by broadcasts of halves, and by
messages between the two ranks, which is what the loopback carries; a rank's own half is copied to its place, as there.
At least 0.8 of the best one's bandwidth is the aim.
"""

# ruff: noqa: E402  (the path comes before what it leads to)

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]  # as a module and as a file, from anywhere

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

import fds
from benchmarks import ranks, report
from benchmarks.harness import Call

OURS, LOW, SMALL = "step.weights", "step.weights, bfloat16", "step.weights, buckets of 8 MiB"
GATHER, BROADCAST, MESSAGES = "torch all_gather", "torch broadcast", "torch isend, irecv"
MIB, AT_LEAST = 2**20, 0.8


def main() -> int:
    """Run from the command line; the exit code says whether the claim is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="of timing (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few small weights, two rounds, nothing written")
    options = parser.parse_args()
    layers, width, rounds = (4, 128, 2) if options.quick else (32, 1448, options.rounds)
    ranks.prepare(["benchmarks.weights", "fds.transforms"])
    seconds = ranks.launch(time_in_turns, layers, width, rounds)[0]
    num_bytes = 4 * layers * width * width
    rows, met = [], True
    for ours, factor in ((OURS, 1), (SMALL, 1), (LOW, 0.5)):
        for theirs in (GATHER, BROADCAST, MESSAGES):
            ratios = factor * np.array(seconds[theirs]) / np.array(seconds[ours])
            draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
            low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
            speed = factor * num_bytes / float(np.median(seconds[ours])) / 1e9
            cells = [ours, theirs, f"{speed:.2f}", f"{np.median(ratios):.3f}", f"{low:.3f} to {high:.3f}"]
            met &= ours != OURS or bool(high >= AT_LEAST)
            rows.append([*cells, f"{AT_LEAST}: {'yes' if high >= AT_LEAST else 'NO'}" if ours == OURS else ""])
    header = ["contender", "beside", "GB/s of weights", "of its bandwidth", "95% interval", "at least"]
    tables: list[report.Rows] = [(f"{num_bytes / 1e6:.0f} MB of weights on two ranks", header, rows)]
    console = Console()
    report.show_tables(tables, console)
    if not options.quick:
        facts = {"what ran": f"{layers} matrices of {width} x {width} float32, stage 3, two gloo ranks"}
        console.print(f"written: {report.write_tables(tables, 'weights', facts)}")
    return 0 if options.quick or met else 1


def time_in_turns(layers: int, width: int, rounds: int) -> dict[str, list[float]]:
    """Run on every rank: return the seconds of the slowest rank, round by round, of all ways in turned order."""
    axis = fds.mesh(dp=-1)["dp"]
    step = fds.compose(fds.shard_optimizer(axis, stage=3), fds.sgd(0.1))(lambda params, batch: params)
    state = step.init({f"{i}.weight": torch.randn(width, width) for i in range(layers)})
    parts = list(state.params.buckets.values())
    memory = torch.empty(2 * max(part.numel() for part in parts))
    other = 1 - axis.index

    def gather(part: Tensor, whole: Tensor) -> None:
        dist.all_gather_into_tensor(whole, part)

    def broadcast(part: Tensor, whole: Tensor) -> None:
        for source, piece in enumerate(whole.chunk(2)):
            if source == axis.index:
                piece.copy_(part)
            dist.broadcast(piece, source)

    def messages(part: Tensor, whole: Tensor) -> None:
        works = [dist.isend(part, other), dist.irecv(whole.chunk(2)[other], other)]
        whole.chunk(2)[axis.index].copy_(part)
        for work in works[:: 1 if axis.index else -1]:
            assert work is not None
            work.wait()

    def ours(**how: object) -> Call:
        def call() -> Tensor:
            for _ in step.weights(state, **how):  # pyright: ignore[reportArgumentType]
                pass
            return torch.zeros(1)

        return call

    def theirs(send: Callable[[Tensor, Tensor], None]) -> Call:
        def call() -> Tensor:
            for part in parts:
                send(part, memory[: 2 * part.numel()])
            return torch.zeros(1)

        return call

    make: dict[str, Callable[[], Call]] = {
        OURS: lambda: ours(),
        GATHER: lambda: theirs(gather),
        SMALL: lambda: ours(bucket_bytes=8 * MIB),
        BROADCAST: lambda: theirs(broadcast),
        LOW: lambda: ours(dtype=torch.bfloat16),
        MESSAGES: lambda: theirs(messages),
    }
    return ranks.take_turns(make, rounds=rounds, first_calls=2, turn=0).seconds


if __name__ == "__main__":
    sys.exit(main())
