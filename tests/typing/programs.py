"""What an editor says of fds: programs like those of the README, which pyright checks by its strict rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_type

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fds
from fds import plans
from fds.step import Call, Gradients, fill, transform

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


def batch(i: int, rows: int = 64) -> Batch:
    points = torch.rand(rows, 2, generator=torch.Generator().manual_seed(i)) * 2 - 1
    return points, (points.square().sum(1) < 0.64).float()


def one_device(run: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    apply, params, buffers = fds.functional(module)
    assert_type(params, dict[str, Tensor])
    assert_type(buffers, dict[str, Tensor])

    def loss_fn(params: Params, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        points, inside = batch
        logits = apply(params, points).squeeze(1)
        right = ((logits > 0) == inside.bool()).float().mean()
        return F.binary_cross_entropy_with_logits(logits, inside), {"accuracy": right}

    recipe = fds.compose(
        fds.accumulate(4),
        fds.clip_by_global_norm(1.0),
        fds.adamw(lr=fds.schedules.warmup_cosine(0.05, warmup_steps=10, total_steps=100)),
    )
    step = recipe(loss_fn)
    assert_type(step, fds.Step)
    state = step.init(params, key=0)
    assert_type(state, fds.State)
    for i in range(100):
        assert_type(step(state, batch(i)), tuple[fds.State, dict[str, Tensor]])
        state, metrics = step(state, batch(i))
        print(metrics["loss"].item(), int(state.step))
    assert_type(step.evaluate(state, batch(1000), outputs=True), dict[str, Tensor])
    assert_type(fds.evaluate(step, state, map(batch, range(3))), dict[str, Tensor])
    print(step.describe(state), fds.tree.paths(state).keys(), step.params(state))

    assert_type(fds.save(run, state, step, extra={"next_batch": 101}), Path)
    with fds.save_async(run, state, step, keep=3) as saving:
        state, _ = step(state, batch(101))
    print(saving)
    loaded, extra = fds.load(run, step, params)
    assert_type(loaded, fds.State)
    assert extra == {"next_batch": 101}
    clones = fds.tree.map(lambda x: x.clone(), state)
    sums = fds.tree.map(lambda x, y: x + y, state, clones)
    assert all(isinstance(x, Tensor) for x in fds.tree.leaves(sums))


def errors(step: fds.Step, state: fds.State) -> None:
    try:
        step(state, batch(0, rows=63))
    except fds.FdsError as error:
        for text in (error.what, error.where, error.got, error.want, error.hint):
            assert_type(text, str)


def weighted(apply: Callable[..., Tensor]) -> Callable[[Params, Batch], fds.Mean]:
    def loss_fn(params: Params, batch: Batch) -> fds.Mean:
        points, inside = batch
        losses = F.binary_cross_entropy_with_logits(apply(params, points).squeeze(1), inside, reduction="none")
        return fds.Mean(losses.sum(), inside.sum())

    return loss_fn


def many_ranks(loss_fn: Callable[[Params, Batch], fds.Mean], params: Params) -> list[Params]:
    def train() -> Params:
        dp = fds.mesh(dp=-1)["dp"]
        step = fds.compose(fds.accumulate(4), fds.shard_optimizer(dp, stage=2), fds.adamw(lr=0.05))(loss_fn)
        state = step.init(params)
        points, inside = (x.chunk(dp.size)[dp.index] for x in batch(0))
        state, _ = step(state, (points, inside))
        return step.params(state)

    fds.init_distributed()
    results = fds.simulate(train, 2)
    assert_type(results, list[Params])
    return results


def in_stages() -> fds.Step:
    def criterion(logits: Tensor, inside: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits.squeeze(1), inside)

    layers = fds.Layers([fds.LayerSpec(nn.Linear, 2, 64), nn.Tanh(), fds.LayerSpec(nn.Linear, 64, 1)], criterion)
    plan = plans.zb_h1(2, 4)
    assert_type(plan, plans.Plan)
    print(plans.draw_text(plans.simulate(plan), color=False))
    return fds.compose(fds.pipeline(plans.zb_h1, fds.mesh(pp=2)["pp"], num_microbatches=4), fds.adamw())(layers)


@attrs.frozen
class Noise:
    """A gradient map of a user's own."""

    scale: float

    def __call__(self, gradients: Gradients, call: Call) -> Gradients:
        leaves = [x.add_(torch.randn_like(x), alpha=self.scale) for x in gradients.leaves]
        return attrs.evolve(gradients, leaves=leaves)


@transform
def noise(scale: float) -> Callable[[fds.Step], fds.Step]:
    return lambda step: fill(step, condition=Noise(scale))


def own_transform(loss_fn: Callable[[Params, Batch], Any]) -> fds.Step:
    assert_type(noise(0.1), fds.Transform)
    nested = fds.compose(noise(scale=0.1), fds.compose(fds.ema(0.99), fds.adamw()))
    return fds.compose(nested, fds.donate())(loss_fn)


def gradients(f: Callable[[Params], Tensor], params: Params) -> Any:
    value, grads = fds.autodiff.value_and_grad(f)(params)
    return value, grads
