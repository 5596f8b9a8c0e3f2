"""Arguments of transformers as an optimizer and rates, and those that are refused; no transformers is needed."""

import dataclasses
import math

import pytest
import torch

import fds
from fds.errors import ConfigError
from fds.trainer._arguments import check_arguments, optimizer_of, rates_of


@dataclasses.dataclass
class Arguments:
    """Some of the fields of `TrainingArguments`, with their defaults."""

    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    lr_scheduler_kwargs: dict | None = None
    warmup_steps: float = 0
    optim: str = "adamw_torch_fused"
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    bf16: bool = False
    fp16: bool = False
    torch_compile: bool = False
    fsdp: str | None = None
    neftune_noise_alpha: float | None = None
    n_gpu: int = 0

    def get_warmup_steps(self, updates):
        return int(self.warmup_steps)


def scheduler(arguments, factor):
    return torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD([torch.zeros(1)], arguments.learning_rate), factor)


def test_rates_are_those_of_their_scheduler_in_every_update_and_stay_at_the_last():
    arguments, factor = Arguments(0.1), lambda t: 1 / (t + 1)
    rates = rates_of(arguments, scheduler(arguments, factor), 5)
    at = lambda t: float(rates(torch.tensor(float(t), dtype=torch.float64)))
    assert [at(t) for t in range(-1, 8)] == [0.1 * factor(min(max(t, 0), 5)) for t in range(-1, 8)]
    assert repr(rates) == "transformers.linear(0.1, warmup_steps=0, total_steps=5)"


def test_a_scheduler_that_follows_a_metric_is_refused():
    arguments = Arguments(lr_scheduler_type="reduce_lr_on_plateau")
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    with pytest.raises(ConfigError, match=r"lr_scheduler_type[\s\S]*ReduceLROnPlateau"):
        rates_of(arguments, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), 5)


@pytest.mark.parametrize(
    ("optim", "theirs"),
    [
        ("adamw_torch", torch.optim.AdamW),
        ("adamw_torch_fused", torch.optim.AdamW),
        ("sgd", torch.optim.SGD),
        ("adagrad", torch.optim.Adagrad),
    ],
)
def test_groups_decay_as_theirs_do(optim, theirs):
    arguments = Arguments(0.05, optim=optim, weight_decay=0.3, adam_beta1=0.7, adam_epsilon=1e-3)
    start = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64), "bias": torch.tensor([0.5], dtype=torch.float64)}
    adam = {"betas": (0.7, 0.999), "eps": 1e-3} if theirs is torch.optim.AdamW else {}
    want = {name: x.clone().requires_grad_() for name, x in start.items()}
    groups = [{"params": [want["w"]], "weight_decay": 0.3}, {"params": [want["bias"]], "weight_decay": 0.0}]
    optimizer = theirs(groups, lr=0.05, **adam)
    loss = lambda params, batch: (params["w"] ** 2).sum() * batch.sum() + (params["bias"] ** 3).sum()
    step = fds.compose(optimizer_of(arguments, {"w": True, "bias": False}))(loss)
    state = step.init(start)
    for i in range(3):
        batch = torch.tensor([i + 1.0], dtype=torch.float64)
        state, metrics = step(state, batch)
        assert float(metrics["lr"]) == 0.05
        optimizer.zero_grad()
        loss(want, batch).backward()
        optimizer.step()
    torch.testing.assert_close(step.params(state), {name: x.detach() for name, x in want.items()})


def test_without_decay_there_is_one_group_and_no_function():
    assert repr(optimizer_of(Arguments(), {"w": True, "b": False})) == "adamw(lr=5e-05, weight_decay=0.0)"
    assert "weight_decay=0.3" in repr(optimizer_of(Arguments(weight_decay=0.3), {"w": True}))
    assert "weight_decay=0.0" in repr(optimizer_of(Arguments(weight_decay=0.3), {"b": False}))


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"fsdp": "full_shard"}, "args.fsdp"),
        ({"torch_compile": True}, "args.torch_compile"),
        ({"neftune_noise_alpha": 5.0}, "args.neftune_noise_alpha"),
        ({"n_gpu": 2}, "args.n_gpu"),
    ],
)
def test_what_is_not_followed_is_refused(changes, where):
    check_arguments(Arguments(), composed=False)
    with pytest.raises(ConfigError) as caught:
        check_arguments(Arguments(**changes), composed=False)
    assert caught.value.where == where and caught.value.want


@pytest.mark.parametrize("changes", [{"learning_rate": 0.1}, {"max_grad_norm": 0.5}, {"bf16": True}, {"optim": "sgd"}])
def test_what_a_composition_says_is_not_said_twice(changes):
    check_arguments(Arguments(**changes), composed=False)
    with pytest.raises(ConfigError, match="the step says this itself"):
        check_arguments(Arguments(**changes), composed=True)
    check_arguments(Arguments(), composed=True)


def test_an_optimizer_that_fds_has_not_is_refused():
    with pytest.raises(ConfigError, match=r"adafactor[\s\S]*adamw_torch"):
        optimizer_of(Arguments(optim="adafactor"), {})


def test_a_norm_is_measured_where_nothing_is_clipped():
    step = fds.compose(fds.clip_by_global_norm(math.inf), fds.sgd(0.1))(lambda params, batch: (params * batch).sum())
    state, metrics = step(step.init(torch.zeros(2)), torch.tensor([3.0, 4.0]))
    assert float(metrics["grad_norm"]) == 5.0 and step.params(state).tolist() == pytest.approx([-0.3, -0.4])
