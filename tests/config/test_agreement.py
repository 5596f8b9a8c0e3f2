"""Ranks that train together have one configuration, or all are told in which keys theirs differ."""

import pytest
from torch import nn

import fds
from fds.errors import ConfigError, FdsError

BASE = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}


def told(*configs: dict, keys: tuple[int, ...] = (0, 0)) -> list:
    """Initialize on two ranks, each with its own; return what each is refused with."""

    def body():
        rank = fds.mesh(dp=2)["dp"].index
        try:
            fds.initialize(
                nn.Linear(2, 1), lambda model, batch: model(batch).sum(), config=configs[rank], key=keys[rank]
            )
        except FdsError as error:
            return type(error), error.where, error.got
        return None

    return fds.simulate(body, 2)


@pytest.mark.parametrize(
    ("other", "where"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.2}}}, "optimizer.params.lr"),
        ({"gradient_clipping": 0.0}, "gradient_clipping"),
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage"),
        ({"train_batch_size": 16}, "train_batch_size, train_micro_batch_size_per_gpu"),
        ({"bf16": {"enabled": True}}, "bf16.enabled"),
    ],
)
def test_other_keys_are_named_on_every_rank(other, where):
    found = told(BASE, {**BASE, **other})
    assert [(kind, path) for kind, path, _ in found] == [(ConfigError, where)] * 2
    assert found[0][2].endswith("on rank 1") and found[1][2].endswith("on rank 0")


def test_another_key_of_random_numbers_is_another_run():
    assert [path for _, path, _ in told(BASE, BASE, keys=(0, 1))] == ["key", "key"]


def test_what_one_rank_cannot_read_all_are_told():
    found = told(BASE, {**BASE, "graidient_clipping": 1.0})
    assert [(kind, path) for kind, path, _ in found] == [(ConfigError, "graidient_clipping")] * 2


def test_ranks_that_agree_begin():
    assert told(BASE, dict(BASE)) == [None, None]
