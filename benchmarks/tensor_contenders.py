"""Who trains in `benchmarks/tensor.py`: two models, their plans, and one maker for each contender.

Everybody runs the same modules from the same numbers on the same rows, in float32, with the same AdamW; the two plans
say the same of every matrix. B rows, T tokens, V vocabulary, W width, D = 64 the size of a head: `x_BTW` is (B, T, W).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import fds
from benchmarks import memory
from benchmarks.harness import Call
from benchmarks.ranks import Turns, take_turns
from benchmarks.sharding_contenders import AGAIN, BETAS, EPS, LR, NUM_BATCHES, WEIGHT_DECAY
from fds.collectives import counted
from fds.nn.parallel.region import Region

HEAD_SIZE = 64


@attrs.frozen
class Case:
    """A model, and what a step sees; with `groups` of keys and values it is a Llama, else a GPT."""

    name: str
    width: int
    layers: int
    vocabulary: int
    rows: int
    context: int
    groups: int = 0

    def __str__(self) -> str:
        return f"{self.name}, {self.rows} x {self.context}"


class Attention(nn.Module):
    """Causal attention of heads of 64, rotary where queries share keys and values in groups."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        narrow, self.rotary = (groups * HEAD_SIZE or width), bool(groups)
        linear = functools.partial(nn.Linear, bias=not groups)
        self.q, self.k, self.v = linear(width, width), linear(width, narrow), linear(width, narrow)
        self.out = linear(width, width)

    def forward(self, x_BTW: Tensor) -> Tensor:
        q, k, v = (f(x_BTW).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.rotary:
            q, k = rotated(q), rotated(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.rotary)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """GELU of one projection, or SwiGLU of two."""

    def __init__(self, width: int, *, gated: bool):
        super().__init__()
        inner = 8 * width // 3 // 64 * 64 if gated else 4 * width
        self.up, self.down = nn.Linear(width, inner, bias=not gated), nn.Linear(inner, width, bias=not gated)
        self.gate = nn.Linear(width, inner, bias=False) if gated else None

    def forward(self, x_BTW: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTW)) if self.gate is None else F.silu(self.gate(x_BTW)) * self.up(x_BTW))


class Block(nn.Module):
    """Attention and a perceptron, each added to what comes in."""

    def __init__(self, case: Case):
        super().__init__()
        norm = nn.RMSNorm if case.groups else nn.LayerNorm
        self.norm_attention, self.norm_mlp = norm(case.width), norm(case.width)
        self.attention, self.mlp = Attention(case.width, case.groups), MLP(case.width, gated=bool(case.groups))

    def forward(self, x_BTW: Tensor) -> Tensor:
        x_BTW = x_BTW + self.attention(self.norm_attention(x_BTW))
        return x_BTW + self.mlp(self.norm_mlp(x_BTW))


class Model(nn.Module):
    """Pre-norm, a head of its own; always the same first numbers."""

    def __init__(self, case: Case):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(case.vocabulary, case.width)
        self.positions = None if case.groups else nn.Embedding(case.context, case.width)
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.layers))
        self.norm = (nn.RMSNorm if case.groups else nn.LayerNorm)(case.width)
        self.head = nn.Linear(case.width, case.vocabulary, bias=False)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTW = self.tokens(x_BT)
        if self.positions is not None:
            x_BTW = x_BTW + self.positions.weight
        for block in self.blocks:
            x_BTW = block(x_BTW)
        return self.head(self.norm(x_BTW))


@functools.cache
def _angles(context: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(context), 10_000.0 ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE))
    return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)


def rotated(x_BHTD: Tensor) -> Tensor:
    """Return queries or keys turned by their positions."""
    cos, sin = _angles(x_BHTD.shape[-2])
    first, second = x_BHTD.chunk(2, -1)
    return x_BHTD * cos + torch.cat([-second, first], -1) * sin


def batches(case: Case) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of all ranks for ever; a target is a function of its input."""
    inputs = torch.randint(
        case.vocabulary, (NUM_BATCHES, case.rows, case.context), generator=torch.Generator().manual_seed(0)
    )
    pairs = list(zip(inputs, (5 * inputs + 3) % case.vocabulary, strict=True))
    while True:
        yield from pairs


def mean_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross entropy in nats."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return torch's, fused; DTensors and others in groups of their own, as it wants them."""
    groups: dict[bool, list[nn.Parameter]] = {}
    for p in module.parameters():
        groups.setdefault(isinstance(p, DTensor), []).append(p)
    return torch.optim.AdamW([{"params": some} for some in groups.values()], LR, BETAS, EPS, WEIGHT_DECAY, fused=True)


def plan_of(case: Case, *, gather: bool) -> dict[str, object]:
    """Return fds's plan."""
    attention = {f"*.attention.{name}": "column" for name in "qkv"} | {"*.attention.out": "row"}
    mlp = {f"*.mlp.{name}": "column" for name in ("up", "gate") if name == "up" or case.groups} | {"*.mlp.down": "row"}
    ends = {"tokens": "vocab", "head": fds.nn.vocab(gather=gather)}
    return {"*.attention": fds.nn.heads(), **attention, **mlp, **ends, "blocks.*": "sequence"}


def ours(*, sequence: bool = False, parallel_loss: bool = False, overlap: int = 0) -> Callable[[Case], Call]:
    """Return fds's."""

    def make(case: Case) -> Call:
        fds.init_distributed()
        apply, params, _ = fds.functional(Model(case))
        tp = fds.mesh(tp=-1)["tp"]

        def loss(params, batch):
            logits = apply(params, batch[0])
            return fds.nn.vocab_cross_entropy(logits, batch[1], tp) if parallel_loss else mean_loss(logits, batch[1])

        step = fds.compose(
            fds.tensor_parallel(tp, plan_of(case, gather=not parallel_loss), sequence=sequence, overlap=overlap),
            fds.adamw(LR, BETAS, EPS, weight_decay=WEIGHT_DECAY),
            fds.donate(),
        )(loss)
        state, turn = step.init(params), batches(case)
        del params

        def call() -> Tensor:
            nonlocal state
            state, metrics = step(state, next(turn))
            return metrics["loss"]

        return call

    return make


def dtensor(*, sequence: bool = False, parallel_loss: bool = False) -> Callable[[Case], Call]:
    """Return torch's `parallelize_module`, with the plan that its tutorial and torchtitan give a Llama."""

    def make(case: Case) -> Call:
        mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), Model(case)
        outside = Shard(1) if sequence else Replicate()
        styles: dict[str, ParallelStyle] = {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(
                input_layouts=outside,
                output_layouts=Shard(-1) if parallel_loss else Replicate(),
                use_local_output=not parallel_loss,
            ),
        }
        if sequence:
            styles["norm"] = SequenceParallel()
        parallelize_module(model, mesh, styles)
        for i, block in enumerate(model.blocks):
            inner: dict[str, ParallelStyle] = {
                name: PrepareModuleInput(input_layouts=outside, desired_input_layouts=Replicate())
                for name in ("attention", "mlp")
            }
            inner |= {f"attention.{name}": ColwiseParallel() for name in "qkv"}
            inner |= {f"mlp.{name}": ColwiseParallel() for name, m in block.mlp.named_children() if name != "down"}
            inner |= {name: RowwiseParallel(output_layouts=outside) for name in ("attention.out", "mlp.down")}
            if sequence:
                inner |= {name: SequenceParallel() for name in ("norm_attention", "norm_mlp")}
                if i == 0:
                    inner[""] = PrepareModuleInput(
                        input_layouts=Replicate(), desired_input_layouts=outside, use_local_output=True
                    )
            whole = inner.pop("", None)
            parallelize_module(block, mesh, inner)
            if whole is not None:
                parallelize_module(block, mesh, whole)
        optimizer, turn = adamw(model), batches(case)
        parallel = loss_parallel if parallel_loss else contextlib.nullcontext

        def call() -> Tensor:
            inputs, targets = next(turn)
            with parallel():
                loss = mean_loss(model(inputs), targets)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach()

        return call

    return make


def ddp(case: Case) -> Call:
    """Return PyTorch's replicated training, of as many rows in all."""
    model, turn = DistributedDataParallel(Model(case)), batches(case)
    optimizer = adamw(model)

    def call() -> Tensor:
        inputs, targets = (x.tensor_split(dist.get_world_size())[dist.get_rank()] for x in next(turn))
        loss = mean_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return call


_VARIANTS: dict[str, dict[str, bool]] = {
    "": {},
    ", sequence": {"sequence": True},
    ", loss": {"parallel_loss": True},
    ", sequence, loss": {"sequence": True, "parallel_loss": True},
}
CONTENDERS: dict[str, Callable[[Case], Call]] = {
    **{f"fds{name}": ours(**how) for name, how in _VARIANTS.items()},
    **{f"DTensor{name}": dtensor(**how) for name, how in _VARIANTS.items()},
    "fds, overlap 1": ours(overlap=1),
    "fds, sequence, overlap 1": ours(sequence=True, overlap=1),
    "fds, sequence, overlap 4": ours(sequence=True, overlap=4),
    "DDP": ddp,
}


def compete(case: Case, names: tuple[str, ...], rounds: int, first_calls: int, turn: int) -> Turns:
    """Run on every rank: time these contenders in turns. A name that ends in AGAIN is made a second time."""
    make = {name: functools.partial(CONTENDERS[name.removesuffix(AGAIN)], case) for name in names}
    return take_turns(make, rounds=rounds, first_calls=first_calls, turn=turn)


def weigh(case: Case, name: str, calls: int) -> list[int]:
    """Run on every rank: return peaks of tensor bytes, of a step and from the making on, of the rank with most."""
    found = memory.measure(functools.partial(CONTENDERS[name], case), calls=calls, device=torch.device("cpu"))
    most = torch.tensor([found.call_bytes, found.peak_bytes])
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()


def send(case: Case, name: str) -> int:
    """Run on every rank: return the bytes that this one sends in a step of fds's."""
    call = CONTENDERS[name](case)
    call()
    with counted() as traffic:
        call()
    return traffic.bytes_sent


PAIRS = 16  # of a column and a row


def pairs_of_ours(width: int) -> Call:
    """Return fds's forward and backward of PAIRS columns and rows of so few features that all is host."""
    fds.init_distributed()
    region, model = Region(fds.mesh(tp=-1)["tp"]), _pairs(width)
    ranks, own = dist.get_world_size(), dist.get_rank()
    for column, row in zip(model[::2], model[1::2], strict=True):
        column.weight = nn.Parameter(column.weight.detach().chunk(ranks, 0)[own].clone())
        row.weight = nn.Parameter(row.weight.detach().chunk(ranks, 1)[own].clone())
        fds.nn.column().convert(column, region, run=None)
        fds.nn.row().convert(row, region, run=None)
    return _forward_and_backward(model, width)


def pairs_of_dtensor(width: int) -> Call:
    """Return the same of torch's."""
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), _pairs(width)
    styles = {str(i): RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(2 * PAIRS)}
    return _forward_and_backward(parallelize_module(model, mesh, styles), width)


def pairs_of_messages(width: int) -> Call:
    """Return the messages of both, by torch alone."""
    x = torch.zeros(1, 4, width)

    def call() -> Tensor:
        for _ in range(2 * PAIRS):
            dist.all_reduce(x)
        return x.sum()

    return call


def pairs_alone(width: int) -> Call:
    """Return the same layers with half of the weights, and no message: what is left of either if dividing is free."""
    model = nn.Sequential()
    for _ in range(PAIRS):
        model += nn.Sequential(nn.Linear(width, width // 2, bias=False), nn.Linear(width // 2, width, bias=False))
    return _forward_and_backward(model, width)


HOSTS: dict[str, Callable[[int], Call]] = {
    "fds": pairs_of_ours,
    "DTensor": pairs_of_dtensor,
    "messages": pairs_of_messages,
    "plain": pairs_alone,
}


def host(width: int, rounds: int) -> Turns:
    """Run on every rank: time pairs of layers in turns."""
    make = {name: functools.partial(made, width) for name, made in HOSTS.items()}
    return take_turns(make, rounds=rounds, first_calls=5, turn=0)


def _pairs(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(2 * PAIRS)))


def _forward_and_backward(model: nn.Module, width: int) -> Call:
    x = torch.ones(1, 4, width, requires_grad=True)

    def call() -> Tensor:
        out = model(x).sum()
        out.backward()
        return out.detach()

    return call
