"""Batches: one rank passes another than those that share its rows; every rank is told which, at once, and may go on."""

from __future__ import annotations

import itertools
from typing import Any

import attrs
import torch
from torch import Tensor, nn

import fds
from fds.errors import BatchError
from tests import ranks
from tests.storage.campaign.outcomes import Row, Violation

WIDTH, HEADS, ROWS, TOKENS = 8, 2, 4, 8
HOWS = ("tensor", "ulysses", "ring", "zigzag", "pipeline")
CHANGES = {
    "rows": lambda x: x[: ROWS // 2],
    "tokens": lambda x: x[:, 2:],
    "rows for tokens": lambda x: x.reshape(ROWS // 2, -1, WIDTH),
    "values": lambda x: x + 1,
    "dtype": Tensor.double,
}
CALLS = {
    "step": lambda step, state, batch: step(state, batch),
    "evaluate": lambda step, state, batch: step.evaluate(state, batch),
    "evaluator": lambda step, state, batch: step.evaluator(state)(batch),
    "fds.evaluate": lambda step, state, batch: fds.evaluate(step, state, [batch]),
}


class Attention(nn.Module):
    def __init__(self, axis: Any = None, method: str = "ulysses"):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.more = {"axis": axis, "method": method, "layout": "contiguous"}
        if method == "zigzag":
            self.more |= {"method": "ring", "layout": "zigzag"}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(fds.nn.attention(q, k, v, causal=True, **self.more).transpose(1, 2).flatten(2))


def make_step(how: str) -> tuple[fds.Step, fds.State]:
    """Return a step whose ranks share rows, beside two data ranks, and its first state."""
    mesh = fds.mesh(dp=-1, axis=2)
    axis, data = mesh["axis"], fds.shard_optimizer(mesh["dp"], stage=1)
    torch.manual_seed(0)
    if how == "pipeline":
        layers = fds.Layers([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], nn.MSELoss())
        shared = fds.pipeline(fds.plans.one_f_one_b, axis, num_microbatches=2)
        step = fds.compose(shared, data, fds.adamw(0.01))(layers)
        return step, step.init(layers.init)
    if how == "tensor":
        module: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        shared = fds.tensor_parallel(axis, {"0": "column", "2": "row"})
    else:
        module = Attention(axis, how)
        shared = fds.context_parallel(axis, layout="zigzag" if how == "zigzag" else "contiguous")
    apply, params, _ = fds.functional(module)
    loss = lambda p, batch: fds.Mean((apply(p, batch[0]) - batch[1]).square().sum(), batch[0].shape[:2].numel())
    step = fds.compose(shared, data, fds.adamw(0.01))(loss)
    return step, step.init(params)


@attrs.frozen
class Fault:
    """What one of four ranks passes in place of its batch, and to what."""

    how: str
    change: str
    leaf: int  # inputs or targets
    to: str

    def __str__(self) -> str:
        return f"other {self.change} of leaf {self.leaf} on one rank, {self.how}, {self.to}"

    @property
    def refused(self) -> bool:
        """Whether ranks share what is changed: those of a sequence axis have other values."""
        return self.change != "values" or self.how in ("tensor", "pipeline")


def commit(fault: Fault) -> list[str]:
    """Commit a fault in a first call and in a later one, and return what this rank is told; then train."""
    texts = []
    step, state = make_step(fault.how)
    rank = fds.mesh(r=-1).rank
    numbers = torch.Generator().manual_seed(rank // 2 if fault.how in ("tensor", "pipeline") else rank)
    batch = [torch.randn(ROWS, TOKENS, WIDTH, generator=numbers) for _ in range(2)]
    wrong = list(batch)
    if rank == 1:
        wrong[fault.leaf] = CHANGES[fault.change](batch[fault.leaf])
    for _ in range(2):
        try:
            CALLS[fault.to](step, state, tuple(wrong))
            texts.append("accepted")
        except BatchError as error:
            texts.append(str(error))
        state, metrics = step(state, tuple(batch))
    assert float(metrics["step"]) == 2 and metrics["loss"].isfinite()
    return texts


def all_faults() -> list[Fault]:
    """Return every fault."""
    return list(itertools.starmap(Fault, itertools.product(HOWS, CHANGES, (0, 1), CALLS)))


def check(fault: Fault, told: list[list[str]]) -> None:
    """Raise `Violation` unless all ranks were told both shapes, and of no fault where there is none."""
    with Violation.told(str(fault)):
        assert all(one == told[0] for one in told), told
        for text in told[0] if fault.refused else ():
            assert ", rank 1\n" in text and "as on rank 0" in text and f"({ROWS}, {TOKENS}, {WIDTH}) float32" in text
            assert ("other values" if fault.change == "values" else "got:   (") in text, text
        assert fault.refused or told[0] == ["accepted"] * 2, told


def simulated() -> Row:
    """Commit every fault on simulated ranks. Raises `Violation`."""
    for fault in all_faults():
        check(fault, fds.simulate(lambda fault=fault: commit(fault), 4))
    return Row("another batch on one of 4 simulated ranks", len(all_faults()), {"BatchError": len(all_faults())})


def real() -> Row:
    """Commit those faults in which gloo would end a process, on real ranks. Raises `Violation`."""
    faults = [Fault(how, change, 0, to) for how in HOWS for change in ("rows", "tokens") for to in ("step", "evaluate")]
    for fault in faults:
        check(fault, ranks.run(commit, fault, world_size=4))
    return Row("another batch on one of 4 ranks", len(faults), {"BatchError": len(faults)})
