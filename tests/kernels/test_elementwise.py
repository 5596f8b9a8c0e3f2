"""Each rule of the elementwise kernel by itself, beside torch.optim; the laws that all share are in test_flat.py."""

import pytest
import torch

from fds.kernels import only
from fds.kernels.elementwise import adamw, lion, sgd
from tests.kernels.accuracy import assert_near, random

NUM_STEPS, LONG, SHORT = 6, 1100, 431


@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("decoupled", "twin"), [(True, torch.optim.AdamW), (False, torch.optim.Adam)])
def test_several_updates_of_adam_are_those_of_torch(decoupled, twin, low):
    hyper = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1, "decoupled": decoupled}
    p, m, v, out = random(LONG), torch.zeros(LONG), torch.zeros(LONG), torch.empty(LONG, dtype=torch.float16)
    theirs = torch.nn.Parameter(p.double())
    optimizer = twin([theirs], lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for t in range(NUM_STEPS):
        g = (64 * random(LONG, seed=1 + t)).to(low)
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


def test_lion_moves_every_element_by_the_rate_or_not_at_all():
    p, g, m = torch.zeros(431), random(431), random(431, seed=1)
    g[:7], m[:7] = 0.0, 0.0
    want = -0.25 * torch.sign(0.5 * m + 0.5 * g)
    with only("triton"):
        lion(p, g, m, lr=torch.tensor(0.25), beta1=0.5, beta2=0.5, weight_decay=0.0)
    assert torch.equal(p, want) and (p[:7] == 0).all()


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
def test_several_updates_of_sgd_are_those_of_torch(hyper):
    p, b = random(SHORT), torch.zeros(SHORT) if "momentum" in hyper else None
    theirs = torch.nn.Parameter(p.double())
    optimizer = torch.optim.SGD([theirs], lr=0.1, **hyper)
    for t in range(NUM_STEPS):
        g = random(SHORT, seed=1 + t, dtype=torch.float16)
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
