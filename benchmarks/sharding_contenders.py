"""Who trains in `benchmarks/sharding.py`: the model, its data, and one maker for each contender.

All train the same GPT from the same numbers, on the same rows a rank, in float32, with the same AdamW; none clips.
B rows, T tokens, V vocabulary, W width, H heads, D = W / H: `x_BTW` is a tensor of shape (B, T, W).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fds
from benchmarks.harness import Call
from benchmarks.ranks import NUM_RANKS, Resident, Turns, measure_resident, take_turns

warnings.filterwarnings("ignore", category=FutureWarning)  # peers call by its old name what torch has renamed

VOCABULARY, HEAD_SIZE, NUM_BATCHES = 256, 64, 4
AGAIN = " again"
LR, BETAS, EPS, WEIGHT_DECAY = 3e-4, (0.9, 0.999), 1e-8, 0.01


@attrs.frozen
class Case:
    """A model, and how much of what a rank sees in a step."""

    name: str
    width: int
    layers: int
    rows: int  # of a microbatch
    context: int
    accumulate: int = 1
    rate: str = ""  # of the cable between the ranks, as `tc` writes it; "" for the loopback

    def __str__(self) -> str:
        text = f"{self.name}, {self.accumulate} x {self.rows} x {self.context}"
        return f"{text}, {self.rate}" if self.rate else text


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to what comes in."""

    def __init__(self, width: int):
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTW: Tensor) -> Tensor:
        qkv_BHTD = self.qkv(self.norm_attention(x_BTW)).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)
        y_BHTD = F.scaled_dot_product_attention(*qkv_BHTD.chunk(3, dim=1), is_causal=True)
        x_BTW = x_BTW + self.merge(y_BHTD.transpose(1, 2).flatten(2))
        return x_BTW + self.down(F.gelu(self.up(self.norm_mlp(x_BTW))))


class GPT(nn.Module):
    """Pre-norm, learned positions, a head of its own; always the same first numbers."""

    def __init__(self, case: Case):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, case.width)
        self.positions = nn.Embedding(case.context, case.width)
        self.blocks = nn.ModuleList(Block(case.width) for _ in range(case.layers))
        self.norm, self.head = nn.LayerNorm(case.width), nn.Linear(case.width, VOCABULARY, bias=False)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTW = self.tokens(x_BT) + self.positions.weight
        for block in self.blocks:
            x_BTW = block(x_BTW)
        return self.head(self.norm(x_BTW))


def loss_of(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean cross entropy in nats."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def batches(case: Case) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's batches for ever, all microbatches of a step in one; a target is a function of its input."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (NUM_BATCHES, case.accumulate * case.rows, case.context)
    inputs = torch.randint(VOCABULARY, shape, generator=generator)
    pairs = list(zip(inputs, (5 * inputs + 3) % VOCABULARY, strict=True))
    while True:
        yield from pairs


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return torch's, fused."""
    return torch.optim.AdamW(module.parameters(), LR, BETAS, EPS, WEIGHT_DECAY, fused=True)


def ddp(case: Case) -> Call:
    """Return PyTorch's replicated training: the gradients of the last microbatch are reduced, with those before."""
    model = DistributedDataParallel(GPT(case))

    def backward(last: bool, inputs: Tensor, targets: Tensor) -> Tensor:
        with contextlib.nullcontext() if last else model.no_sync():
            loss = loss_of(model(inputs), targets)
            (loss / case.accumulate).backward()
        return loss.detach()

    return _torch_loop(case, backward, adamw(model))


def fsdp2(stage: int) -> Callable[[Case], Call]:
    """Return PyTorch's sharded training, by block.

    Stages 1 and 2 hold parameters whole from forward to backward (`reshard_after_forward=False`), stage 3 does not.
    Stage 1 reduces once a step, from whole summed gradients; stages 2 and 3 reduce every microbatch, as is its
    default.
    """

    def make(case: Case) -> Call:
        mesh, model = init_device_mesh("cpu", (NUM_RANKS,)), GPT(case)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=stage == 3)

        def backward(last: bool, inputs: Tensor, targets: Tensor) -> Tensor:
            if stage == 1:
                model.set_requires_gradient_sync(last)
            loss = loss_of(model(inputs), targets)
            (loss / case.accumulate).backward()
            return loss.detach()

        return _torch_loop(case, backward, adamw(model))

    return make


def zero(stage: int) -> Callable[[Case], Call]:
    """Return DeepSpeed's ZeRO, with the settings that were fastest here (README.md)."""

    def make(case: Case) -> Call:
        import deepspeed  # here, so that whoever only runs others needs none

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        model = GPT(case)
        settings: dict = {"stage": stage, "reduce_bucket_size": 5_000_000}
        settings |= {"memory_efficient_linear": False} if stage == 3 else {"allgather_bucket_size": 5_000_000}
        config = {
            "train_micro_batch_size_per_gpu": case.rows,
            "gradient_accumulation_steps": case.accumulate,
            "gradient_clipping": 0.0,
            "zero_optimization": settings,
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=config)
        return engine_loop(case, engine)

    return make


def engine_loop(case: Case, engine: Any) -> Call:
    """Return the loop over microbatches that DeepSpeed's engine wants."""
    turn = batches(case)

    def call() -> Tensor:
        losses = []
        for inputs, targets in _microbatches(case, turn):
            loss = loss_of(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    return call


def ours(
    stage: int, *more: Callable[[], Sequence[Any]], donated: bool = True, bucket_bytes: int | None = None
) -> Callable[[Case], Call]:
    """Return fds's, on the same module; its buckets follow the model unless their size is given.

    `more` return transforms that it has too.
    """

    def make(case: Case) -> Call:
        fds.init_distributed()
        apply, params, _ = fds.functional(GPT(case))
        step = fds.compose(
            fds.accumulate(case.accumulate),
            fds.shard_optimizer(fds.mesh(dp=NUM_RANKS)["dp"], stage=stage, bucket_bytes=bucket_bytes),
            *(one for made in more for one in made()),
            fds.adamw(LR, BETAS, EPS, weight_decay=WEIGHT_DECAY),
            *([fds.donate()] if donated else []),
        )(lambda params, batch: loss_of(apply(params, batch[0]), batch[1]))
        state, turn = step.init(params), batches(case)
        del params

        def call() -> Tensor:
            nonlocal state
            state, metrics = step(state, next(turn))
            return metrics["loss"]

        return call

    return make


def sized(stage: int, mib: int) -> str:
    """Return the name of fds's with buckets of a fixed size."""
    return f"fds {stage} of {mib} MiB"


CONTENDERS: dict[str, Callable[[Case], Call]] = {
    "DDP": ddp,
    **{f"FSDP2 {stage}": fsdp2(stage) for stage in (1, 2, 3)},
    **{f"DeepSpeed {stage}": zero(stage) for stage in (1, 2, 3)},
    **{f"fds {stage}": ours(stage) for stage in (0, 1, 2, 3)},
    "fds 2 pure": ours(2, donated=False),
}
SIZED: dict[str, Callable[[Case], Call]] = {
    sized(stage, mib): ours(stage, bucket_bytes=mib * 2**20) for stage in (0, 1, 2) for mib in (1, 2, 4, 8, 16, 32)
}


def compete(case: Case, names: tuple[str, ...], rounds: int, first_calls: int, turn: int) -> Turns:
    """Run on every rank: time these contenders in turns. A name that ends in AGAIN is made a second time."""
    makers = CONTENDERS | SIZED
    make = {name: functools.partial(makers[name.removesuffix(AGAIN)], case) for name in names}
    return take_turns(make, rounds=rounds, first_calls=first_calls, turn=turn)


def reside(case: Case, name: str, calls: int) -> Resident:
    """Run on every rank: measure the memory of this contender."""
    return measure_resident(functools.partial(CONTENDERS[name], case), calls=calls)


def _torch_loop(
    case: Case, backward: Callable[[bool, Tensor, Tensor], Tensor], optimizer: torch.optim.Optimizer
) -> Call:
    turn = batches(case)

    def call() -> Tensor:
        losses = [
            backward(i == case.accumulate, *microbatch)
            for i, microbatch in enumerate(_microbatches(case, turn), start=1)
        ]
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean()

    return call


def _microbatches(case: Case, turn: Iterator[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(x.split(case.rows) for x in next(turn)), strict=True))
