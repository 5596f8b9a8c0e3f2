"""Eigenvalues of blocks beside those of DeepSpeed's own `Eigenvalue`."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import fds

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore:Using backward")]


def problem():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))))
        batch = torch.randn(12, 6), torch.randn(12, 6)
    loss_fn = lambda p, b: (functional_call(model, p, (b[0],)) - b[1]).square().mean()
    return model, loss_fn, batch


def theirs(model, loss, **options):
    """Return what DeepSpeed makes of a loss, by block."""
    from deepspeed.runtime.eigenvalue import Eigenvalue

    loss.backward(create_graph=True)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        found = Eigenvalue(layer_name="0", layer_num=3, **options).compute_eigenvalue(model)
    by_block = {i: value for value, i in found.values()}
    for p in model.parameters():
        p.grad = None  # and the graph that leads back to it
    return [by_block[i] for i in range(3)]


def ours(loss_fn, model, batch, **options):
    params = {n: p.detach() for n, p in model.named_parameters()}
    found = fds.curvature.top_eigenvalue(loss_fn, params, batch, blocks=[f"0.{i}.*" for i in range(3)], **options)
    return [one.normalized for one in found.values()], [one.value for one in found.values()]


def test_normalized_eigenvalues_of_blocks_are_deepspeeds():
    model, loss_fn, batch = problem()
    given = {"max_iter": 2000, "tol": 1e-6, "stability": 1e-6}
    want = theirs(model, loss_fn(dict(model.named_parameters()), batch), **given)
    found, _ = ours(loss_fn, model, batch, **given)
    assert found == pytest.approx(want, rel=1e-3) and max(want) == 1.0 and min(want) < 0.9


def test_what_is_linear_is_normalized_to_1_by_both():
    model, loss_fn, batch = problem()
    apart = lambda p, b: loss_fn(p, b) + 0 * p["0.0.0.weight"].pow(2).sum()
    first = ["0.0.0.weight", "0.0.0.bias"]
    frozen = lambda p, b: apart(p | {n: p[n].detach() for n in first}, b) + 0 * sum(p[n].pow(2).sum() for n in first)
    want = theirs(model, frozen(dict(model.named_parameters()), batch), max_iter=2000, tol=1e-6)
    found, values = ours(frozen, model, batch, max_iter=2000, tol=1e-6)
    assert found == pytest.approx(want, rel=1e-3) and found[0] == want[0] == 1.0 and values[0] == 0.0


def test_deepspeed_ends_after_one_product_that_happens_to_be_near_1():
    """It compares the first estimate with 1, so that a loss of another scale has other normalized values."""
    model, loss_fn, batch = problem()
    exact, _ = ours(loss_fn, model, batch, max_iter=2000, tol=1e-6)
    of = lambda scale: theirs(model, scale * loss_fn(dict(model.named_parameters()), batch), max_iter=2000, tol=0.3)
    apart = [max(abs(a - b) for a, b in zip(of(2.0**k), exact, strict=True)) for k in range(-4, 8)]
    assert max(apart) > 2 * min(apart)
    scaled = lambda scale: ours(lambda p, b: scale * loss_fn(p, b), model, batch, max_iter=2000, tol=0.3)[0]
    assert len({tuple(scaled(2.0**k)) for k in range(-4, 8)}) == 1
