"""Lion's kernel by itself; the laws that it shares with others are in test_flat.py."""

import torch

from fds.kernels import only
from fds.kernels.optimizers.lion_update import lion
from tests.kernels.accuracy import random


def test_every_element_moves_by_the_rate_or_not_at_all():
    p, g, m = torch.zeros(431), random(431), random(431, seed=1)
    g[:7], m[:7] = 0.0, 0.0
    want = -0.25 * torch.sign(0.5 * m + 0.5 * g)
    with only("triton"):
        lion(p, g, m, lr=torch.tensor(0.25), beta1=0.5, beta2=0.5, weight_decay=0.0)
    assert torch.equal(p, want) and (p[:7] == 0).all()
