"""The kernel of stochastic gradient descent beside torch.optim; the laws that it shares are in test_flat.py."""

import pytest
import torch

from fds.kernels import only
from fds.kernels.optimizers.sgd_update import sgd
from tests.kernels.accuracy import assert_near, random

NUM_STEPS, SIZE = 6, 431


@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
    ],
)
def test_several_updates_are_those_of_torch(hyper):
    p, b = random(SIZE), torch.zeros(SIZE) if "momentum" in hyper else None
    theirs = torch.nn.Parameter(p.double())
    optimizer = torch.optim.SGD([theirs], lr=0.1, **hyper)
    for t in range(NUM_STEPS):
        g = random(SIZE, seed=1 + t, dtype=torch.float16)
        with only("triton"):
            sgd(p, g, b, step=torch.tensor(t), lr=torch.tensor(0.1), **hyper)
        theirs.grad = g.double()
        optimizer.step()
    assert_near(p, theirs)
    if b is not None:
        assert_near(b, optimizer.state[theirs]["momentum_buffer"])


def test_a_momentum_of_zero_forgets_all():
    p, g, b = random(42), random(42, seed=1), 1e6 * random(42, seed=2)
    with only("triton"):
        sgd(p, g, b, step=torch.tensor(3), lr=torch.tensor(0.1), momentum=0.0)
    assert torch.equal(b, g)
