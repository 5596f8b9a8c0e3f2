"""Transforms of `torch.func` in a loss of several ranks are those in the loss of one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, hessian, jacrev, jvp, vmap

import fds
from fds.errors import LossError
from tests import ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # by torch.func.jvp of torch itself

PLAN = {"first": fds.nn.column(gather=True), "up": "column", "down": "row"}
X = torch.randn(3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.first(x))))


LOSSES = {
    "vmap": lambda run, x: vmap(run, in_dims=1, out_dims=1)(x).square().mean(),
    "jacrev": lambda run, x: jacrev(lambda row: run(row).sum(0))(x[0]).square().mean(),
    "grad": lambda run, x: vmap(grad(lambda row: run(row).square().sum()))(x).square().mean(),
    "jacrev twice": lambda run, x: jacrev(jacrev(lambda row: run(row).square().sum()))(x[0, 0]).square().mean(),
}
FORWARD = {
    "jvp": lambda run, x: jvp(run, (x,), (x.sin(),))[1].square().mean(),
    "hessian": lambda run, x: hessian(lambda row: run(row).square().sum())(x[0, 0]).square().mean(),
}


def trained(name, size, overlap=0):
    torch.manual_seed(0)
    apply, params, _ = fds.functional(Model().double())
    loss_fn = lambda params, x: (LOSSES | FORWARD)[name](lambda one: apply(params, one), x)
    parts = [fds.tensor_parallel(fds.mesh(tp=size)["tp"], PLAN, overlap=overlap)] if size > 1 else []
    step = fds.compose(*parts, fds.sgd(0.1))(loss_fn)
    state = step.init(params, key=1)
    for _ in range(2):
        state, metrics = step(state, X)
    return {"loss": metrics["loss"], **step.params(state)}


def check(found, name):
    want = trained(name, 1)
    assert all(torch.allclose(x, want[key], rtol=1e-12, atol=1e-13) for key, x in found.items())


@pytest.mark.sweep
@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("name", LOSSES)
def test_reverse_derivatives_and_batches_are_those_of_one_rank(name, overlap):
    for found in fds.simulate(lambda: trained(name, 2, overlap), 2):
        check(found, name)


def test_forward_derivatives_on_processes_are_those_of_one_rank():
    for name in FORWARD:
        for found in ranks.run(trained, name, 2, world_size=2):
            check(found, name)


def test_forward_derivatives_on_simulated_ranks_are_refused():
    with pytest.raises(LossError, match="jvp does not run on simulated ranks"):
        fds.simulate(lambda: trained("jvp", 2), 2)


def test_a_loss_of_pieces_has_no_batches():
    def job():
        axis = fds.mesh(tp=2)["tp"]
        targets = torch.zeros(3, dtype=torch.int64)
        take = lambda logits: fds.nn.vocab_cross_entropy(logits, targets, axis, num_classes=8)
        with pytest.raises(LossError, match=r"torch\.func\.vmap does not go through.*(?s:.*)VocabCrossEntropy"):
            vmap(take)(torch.ones(2, 3, 4))

    fds.simulate(job, 2)
