"""Adam's kernel beside torch.optim; the laws that it shares with others are in test_flat.py."""

import pytest
import torch

from fds.kernels import only
from fds.kernels.optimizers.adam_update import adamw
from tests.kernels.accuracy import assert_near, random

NUM_STEPS, SIZE = 6, 1100


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("decoupled", "twin"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_several_updates_are_those_of_torch(decoupled, twin, low):
    hyper = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1, "decoupled": decoupled}
    p, m, v, out = random(SIZE), torch.zeros(SIZE), torch.zeros(SIZE), torch.empty(SIZE, dtype=torch.float16)
    theirs = torch.nn.Parameter(p.double())
    optimizer = twin([theirs], lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for t in range(NUM_STEPS):
        g = (64 * random(SIZE, seed=1 + t)).to(low)
        with only("triton"):
            adamw(
                p,
                g,
                m,
                v,
                step=torch.tensor(t),
                lr=torch.tensor(0.02, dtype=torch.float64),
                out=out,
                grad_scale=torch.tensor(64.0),
                skip=torch.tensor(False),
                **hyper,
            )
        theirs.grad = g.double() / 64
        optimizer.step()
    state = optimizer.state[theirs]
    for got, want in ((p, theirs), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
        assert_near(got, want)
    assert torch.equal(out, p.half())


def test_a_second_moment_never_falls_below_zero():
    v = torch.tensor([0.0, 1e-38, 1.2e-38, 3e-38, 1e-30, 1.0])
    keywords = {"beta1": 0.9, "eps": 1e-8, "weight_decay": 0.0, "step": torch.tensor(0), "lr": torch.tensor(0.1)}
    for beta2 in (0.0, 1e-9, 0.5, 0.999):
        p, m, mine = torch.zeros(6), torch.zeros(6), v.clone()
        with only("triton"):
            adamw(p, torch.zeros(6), m, mine, beta2=beta2, **keywords)
        assert (mine >= 0).all() and (p == 0).all()
