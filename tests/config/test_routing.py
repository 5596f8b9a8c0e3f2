"""Layers that compute some of the tokens, or are skipped, as a JSON says: the composition by hand."""

import math

import pytest
import torch
from torch import nn

import fds
from fds.config import TrainingConfig
from fds.errors import ConfigError
from tests.bits import assert_same_bits

KEPT = {"min_value": 2, "max_value": 6, "schedule_type": "fixed_linear"}
KEPT["schedule_config"] = {"require_steps": 4, "seq_per_step": 1}
LTD = {
    "enabled": True,
    "total_layer_num": 12,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [1, 2],
    "model_mask_name": "attention_mask",
    "model_type": "decoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": KEPT,
}
BASE = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
SCHEDULER = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 4}}}
SCHEDULER["scheduler"]["params"]["warmup_max_lr"] = 0.01
ran: list[str] = []


def random_ltd(**changes):
    return BASE | {"data_efficiency": {"data_routing": {"random_ltd": LTD | changes}}}


class Block(nn.Linear):
    def forward(self, x):
        ran.append(f"{self.number}: {x.shape[1]}")
        return x + super().forward(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4))
        self.h = nn.ModuleList([Block(4, 4) for _ in range(12)])
        for number, block in enumerate(self.h):
            block.number = number

    def forward(self, x):
        x = self.embed(x)
        for block in self.h:
            x = block(x)
        return x


def square(model, batch):
    return model(batch).square().mean()


def rows():
    return torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(1))


def train(config, calls=3):
    step, state, _, _ = fds.initialize(Model(), square, config=config)
    metrics = []
    for _ in range(calls):
        ran.clear()
        state, more = step(state, rows())
        metrics.append(more)
    return step, state, metrics


def by_hand(transform, calls):
    """Return the parameters after some calls of a composition by hand, its optimizer that of the JSON."""
    apply, params, _ = fds.functional(Model())
    plain = TrainingConfig.of(BASE).transforms(fds.mesh(dp=1))
    step = fds.compose(transform, *plain)(lambda params, batch: apply(params, batch).square().mean())
    state = step.init(params)
    for _ in range(calls):
        state, _ = step(state, rows())
    return step.params(state)


def test_a_number_of_a_layer_is_not_a_part_of_another():
    _, state, _ = train(random_ltd(), calls=1)
    assert ran[-12:] == [f"{i}: {2 if i in (1, 2) else 6}" for i in range(12)]  # not 10 and 11
    assert int(state.slots["random_ltd"]["kept"]) == 4 * 2 * 2


def test_a_json_keeps_the_tokens_of_the_composition_by_hand():
    config = random_ltd(hidden_state_order="batch_seq_dim")
    text = TrainingConfig.of(config).explain({"dp": 1})
    assert "fds.random_ltd((1, 2), fds.schedules.fixed_linear(2, 6, 4))," in text
    before = TrainingConfig.of(random_ltd(hidden_state_order="seq_batch_dim")).explain({"dp": 1})
    assert "fds.random_ltd((1, 2), fds.schedules.fixed_linear(2, 6, 4), order='seq_batch')," in before
    step, state, _ = train(config)
    assert_same_bits(step.params(state), by_hand(fds.random_ltd([1, 2], lambda t: 2 + t), 3))


def test_kept_tokens_never_fall_below_the_least():
    schedule = KEPT | {"min_value": 2, "max_value": 8, "schedule_config": {"require_steps": 8, "seq_per_step": 4}}
    text = TrainingConfig.of(random_ltd(random_ltd_schedule=schedule)).explain({"dp": 1})
    assert "fixed_linear(2, 8, 8, difficulty_step=4)" in text
    assert fds.schedules.fixed_linear(2, 8, 8, difficulty_step=4)(0) == 4  # 0.19.6: 0


def test_a_scheduler_may_follow_the_tokens_of_layers():
    follows = random_ltd(layer_token_lr_schedule={"enabled": True, "total_layer_tokens": 1000}) | SCHEDULER
    _, _, metrics = train(follows, calls=6)
    plain = TrainingConfig.of(random_ltd() | SCHEDULER).schedule().positional[0]  # without the delay of an update
    for t, more in enumerate(metrics[1:]):
        dropped = sum(max(6 - (2 + s), 0) for s in range(t))
        assert math.isclose(
            more["lr"], plain(torch.tensor(t - 2 / 12 * dropped / 6, dtype=torch.float64)), rel_tol=1e-12
        )
    with pytest.raises(ConfigError, match="nothing is there that could follow"):
        train(random_ltd(layer_token_lr_schedule={"enabled": True}))
    with pytest.raises(ConfigError, match="without the keys that it needs") as e:
        train(random_ltd(layer_token_lr_schedule={"enabled": True}, total_layer_num=None) | SCHEDULER)
    assert "total_layer_num" in e.value.where


def test_layers_are_skipped_by_their_own_probability():
    config = BASE | {"progressive_layer_drop": {"enabled": True, "theta": 0.2, "gamma": 5.0}}
    assert "fds.layer_drop(theta=0.2, gamma=5.0)," in TrainingConfig.of(config).explain({"dp": 1})
    train(config, calls=4)
    kept = [int(line.partition(":")[0]) for line in ran]
    assert 0 < len(set(kept)) < 12  # of 12 layers, the last of which is likely to be skipped
    step, state, _ = train(config, calls=4)
    assert_same_bits(step.params(state), by_hand(fds.layer_drop(0.2, 5.0), 4))
