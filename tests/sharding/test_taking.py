"""When buckets take gradients: at once when their last one has come, in whichever order a loss uses parameters."""

import pytest
import torch

import fds
from fds.step.sharding.buckets import Bucketed
from tests.memory import peak_bytes
from tests.sharding.models import data_axis

LAYERS, WIDTH, CALLS = 8, 64, 3
PARAMS = {f"{i}": torch.full((WIDTH, WIDTH), 0.01 * (i + 1)) for i in range(LAYERS)}
BUCKET = 2 * 4 * WIDTH**2  # bytes of two parameters
ORDERS = {"forward": range(LAYERS), "backward": range(LAYERS)[::-1], "mixed": [3, 0, 6, 7, 1, 4, 2, 5]}


def using(order):
    def loss(params, batch):
        for i in order:
            batch = torch.tanh(batch @ params[f"{i}"])
        return batch.square().mean()

    return loss


def trained(loss, *parts):
    step = fds.compose(*parts, fds.accumulate(2), fds.adamw(1e-2))(loss)
    state = step.init(PARAMS)
    for i in range(CALLS):
        state, _ = step(state, torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH) * (i + 1))
    return step.params(state)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stage", range(4))
def test_every_bucket_is_sent_before_backward_ends(stage, order, monkeypatch):
    inside, launch = [], Bucketed._launch
    monkeypatch.setattr(Bucketed, "_launch", lambda self, i: (inside.append(self.adding), launch(self, i))[1])

    def run():
        return trained(using(ORDERS[order]), fds.shard_optimizer(data_axis(), stage=stage, bucket_bytes=BUCKET))

    fds.simulate(run, 2)
    learned = 0 if stage < 2 else len(inside) // CALLS  # at stages 2 and 3 the first call learns which gradients come
    assert inside and all(inside[learned:])


@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_beside_an_unused_parameter_do_not_pile_up(stage):
    def peak(unused):
        def run():
            axis = data_axis()
            sharding = fds.shard_optimizer(axis, stage=stage, bucket_bytes=BUCKET)
            step = fds.compose(sharding, fds.donate(), fds.accumulate(4), fds.adamw(1e-2))(
                using([i for i in range(LAYERS) if i not in unused])
            )
            state = step.init(PARAMS)
            work = lambda: step(state, torch.ones(4, WIDTH))
            return peak_bytes(work) if axis.index == 0 else work() and None

        return fds.simulate(run, 2)[0]

    # the threads of two ranks meet by chance: one call in a hundred holds a bucket less at its peak
    assert peak([3, 5, 7]) <= max(peak([]) for _ in range(3)) + BUCKET // 2
