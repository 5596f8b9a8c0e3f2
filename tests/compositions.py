"""Compositions made of rows of tables: a problem, a place where it runs, an optimizer, and parts, dealt by families.

A family has columns: problems, places, optimizers, parts that all of it have, and parts that may stand beside them.
Each column is a deck that is shuffled and dealt again and again: every row comes about as often as any other, beside
others each time. A new row changes its own family alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

import fds
from fds import tree
from fds.step import Gradients, fill, transform
from tests.laws import problems, test_law_13_axes as transformer
from tests.laws.noting import noting
from tests.laws.problems import Part, Problem
from tests.laws.test_law_4_sharding import batch_of, share
from tests.sequence_axis import language_model
from tests.tensor_axis import splitting

ROWS = 12  # of a batch, on each rank that passes one
SKIPPING = {"loss_scale", "static_loss_scale", "skip_nonfinite", "quick_scale"}


@attrs.frozen
class Start:
    """A run on one rank: its step, its first parameters, and a batch for every call and for an evaluation."""

    step: fds.Step
    params: Any
    batches: list[Any]


@attrs.frozen
class Composition:
    """What `start` returns on so many ranks; the state is then saved, and loaded by the ranks `elsewhere`."""

    name: str
    ranks: int
    start: Callable[[], Start]
    elsewhere: Composition | None = None


@attrs.frozen
class Place:
    """How many ranks a mesh has along each axis, and what is composed to share a step among them."""

    replica: int = 1  # ranks that agree by `local`
    copies: int = 1
    pp: int = 1
    node: int = 1
    dp: int = 1
    tp: int = 1
    microbatches: int = 2
    stage: int | None = None
    shard: dict[str, Any] = attrs.field(factory=dict)  # more arguments of `shard_optimizer`
    local: dict[str, Any] = attrs.field(factory=dict)
    tensor: dict[str, Any] = attrs.field(factory=dict)
    pipe: Any = None  # the schedule
    alone: int = 0  # stages that one process plays

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.replica * self.copies * self.pp * self.node * self.dp * self.tp

    def __str__(self) -> str:
        changed = [(x.name, getattr(self, x.name)) for x in attrs.fields(Place) if x.name != "tensor"]
        usual = Place()
        return " ".join(f"{name}={getattr(x, '__name__', x)}" for name, x in changed if x != getattr(usual, name))

    def transforms(self) -> list[Any]:
        """Return the transforms, on a rank."""
        sizes = {name: getattr(self, name) for name in ("replica", "copies", "pp", "node", "dp", "tp")}
        mesh = fds.mesh(**sizes)
        parts = [fds.accumulate(self.microbatches)]
        if self.pipe is not None:
            parts = [fds.pipeline(self.pipe, self.alone or mesh["pp"], num_microbatches=self.microbatches)]
        if self.stage is not None:
            more = {"bucket_bytes": 300, **self.shard}
            if "secondary" in more:
                more["secondary"] = mesh["dp"]
            copies = mesh["copies"] if self.copies > 1 else None
            axis = mesh["node", "dp"] if self.node > 1 else mesh["dp"]
            parts += [fds.shard_optimizer(axis, stage=self.stage, replicate=copies, **more)]
        if self.local:
            parts += [fds.local_updates(mesh["replica"], **self.local)]
        return parts + ([fds.tensor_parallel(mesh["tp"], **self.tensor)] if self.tensor else [])


@transform
def whole_map():
    """Halve gradients by a function that says nothing of what it needs, and so is given all of them."""

    def halved(grads: Gradients, call: Any) -> Gradients:
        return attrs.evolve(grads, leaves=[x * 0.5 for x in grads.leaves])

    return lambda step: fill(step, condition=halved)


def disk(buffer_bytes: int = 2**20) -> Any:
    return fds.disk(problems.directory().name, buffer_bytes=buffer_bytes)


def speculating(*media: Any, **more: Any) -> Any:
    return fds.offload(*media, speculate=True, **more)


# name -> a part; those of tests/laws/problems too
PARTS = problems.TRANSFORMS | {
    "quick_scale": Part(lambda: fds.loss_scale(2.0**127, window=1, hysteresis=1), excludes="commit"),
    "clip_norm": Part(lambda: fds.clip_by_global_norm(0.5), excludes="clip"),
    "wide_clip": Part(lambda: fds.clip_by_global_norm(1e6), excludes="clip"),
    "tight_clip": Part(lambda: fds.clip_by_global_norm(1e-3), excludes="clip"),
    "whole_map": Part(whole_map),
    "noting": Part(lambda: noting(5)),
    "donate": Part(fds.donate),
    "freeze": Part(lambda: fds.freeze("*w*")),
    "freeze_base": Part(lambda: fds.freeze("base")),
    "quantize_frozen": Part(fds.quantize_frozen),
    "low_sums": Part(
        lambda: fds.precision(torch.bfloat16, reduce=torch.bfloat16, accumulate=torch.bfloat16), excludes="precision"
    ),
    "compiled": Part(lambda: fds.compile(backend="eager", whole=True)),
    "compiled_loss": Part(lambda: fds.compile(backend="eager")),
    "graph": Part(fds.cuda_graph),
    "moments_on_host": Part(lambda: fds.offload("host")),
    "all_on_host": Part(lambda: fds.offload("host", "host", "host", "host")),
    "gradients_on_host": Part(lambda: fds.offload(gradients="host")),
    "all_on_disk": Part(lambda: fds.offload(disk(), disk(), disk(), disk())),
    "all_in_chunks": Part(lambda: fds.offload(disk(4096), disk(4096), disk(4096), disk(4096))),
    "masters_on_disk": Part(lambda: fds.offload(masters=disk(), averages="host")),
    "half_on_disk": Part(lambda: fds.offload(disk(), "host", disk(4096), ratio=0.5)),
    "by_pattern": Part(lambda: fds.offload({"*0*": "host", "*": disk()}, {"*weight*": "host"}, averages=disk())),
    "early_on_host": Part(lambda: speculating("host")),
    "early_all_on_host": Part(lambda: speculating("host", "host", "host", "host")),
    "early_on_disk": Part(lambda: speculating(disk(), disk(), disk(), disk())),
    "early_in_chunks": Part(lambda: speculating(disk(4096), "host", disk(4096), ratio=0.6)),
}

OPTIMIZERS = problems.OPTIMIZERS | {
    "onebit_adam": lambda: fds.onebit_adam(0.01, freeze_step=2, eps=1e-2, weight_decay=0.1),
    "onebit_lamb": lambda: fds.onebit_lamb(0.01, freeze_step=2, eps=1e-2),
    "zero_one_adam": lambda: fds.zero_one_adam(0.01, 3, 2, 1, 4, eps=1e-2),
    "muon": lambda: fds.by_name({"scale": fds.sgd(0.01), "*": fds.muon(0.01)}),
    "muon_in_blocks": lambda: fds.by_name({"*.up.weight": fds.muon(0.01), "*": fds.adamw(0.01)}),
}


def wide(seed: int, dtype: torch.dtype, dropout: float, norm: bool) -> Problem:
    """Return a regression through a matrix whose rows have enough numbers for codes."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"base": (5, 24), "w": (24, 3), "scale": ()}
    params = {name: torch.randn(shape, generator=g, dtype=dtype) for name, shape in shapes.items()}

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return ((torch.tanh(batch[0] @ params["base"]) @ params["w"] * params["scale"] - batch[1]) ** 2).mean()

    return Problem("wide", loss_fn, params, problems.regression(seed, dtype))


def transformed(seed: int, dtype: torch.dtype, dropout: float, norm: bool) -> Problem:
    """Return the transformer of law 13, of which modules can be divided."""
    g = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(0, transformer.TOKENS, (2, ROWS, 6), generator=g)
    loss = transformer.model(dropout)
    return Problem("transformed", loss, loss.init(fds.random.key(seed)), (ids, targets), dropout > 0)


def weighed(seed: int, dtype: torch.dtype, dropout: float, norm: bool) -> Problem:
    """Return layers whose loss is a mean over the rows with a positive target: in some microbatches there are none."""
    problem = problems.layers(seed, dtype, dropout, norm)

    def criterion(outputs: Tensor, targets: Tensor) -> Any:
        counted = targets[:, 0] > 0.5
        return fds.Mean(((outputs - targets).square().sum(1) * counted).sum(), counted.sum())

    return attrs.evolve(problem, name="weighed", loss=fds.Layers(problem.loss.layers, criterion))


def pairs(seed: int, dtype: torch.dtype, dropout: float, norm: bool) -> Problem:
    """Return pairs of layers divided by a placement of a user's own; the place makes step and batches."""
    compose = lambda place, *parts: place.step(*parts[:-1], optimizer=parts[-1])
    return Problem("pairs", compose, splitting.model(None).init, lambda place, step, call: splitting.share(step, call))


def sequences(seed: int, dtype: torch.dtype, dropout: float, norm: bool) -> Problem:
    """Return a language model of which ranks have parts of the sequences; the place makes step and batches."""
    compose = lambda place, *parts: place.step(*parts)
    return Problem("sequences", compose, language_model.model().init, lambda place, step, call: place.batch(step, call))


@attrs.frozen
class Family:
    """Columns of rows, of which so many compositions are dealt."""

    count: int
    problems: Sequence[Callable[..., Problem]]
    places: Sequence[Any]
    optimizers: Sequence[str]
    must: Sequence[tuple[str, ...]] = ((),)
    may: Sequence[str] = ()
    calls: int = 4
    elsewhere: Sequence[Place | None] = (None,)

    def deal(self, name: str) -> Iterator[Composition]:
        """Yield the compositions, always the same ones."""
        draw = random.Random(name)
        columns = self.problems, self.places, self.optimizers, self.must, self.elsewhere
        for i, row in enumerate(zip(*(_dealt(draw, column, self.count) for column in columns), strict=True)):
            make, place, optimizer, must, elsewhere = row
            parts = list(must)
            for part in draw.sample(self.may, min(len(self.may), draw.randrange(5))):
                if all((PARTS[part].excludes or part) != (PARTS[x].excludes or x) for x in parts):
                    parts.insert(draw.randrange(len(parts) + 1), part)
            problem = make(draw.randrange(2**16), torch.float32, draw.choice([0.0, 0.3]), draw.random() < 0.5)
            told = f"{name} {i}: {problem.name}, {optimizer}, {parts}"
            yield composed(told, problem, place, optimizer, parts, self.calls, elsewhere)


def _dealt(draw: random.Random, rows: Sequence[Any], count: int) -> list[Any]:
    return [row for _ in range(-(-count // len(rows))) for row in draw.sample(rows, len(rows))][:count]


def composed(
    name: str, problem: Problem, place: Any, optimizer: str, parts: list[str], calls: int, elsewhere: Place | None
) -> Composition:
    def start() -> Start:
        made = [PARTS[part].make() for part in parts]
        if isinstance(place, Place):
            step = fds.compose(*made, *place.transforms(), OPTIMIZERS[optimizer]())(problem.loss)
        else:
            step = problem.loss(place, *made, OPTIMIZERS[optimizer]())
        return Start(step, problem.params, batches(problem, place, step, calls, skips=bool(SKIPPING & {*parts})))

    then = None if elsewhere is None else composed("", problem, elsewhere, optimizer, parts, 1, None)
    return Composition(f"{name}, {place}{'' if elsewhere is None else f' then {elsewhere}'}", place.ranks, start, then)


def batches(problem: Problem, place: Any, step: fds.Step, calls: int, *, skips: bool) -> list[Any]:
    """Return this rank's part of the batch of every call, and of one to evaluate.

    The second is small, so that no clip changes its gradients, or weighs less, and nothing on the last rank; the third
    is to be skipped: it is not finite where something skips that, or weighs nothing.
    """
    index, count = step.dimensions.share_of_batch

    def changed(x: Any, call: int) -> Any:
        if not isinstance(x, Tensor) or not x.dim():
            return x
        x = x.roll(call, 0)
        if x.is_floating_point():
            return x * 1e-3 if call == 1 else x if call != 2 else x * torch.inf if skips else -x.abs()
        if (x < 0).any() and 0 < call < 3 and isinstance(place, Place):  # targets, of which these do not count
            x = x.masked_fill(torch.arange(x.shape[1]) >= x.shape[1] - call, -100)
            x[(len(x) - ROWS if count > 1 else len(x)) if call == 1 else 0 :] = -100
        return x

    every = (*range(calls), 0)
    if not isinstance(place, Place):
        return [tree.map(lambda x, c=c: changed(x, c), problem.batch(place, step, c)) for c in every]
    whole = batch_of(problem, ROWS * count)
    return [share(tree.map(lambda x, c=c: changed(x, c), whole), index, count) for c in every]
