"""torch.compile: of a loss, of a module, of a function inside a loss, of the step; plain code is the oracle."""

import functools

import pytest
import torch
import torch._inductor.config
from torch import nn

import fds
from tests import ranks
from tests.bits import assert_same_bits

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.out = nn.BatchNorm1d(3), nn.Dropout(0.1), nn.Linear(3, 1)
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        self.out.weight = self.body[0].weight

    def forward(self, x):
        return self.out(self.drop(self.body(self.norm(x))))


def net():
    torch.manual_seed(0)
    return Net()


class Counting:
    """A backend that counts the operators that it is given."""

    def __init__(self, backend):
        self.backend, self.num_operators = torch._dynamo.lookup_backend(backend), 0

    def __deepcopy__(self, memo):  # a compiled module is copied with its backend
        return self

    def __call__(self, graph, inputs, **options):
        self.num_operators += sum(node.op.startswith("call") for node in graph.graph.nodes)
        return self.backend(graph, inputs, **options)


def of_loss(compiled, fullgraph):
    apply, params, buffers = fds.functional(net())

    def loss(params, x, buffers):
        out, buffers = apply.with_buffers(params, buffers, x)
        return out.square().mean(), {"mean": out.mean()}, buffers

    return fds.with_buffers(compiled(loss), buffers), params


def of_plain_loss(compiled, fullgraph):
    return compiled(lambda p, x: (x @ p["w"] + p["b"]).square().mean()), {"w": torch.ones(3, 2), "b": torch.ones(2)}


def of_module(compiled, fullgraph):
    apply, params, buffers = fds.functional(compiled(net()))

    def loss(params, x, buffers):
        out, buffers = apply.with_buffers(params, buffers, x)
        return out.square().mean(), {}, buffers

    return fds.with_buffers(loss, buffers), params


def of_part(compiled, fullgraph):
    module = net().eval()
    module.body = compiled(module.body)
    apply, params, _ = fds.functional(module)
    return lambda p, x: apply(p, x).square().mean(), params


def of_function(compiled, fullgraph):
    linear = compiled(lambda x, w: (x @ w).square().mean())
    given = fds.materialize if fullgraph else lambda p: p
    return lambda p, x: linear(x, given(p["w"])) + p["w"].sum(), {"w": torch.ones(3, 2)}


KINDS = {f.__name__: f for f in (of_loss, of_plain_loss, of_module, of_part, of_function)}


def trained(kind, compiled, fullgraph, stage):
    """Return what two steps, an evaluation and the parameters are."""
    loss, params = KINDS[kind](compiled, fullgraph)
    shard = [] if stage is None else [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)]
    step = fds.compose(*shard, fds.accumulate(2), fds.sgd(0.1))(loss)
    state = step.init(params)
    for _ in range(2):
        state, metrics = step(state, X)
    return metrics["loss"], step.evaluate(state, X)["loss"], [x.clone() for x in step.params(state).values()]


def agree(backend, stage, *ways):
    """Train with and without the compiler, on this rank, in each way: (kind, fullgraph)."""
    for kind, fullgraph in ways:
        torch._dynamo.reset()
        counting = Counting(backend)
        found = trained(kind, functools.partial(torch.compile, backend=counting, fullgraph=fullgraph), fullgraph, stage)
        torch.testing.assert_close(found, trained(kind, lambda f: f, fullgraph, stage), msg=f"{kind}: {{}}".format)
        breaks = kind == "of_function" and stage == 3 and not fullgraph  # at every parameter
        assert breaks or counting.num_operators, kind


WAYS = {
    0: [("of_loss", False)],
    1: [("of_plain_loss", True), ("of_module", True)],
    2: [("of_part", False), ("of_function", True)],
    3: [("of_loss", False), ("of_module", True), ("of_part", False), ("of_function", False), ("of_function", True)],
}


@pytest.mark.parametrize("stage", WAYS)
def test_compiled_code_trains_alike_on_two_ranks(stage):
    ranks.run(agree, "eager", stage, *WAYS[stage])


@pytest.mark.inductor
@pytest.mark.parametrize("stage", WAYS)
def test_code_that_inductor_compiles_trains_alike_on_two_ranks(stage):
    ranks.run(agree_by_inductor, stage, *WAYS[stage], timeout=900)


def agree_by_inductor(stage, *ways):
    with torch._inductor.config.patch(fallback_random=True):  # else dropout draws by a generator of inductor's own
        agree("inductor", stage, *ways)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which Dynamo reads
def test_compiled_code_trains_alike_alone():
    agree("aot_eager", None, ("of_loss", False), ("of_plain_loss", True), ("of_module", True))


def test_a_loss_that_calls_apply_ends_the_graph_and_says_how_to_compile_the_module():
    loss, params = of_loss(functools.partial(torch.compile, backend="eager", fullgraph=True), True)
    step = fds.compose(fds.sgd(0.1))(loss)
    state = step.init(params)
    with pytest.raises(Exception, match=r"fds\.functional\(torch\.compile\(module\)\)"):
        step(state, X)


def test_a_compiled_step_is_the_step():
    loss, params = of_plain_loss(lambda f: f, False)
    step = fds.compose(fds.sgd(0.1))(loss)
    state = step.init(params)
    counting = Counting("eager")
    assert_same_bits(torch.compile(step, backend=counting)(state, X), step(state, X))
    assert not counting.num_operators
