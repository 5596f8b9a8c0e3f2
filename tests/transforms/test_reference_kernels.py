"""References only, or kernels: everywhere inside a step, nowhere outside, and on the CPU the same bits."""

import threading

import attrs
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import fds
from fds.errors import FdsError, KernelError
from fds.kernels import choice, chosen, language, only, prefer_triton, swiglu
from fds.kernels.choice import runs_triton
from fds.kernels.language import is_there
from fds.transforms.kernels import reference_kernels, triton_kernels
from tests.bits import assert_same_bits
from tests.laws.problems import compositions, make, optimizers, problems

GPU = torch.device("cuda")
EITHER = pytest.mark.parametrize("own", [reference_kernels, triton_kernels], ids=lambda own: own.__name__)


def against(own):
    """Return a scope of what the transform does not choose, and what runs in its step nevertheless."""
    if own is reference_kernels:
        return prefer_triton(), {"reference"}
    return only("reference"), {"triton" if is_there else "reference"}


class Listening(torch.autograd.Function):
    """The identity, which writes down what is chosen when it runs, also in a thread of its own."""

    @staticmethod
    def forward(ctx, x, heard):
        ctx.heard = heard
        ctx.save_for_backward(x)  # so that a checkpointed layer computes it again
        heard.append(("forward", chosen("swiglu", GPU)))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        thread = threading.Thread(target=lambda: ctx.heard.append(("backward", chosen("swiglu", GPU))))
        thread.start()
        thread.join()
        return grad.clone(), None


def listening(heard: list, *transforms, optimizer=None):
    """Return a step whose loss and optimizer write down what is chosen when they run."""
    plain = fds.sgd(0.1) if optimizer is None else optimizer

    def update(*args, **kwargs):
        heard.append(("optimizer", chosen("swiglu", GPU)))
        return plain.update(*args, **kwargs)

    def init(*args, **kwargs):
        heard.append(("first state", chosen("swiglu", GPU)))
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
    for scope in (only("triton"), prefer_triton()):
        with scope:
            assert_same_bits(referring(state, x), want)


@EITHER
def test_the_choice_holds_in_forward_recomputation_backward_and_optimizer(own):
    heard: list = []
    outside, runs = against(own)
    with outside:
        step = listening(heard, fds.checkpoint_activations(), fds.accumulate(2), own())
        state = step.init(step.loss.init)
        step(state, batch())
    a_microbatch = ["forward", "forward", "backward"]  # the second one is the recomputation
    called = [what for what, _ in heard if what != "first state"]
    assert called == [*a_microbatch, *a_microbatch, "optimizer"] and len(called) < len(heard)
    assert {kind for _, kind in heard} == runs


def test_without_the_transform_what_was_chosen_outside_runs():
    for scope, runs in map(against, (reference_kernels, triton_kernels)):
        heard: list = []
        step = listening(heard)
        with scope:
            step(step.init(step.loss.init), batch())
        assert {kind for _, kind in heard} == {"triton" if runs == {"reference"} and is_there else "reference"}


@EITHER
def test_the_choice_holds_in_evaluating_describing_and_tracing(own):
    heard: list = []
    outside, runs = against(own)
    with outside:
        step = listening(heard, own())
        step.structure(step.loss.init)
        state = step.init(step.loss.init)
        evaluate = step.evaluator(state)
        held_out = lambda: step.evaluate(state, batch())
        for call in (lambda: evaluate(batch()), held_out, lambda: step.describe(state, batch())):
            before = len(heard)
            call()
            assert len(heard) > before
    assert {kind for _, kind in heard} == runs


@EITHER
def test_the_choice_holds_in_a_pipeline(own):
    heard: list = []
    outside, runs = against(own)
    with outside:
        step = listening(heard, fds.pipeline(fds.plans.zb_h1, 2, num_microbatches=2), own())
        state, _ = step(step.init(step.loss.init), batch())
        step.evaluate(state, batch())
    assert len(heard) > 6 and {kind for _, kind in heard} == runs


@EITHER
def test_the_choice_holds_for_ranks_that_share_a_step(own):
    def train():
        heard: list = []
        step = listening(heard, fds.shard_optimizer(fds.mesh(dp=2)["dp"], stage=3), own())
        state = step.init(step.loss.init)
        for _ in range(2):
            state, _ = step(state, batch())
        return heard

    outside, runs = against(own)
    with outside:
        assert {kind for heard in fds.simulate(train, 2) for _, kind in heard} == runs
    assert chosen("swiglu", GPU) == "reference"


@EITHER
@pytest.mark.parametrize("where", ["the loss", "the batch", "the state", "evaluation", "the first state", "describe"])
def test_nothing_leaks_after_an_error(where, own):
    def loss(params, batch):
        if where in ("the loss", "evaluation", "describe"):
            raise ZeroDivisionError
        return (params["w"] * batch).sum()

    step = fds.compose(own(), fds.sgd(0.1))(loss)
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
    outside, _ = against(own)
    assert chosen("swiglu", GPU) == "reference"
    with outside:
        assert chosen("swiglu", GPU) == ("triton" if own is reference_kernels and is_there else "reference")


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


def test_a_step_with_kernels_trains_on_what_no_kernel_takes(monkeypatch):
    loss = lambda params, batch: swiglu(batch @ params["a"], batch @ params["b"]).square().mean()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for dtype, interpreted in ((torch.float64, True), (torch.float32, False)):
        monkeypatch.setattr(choice, "_decided", {})
        monkeypatch.setattr(language, "is_interpreted", interpreted)
        plain = fds.compose(fds.adamw(0.1))(loss)
        state = plain.init({"a": torch.eye(6, dtype=dtype), "b": torch.ones(6, 6, dtype=dtype)})
        step = fds.compose(triton_kernels(), fds.adamw(0.1))(loss)
        assert_same_bits(step(state, x.to(dtype)), plain(state, x.to(dtype)))
        with only("triton"), pytest.raises(KernelError):
            plain(state, x.to(dtype))


def test_a_step_with_kernels_is_the_plain_one_to_rounding():
    heard: list = []
    loss = lambda params, batch: swiglu(batch @ params["a"], batch @ params["b"]).square().mean()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    monitored = lambda params, batch: (heard.append(runs_triton("swiglu", params["a"])), loss(params, batch))[1]
    plain, step = fds.compose(fds.adamw(0.1))(loss), fds.compose(triton_kernels(), fds.adamw(0.1))(monitored)
    state = plain.init({"a": torch.eye(6), "b": torch.ones(6, 6)})
    (want, _), (found, _) = plain(state, x), step(state, x)
    assert heard == [True]  # in the interpreter
    for name in ("a", "b"):
        torch.testing.assert_close(found.params[name], want.params[name], rtol=1e-5, atol=1e-6)
    assert "Triton kernel" in step.describe(state).kernels and "Triton kernel (" not in plain.describe(state).kernels
