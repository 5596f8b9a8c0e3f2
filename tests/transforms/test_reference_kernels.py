"""References only: everywhere inside a step, nowhere outside, and on the CPU the same bits."""

import threading

import attrs
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import fds
from fds.errors import FdsError
from fds.kernels import chosen, only, swiglu
from fds.kernels.language import is_there
from fds.transforms.reference_kernels import reference_kernels
from tests.bits import assert_same_bits
from tests.laws.problems import compositions, make, optimizers, problems

GPU = torch.device("cuda")


class Listening(torch.autograd.Function):
    """The identity, which writes down what is chosen when it runs, also in a thread of its own."""

    @staticmethod
    def forward(ctx, x, heard):
        ctx.heard = heard
        ctx.save_for_backward(x)  # so that a checkpointed layer computes it again
        heard.append(("forward", chosen(GPU)))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        thread = threading.Thread(target=lambda: ctx.heard.append(("backward", chosen(GPU))))
        thread.start()
        thread.join()
        return grad.clone(), None


def listening(heard: list, *transforms, optimizer=None):
    """Return a step whose loss and optimizer write down what is chosen when they run."""
    plain = fds.sgd(0.1) if optimizer is None else optimizer

    def update(*args, **kwargs):
        heard.append(("optimizer", chosen(GPU)))
        return plain.update(*args, **kwargs)

    def init(*args, **kwargs):
        heard.append(("first state", chosen(GPU)))
        return plain.init(*args, **kwargs)

    layers = fds.Layers([nn.Linear(3, 3), lambda x: Listening.apply(x, heard), nn.Linear(3, 2)], nn.MSELoss())
    return fds.compose(*transforms, attrs.evolve(plain, update=update, init=init))(layers)


def batch(rows: int = 4):
    return torch.ones(rows, 3), torch.ones(rows, 2)


@given(problems(), optimizers(), compositions(without=("references",)))
def test_on_the_cpu_references_are_the_identity(problem, optimizer, names):
    plain, referring = make(names, optimizer, problem), make(names, optimizer, problem, reference_kernels())
    a, b = plain.init(problem.params, key=5), referring.init(problem.params, key=5)
    for _ in range(2):
        (a, metrics_a), (b, metrics_b) = plain(a, problem.batch), referring(b, problem.batch)
        assert_same_bits((b, metrics_b), (a, metrics_a))
    assert_same_bits(referring.evaluate(b, problem.batch), plain.evaluate(a, problem.batch))


@given(st.integers(0, 2**16), st.sampled_from([fds.sgd(0.1), fds.adamw(0.1)]))
def test_references_run_where_kernels_were_asked_for_outside(seed, optimizer):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    loss = lambda params, batch: swiglu(batch @ params["a"], batch @ params["b"]).square().mean()
    plain, referring = fds.compose(optimizer)(loss), fds.compose(reference_kernels(), optimizer)(loss)
    state = plain.init({"a": torch.eye(6), "b": torch.ones(6, 6)})
    want = plain(state, x)
    with only("triton"):
        assert_same_bits(referring(state, x), want)


def test_forward_recomputation_backward_and_optimizer_run_references():
    heard: list = []
    step = listening(heard, fds.checkpoint_activations(), fds.accumulate(2), reference_kernels())
    state = step.init(step.loss.init)
    step(state, batch())
    a_microbatch = ["forward", "forward", "backward"]  # the second one is the recomputation
    called = [what for what, _ in heard if what != "first state"]
    assert called == [*a_microbatch, *a_microbatch, "optimizer"] and len(called) < len(heard)
    assert {kind for _, kind in heard} == {"reference"}


def test_without_the_transform_a_gpu_takes_kernels():
    heard: list = []
    step = listening(heard)
    step(step.init(step.loss.init), batch())
    assert {kind for _, kind in heard} == {outside()}


def test_evaluating_describing_and_tracing_run_references():
    heard: list = []
    step = listening(heard, reference_kernels())
    step.structure(step.loss.init)
    state = step.init(step.loss.init)
    evaluate = step.evaluator(state)
    held_out = lambda: step.evaluate(state, batch())
    for call in (lambda: evaluate(batch()), held_out, lambda: step.describe(state, batch())):
        before = len(heard)
        call()
        assert len(heard) > before
    assert {kind for _, kind in heard} == {"reference"}


def test_a_pipeline_runs_references():
    heard: list = []
    step = listening(heard, fds.pipeline(fds.plans.zb_h1, 2, num_microbatches=2), reference_kernels())
    state, _ = step(step.init(step.loss.init), batch())
    step.evaluate(state, batch())
    assert len(heard) > 6 and {kind for _, kind in heard} == {"reference"}


def test_ranks_that_share_a_step_run_references():
    def train():
        heard: list = []
        step = listening(heard, fds.shard_optimizer(fds.mesh(dp=2)["dp"], stage=3), reference_kernels())
        state = step.init(step.loss.init)
        for _ in range(2):
            state, _ = step(state, batch())
        return heard

    assert {kind for heard in fds.simulate(train, 2) for _, kind in heard} == {"reference"}
    assert chosen(GPU) == outside()


@pytest.mark.parametrize("where", ["the loss", "the batch", "the state", "evaluation", "the first state", "describe"])
def test_nothing_leaks_after_an_error(where):
    def loss(params, batch):
        if where in ("the loss", "evaluation", "describe"):
            raise ZeroDivisionError
        return (params["w"] * batch).sum()

    step = fds.compose(reference_kernels(), fds.sgd(0.1))(loss)
    state = step.init({"w": torch.ones(2)})
    call = {
        "the loss": lambda: step(state, torch.ones(2)),
        "the batch": lambda: step(state, "no tensors"),
        "the state": lambda: step(None, torch.ones(2)),
        "evaluation": lambda: step.evaluate(state, torch.ones(2)),
        "the first state": lambda: step.init({"w": torch.full((2,), float("nan"))}),
        "describe": lambda: step.describe(state, torch.ones(2)),
    }[where]
    with pytest.raises((ZeroDivisionError, FdsError, TypeError)):
        call()
    assert chosen(GPU) == outside()


def test_inside_the_loss_another_choice_still_holds():
    def loss(params, batch):
        with only("triton"):
            return swiglu(params["w"], batch).sum()

    step = fds.compose(reference_kernels(), fds.sgd(0.1))(loss)
    state = step.init({"w": torch.ones(2)})
    new, _ = step(state, torch.ones(2))
    assert new.params["w"][0] < 1


def test_it_says_what_it_is():
    step = fds.compose(reference_kernels(), fds.adamw())(lambda params, batch: params.sum())
    assert repr(step.composition[0]) == "reference_kernels()"
    assert step.describe().stations["kernels"] == "references only"


def outside() -> str:
    """Return what CUDA tensors take where nobody chose."""
    return "triton" if is_there else "reference"
