"""The loss of a vocabulary on two gloo ranks, of logits and of a linear head, beside DTensor's loss_parallel.

Both differentiate: logits, or hidden and weight. Times are of the slower rank, in turns; peak memory is that of tensors
made by the call (without logits, hidden and weight), gradients too, measured in calls of their own.

    python benchmarks/vocab_losses.py            # writes a table
    python benchmarks/vocab_losses.py --quick    # a tiny case, nothing written
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where it is run as a program

import attrs
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

import fds
from benchmarks import memory, ranks, report
from benchmarks.harness import Call, Series

FDS, DTENSOR = "fds", "DTensor, loss_parallel"


@attrs.frozen
class Setting:
    """What is computed."""

    tokens: int = 4096
    num_classes: int = 50_000
    width: int = 128
    rounds: int = 6


def of_logits(setting: Setting, dtype: torch.dtype, who: str) -> Call:
    """Return a call that finds the loss of logits, and their gradient."""
    axis, targets, own = begin(setting)
    logits = torch.randn(setting.tokens, own, generator=generator(axis.index)).to(dtype).requires_grad_()
    mesh = init_device_mesh("cpu", (axis.size,))

    def ours() -> Tensor:
        loss = fds.nn.vocab_cross_entropy(logits, targets, axis, num_classes=setting.num_classes)
        torch.autograd.grad(loss, logits)
        return loss

    def peer() -> Tensor:
        with loss_parallel():
            whole = DTensor.from_local(logits, mesh, [Shard(1)], run_check=False)
            loss = F.cross_entropy(whole, targets)
            torch.autograd.grad(loss, logits)
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    return ours if who == FDS else peer


def of_head(setting: Setting, dtype: torch.dtype, who: str) -> Call:
    """Return a call that finds the loss of a linear head, and the gradients of hidden and weight."""
    axis, targets, own = begin(setting)
    hidden = torch.randn(setting.tokens, setting.width, generator=generator(9)).to(dtype).requires_grad_()
    weight = torch.randn(own, setting.width, generator=generator(axis.index)).to(dtype).requires_grad_()
    mesh = init_device_mesh("cpu", (axis.size,))

    def ours() -> Tensor:
        loss = fds.nn.linear_cross_entropy(hidden, weight, targets, axis=axis, num_classes=setting.num_classes)
        torch.autograd.grad(loss, [hidden, weight])
        return loss

    def peer() -> Tensor:
        with loss_parallel():
            whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
            logits = F.linear(whole, DTensor.from_local(weight, mesh, [Shard(0)], run_check=False))
            loss = F.cross_entropy(logits, targets)
            torch.autograd.grad(loss, [hidden, weight])
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    return ours if who == FDS else peer


CASES = {
    "logits, float32": (of_logits, torch.float32),
    "logits, bfloat16": (of_logits, torch.bfloat16),
    "head, float32": (of_head, torch.float32),
}


def generator(seed: int) -> torch.Generator:
    """Return a generator of this seed."""
    return torch.Generator().manual_seed(seed)


def begin(setting: Setting) -> tuple[fds.Axis, Tensor, int]:
    """Return the axis of all ranks, targets, and how many columns this rank has."""
    axis = fds.mesh(tp=ranks.NUM_RANKS)["tp"]
    targets = torch.randint(setting.num_classes, (setting.tokens,), generator=generator(8))
    return axis, targets, setting.num_classes // axis.size


def measure(setting: Setting, case: str) -> tuple[ranks.Turns, dict[str, int]]:
    """Return the turns of both, and the peak bytes of each; on every rank."""
    make, dtype = CASES[case]
    makers = {who: (lambda who=who: make(setting, dtype, who)) for who in (FDS, DTENSOR)}
    turns = ranks.take_turns(makers, rounds=setting.rounds, first_calls=2, turn=0)
    peaks = {}
    for who, maker in makers.items():
        call = maker()
        peaks[who] = memory.measure(lambda call=call: call, calls=1, device=torch.device("cpu")).peak_bytes
    return turns, peaks


def main() -> int:
    """Run all cases, print a table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny case, nothing written")
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    setting = Setting(64, 100, 8, 2) if given.quick else Setting(rounds=given.rounds)
    ranks.prepare(["benchmarks.vocab_losses", "fds.nn"])
    rows = []
    for case in CASES:
        turns, peaks = ranks.launch(measure, setting, case)[0]
        losses = turns.losses
        assert abs(losses[FDS][0] - losses[DTENSOR][0]) <= 1e-2 * losses[DTENSOR][0], losses
        times = Series(tuple(turns.seconds[FDS]), tuple(turns.seconds[DTENSOR]))
        low, high = times.interval()
        ours, peer = times.medians_ms()
        print(case, turns.seconds, peaks, file=sys.stderr, flush=True)
        rows.append(
            [case, f"{ours:.0f}", f"{peer:.0f}", f"{times.ratio:.3f} [{low:.3f}, {high:.3f}]",
             f"{peaks[FDS] / 2**20:.0f}", f"{peaks[DTENSOR] / 2**20:.0f}", f"{peaks[FDS] / peaks[DTENSOR]:.3f}"]
        )  # fmt: skip
    header = [
        "contender",
        "fds, ms",
        "DTensor, ms",
        "time, of DTensor's",
        "fds, MiB",
        "DTensor, MiB",
        "peak, of DTensor's",
    ]
    tables = [("Loss and gradients", header, rows)]
    report.show_tables(tables, Console())
    if not given.quick:
        facts = {
            "what": "loss and gradients, of logits and of a head; 2 gloo ranks, each with half of the classes",
            "sizes": f"{setting.tokens} tokens, {setting.num_classes} classes, head of width {setting.width}",
            "beside": "torch's DTensor with loss_parallel, in the same processes",
            "rounds": f"{setting.rounds}, in turned order; the slower rank counts; interval: 95%, of the median ratio",
            "threads": "one for each rank",
            "peak": "of tensors that a call makes, without logits, hidden and weight",
        }
        print(report.write_tables(tables, "vocab-losses", facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
