"""`sparse_gradients` of a JSON: the rows of a module's embeddings, as composing by hand sends them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fds
from fds import transports
from fds.config import TrainingConfig
from fds.errors import ComposeError, ConfigError
from tests.bits import assert_same_bits

IDS = torch.arange(16).view(8, 2) * 5 % 64
NAMES = ("left[0].weight", "right.weight")


def said(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "sparse_gradients": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage},
        **more,
    }


class Model(nn.Module):
    """Two embeddings, one with a name like a pattern, one of sums; a frozen one, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.add_module("left[0]", nn.Embedding(64, 8))
        self.right = nn.EmbeddingBag(64, 8, mode="sum")
        self.frozen = nn.Embedding(64, 8).requires_grad_(False)
        self.embed_to = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        left = self._modules["left[0]"]
        assert left is not None
        return self.embed_to(left(ids).mean(1) + self.right(ids) * self.frozen(ids).mean(1)).square().mean()


def two_steps(step: Any, state: Any) -> tuple[Any, ...]:
    data = step.shard.data
    for _ in range(2):
        with fds.collectives.counted() as traffic:
            state, metrics = step(state, IDS.chunk(data.size)[data.index])
    return state, metrics, dict(traffic.counts), step.describe(state).sent


def by_json(data: dict[str, Any]) -> list[tuple[Any, ...]]:
    return fds.simulate(lambda: two_steps(*fds.initialize(Model(), config=data)[:2]), 2)


def by_hand(stage: int, *transforms: Any, gradients: Any = None) -> list[tuple[Any, ...]]:
    def run() -> tuple[Any, ...]:
        data = fds.mesh(dp=-1)["dp"]
        apply, params, _ = fds.functional(Model())
        step = fds.compose(
            fds.freeze("frozen.weight"),
            fds.shard_optimizer(data, stage=stage, gradients=gradients),
            *transforms,
            fds.clip_by_global_norm(1.0),
            fds.adamw(0.05, weight_decay=0.0),
        )(apply)
        return two_steps(step, step.init(params, key=0))

    return fds.simulate(run, 2)


def assert_same_runs(got: list[tuple[Any, ...]], want: list[tuple[Any, ...]]) -> None:
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one[:2], other[:2])
        assert one[2:] == other[2:]


ROWS = {"left[[]0].weight": transports.rows(), "right.weight": transports.rows()}


@pytest.mark.parametrize("stage", [0, 1])
def test_embeddings_of_the_module_travel_by_rows_as_composed_by_hand(stage):
    got, plain = by_json(said(stage)), by_json(said(stage, sparse_gradients=False))
    assert_same_runs(got, by_hand(stage, gradients=ROWS))
    sent = [sum(count.bytes_sent for count in run[0][2].values()) for run in (got, plain)]
    assert sent[0] < sent[1]


@pytest.mark.parametrize("stage", [2, 3])
def test_where_slices_are_reduced_the_key_changes_nothing_as_in_deepspeed(stage):
    quantized = {"zero_optimization": {"stage": stage, "zero_quantized_gradients": True}}
    for more in ({}, quantized):
        with_key, without = (TrainingConfig.of({**said(stage), **more, "sparse_gradients": on}) for on in (True, False))
        mesh = fds.mesh(dp=1)
        assert str(with_key.transforms(mesh)) == str(without.transforms(mesh))
    told = TrainingConfig.of(said(stage)).explain({"dp": 2})
    assert "#   sparse_gradients = true" in told.partition("given, without effect here")[2]


def test_rows_are_sent_in_the_dtype_of_messages():
    data = said(1, bf16={"enabled": True}, communication_data_type="fp32")
    precision = fds.precision(torch.bfloat16, reduce=torch.float32, accumulate=torch.bfloat16)
    assert_same_runs(by_json(data), by_hand(1, precision, fds.skip_nonfinite(), gradients=ROWS))


def test_a_configuration_alone_takes_the_module_and_says_so():
    config, mesh = TrainingConfig.of(said(1)), fds.mesh(dp=1)
    with pytest.raises(ConfigError, match=r"transforms\(mesh, model=module\)") as e:
        config.transforms(mesh)
    assert e.value.where == "sparse_gradients"
    with pytest.raises(ConfigError, match="of Layers"):
        fds.initialize(fds.Layers([nn.Linear(2, 1)], lambda out, batch: out.mean()), config=said(1))
    with pytest.raises(ComposeError, match="not a module"):
        config.transforms(mesh, model=Model)  # pyright: ignore[reportArgumentType]
    assert "'left[[]0].weight': rows()" in str(config.transforms(mesh, model=Model())[0])
    assert "gradients" not in str(config.transforms(mesh, model=nn.Linear(2, 1))[0])


def test_a_weight_that_is_tied_goes_by_its_first_name():
    model = nn.Sequential(nn.Linear(8, 64, bias=False), nn.Embedding(64, 8))
    model[1].weight = model[0].weight
    assert "'0.weight': rows()" in str(TrainingConfig.of(said(0)).transforms(fds.mesh(dp=1), model=model)[0])


def test_explained_without_a_module_it_is_a_pattern_to_be_replaced():
    told = TrainingConfig.of(said(1)).explain({"dp": 2})
    assert "gradients={'*embed*': fds.transports.rows()}" in told and "# '*embed*' is for the names of" in told


def test_a_row_that_adds_up_to_0_is_sent():
    """The gradient of row 3 is [1, -1] on rank 1 alone: SGD takes a half of it."""

    def run() -> Tensor:
        model = nn.Embedding(8, 2)
        with torch.no_grad():
            model.weight.zero_()
        loss = lambda model, ids: (model(ids) * torch.tensor([1.0, -1.0])).sum(-1).mean()
        sgd = {"type": "SGD", "params": {"lr": 1.0}}
        data = said(0, train_batch_size=2, optimizer=sgd, gradient_clipping=0.0)
        step, state, _, _ = fds.initialize(model, loss, config=data)
        state, _ = step(state, torch.tensor([2 + fds.mesh(dp=-1)["dp"].index]))
        return step.params(state)["weight"][2:4].clone()

    for found in fds.simulate(run, 2):
        assert found.tolist() == [[-0.5, 0.5], [-0.5, 0.5]]


def test_the_warm_up_of_1_bit_adam_sends_rows_and_its_later_calls_none():
    adam = {"type": "OneBitAdam", "params": {"lr": 0.05, "freeze_step": 2}}
    data = {key: value for key, value in said(0, optimizer=adam).items() if key != "gradient_clipping"}
    assert_same_bits(by_json(data)[0][:2], by_json({**data, "sparse_gradients": False})[0][:2])
