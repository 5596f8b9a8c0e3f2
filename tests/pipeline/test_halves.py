"""Backward in two halves: the same bits as in one, no product computed twice, and a graph that is gone after W."""

import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import fds
from fds import plans
from fds.transforms.pipeline.stage import backward_input
from tests.bits import assert_same_bits
from tests.laws.problems import Attention, Block

PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution")


class Products(TorchDispatchMode):
    """Count matrix products; backward runs in the thread that asks for it, so its products are counted, too."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in PRODUCTS
        if func._schema.name == "aten::convolution_backward":
            self.count += sum(args[-1][:2])  # those asked for: by the input, by the weight
        return func(*args, **(kwargs or {}))


def tensors(value):
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor) and x.requires_grad]


def graph_of(f, inputs, seed=0):
    """Return where backward of `f(*inputs)` begins, and gradients there."""
    torch.manual_seed(seed)
    outs = tensors(f(*inputs))
    grads = [
        torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(outs)
    ]
    return [get_gradient_edge(x) for x in outs], grads


def fused(f, inputs, leaves):
    """Return gradients by inputs and by leaves, of one backward, and how many products it took."""
    edges, grads = graph_of(f, inputs)
    everything = [*inputs, *leaves]
    with Products() as products:
        torch.autograd.backward(edges, grads, inputs=everything)
    found = [x.grad for x in everything]
    for x in everything:
        x.grad = None
    return found, products.count


def halved(f, inputs, leaves):
    """Return the same of B and W, and the products of each; None where the graph cannot be split."""
    edges, grads = graph_of(f, inputs)
    with Products() as b:
        halves = backward_input(edges, grads, inputs, leaves)
    if halves is None:
        assert not b.count
        return None
    assert all(x.grad is None for x in leaves)
    with Products() as w:
        halves[1]()
    found = [*halves[0], *(x.grad for x in leaves)]
    for x in leaves:
        x.grad = None
    return found, (b.count, w.count)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape))).requires_grad_()


class Own(nn.Module):
    """A module with two square weights and a bias, and any forward of them."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.bias = (
            nn.Parameter(torch.randn(6, 6)),
            nn.Parameter(torch.randn(6, 6)),
            nn.Parameter(torch.randn(6)),
        )
        self.f = forward

    def forward(self, *xs):
        return self.f(self, *xs)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class Double(torch.autograd.Function):
    """A product with a weight, whose backward computes both gradients whatever is asked for."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


def spectrum(m, x):
    return torch.view_as_real(torch.fft.fft(x @ m.a) @ torch.complex(m.b, m.b.sin()))


def written_over(m, x):
    y = x @ m.a
    return y.add_(m.bias).mul_(2)


SPLIT = {
    "linear": (lambda: nn.Linear(6, 6), (4, 6)),
    "linear of three dims": (lambda: nn.Linear(6, 5), (2, 4, 6)),
    "layer norm": (lambda: nn.LayerNorm(6), (4, 6)),
    "batch norm": (lambda: nn.BatchNorm1d(6), (4, 6)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 6)),
    "multi-layer perceptron": (lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)), (4, 6)),
    "block": (lambda: Block(6, 0.3), (4, 6)),
    "attention": (lambda: Attention(6, 0.0), (4, 6)),
    "transformer": (lambda: nn.TransformerEncoderLayer(6, 2, 12, 0.1, batch_first=True), (2, 4, 6)),
    "two weights": (lambda: Own(lambda m, x: torch.tanh(x @ m.a + m.bias) @ m.b), (4, 6)),
    "a weight in two branches": (lambda: Own(lambda m, x: torch.tanh(x @ m.a) + x.sin() @ m.a), (4, 6)),
    "a weight computed from two": (lambda: Own(lambda m, x: x @ (m.a @ m.b)), (4, 6)),
    "a tuple of views": (lambda: Own(lambda m, x: (x @ torch.cat([m.a, m.b], 1)).chunk(2, 1)), (4, 6)),
    "views of the input": (lambda: Own(lambda m, x: x[:, :3] @ m.a[:3] + x[:, 3:] @ m.b[3:]), (4, 6)),
    "an output that is the input": (lambda: Own(lambda m, x: {"x": x, "y": x @ m.a}), (4, 6)),
    "one output twice": (lambda: Own(lambda m, x: [x @ m.a] * 2), (4, 6)),
    "an output that goes on": (lambda: Own(lambda m, x: ((y := x @ m.a), torch.tanh(y) @ m.b)), (4, 6)),
    "frozen parameters": (Frozen, (4, 6)),
    "a weight that is not used": (lambda: Own(lambda m, x: x @ m.a), (4, 6)),
    "expanded in the layer": (lambda: Own(lambda m, x: x[:1].expand(4, -1) @ m.a), (4, 6)),
    "complex numbers inside": (lambda: Own(spectrum), (4, 6)),
    "written over inside": (lambda: Own(written_over), (4, 6)),
    "an output of parameters alone": (lambda: Own(lambda m, x: (x @ m.a, m.b * 2)), (4, 6)),
    "parameters alone": (lambda: Own(lambda m, x: m.a @ m.b), (4, 6)),
    "an output that is a parameter": (lambda: Own(lambda m, x: (x @ m.a, m.bias)), (4, 6)),
    "parameters alone and used": (lambda: Own(lambda m, x: ((w := m.a @ m.b), x @ w)), (4, 6)),
}
WHOLE = {
    "a weight twice in sequence": lambda: Own(lambda m, x: torch.tanh(x @ m.a) @ m.a),
    "weights that meet in another branch": lambda: Own(lambda m, x: torch.tanh(x @ m.a) @ m.b + x @ (m.a @ m.b)),
    "weights that meet in an earlier branch": lambda: Own(lambda m, x: x @ (m.a @ m.b) + torch.tanh(x @ m.a) @ m.b),
    "a function of Python": lambda: Own(lambda m, x: Double.apply(x, m.a)),
}


def leaves_of(module):
    return [p for p in module.parameters() if p.requires_grad]


@pytest.mark.parametrize("name", SPLIT)
def test_two_halves_are_one_backward_bit_for_bit(name):
    make, shape = SPLIT[name]
    torch.manual_seed(1)
    module, x = make(), randn(*shape)
    want, products = fused(module, [x], leaves_of(module))
    halves = halved(module, [x], leaves_of(module))
    assert halves is not None
    assert_same_bits([x for x in halves[0] if x is not None], [x for x in want if x is not None])
    assert [x is None for x in halves[0]] == [x is None for x in want]
    assert sum(halves[1]) <= products


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_split_is_refused_before_anything_is_computed(name):
    torch.manual_seed(1)
    module = WHOLE[name]()
    assert halved(module, [randn(4, 6)], leaves_of(module)) is None


@pytest.mark.parametrize("make", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrence_is_right_split_or_not(make):
    torch.manual_seed(1)
    module, x = make(6, 6, num_layers=2, batch_first=True), randn(2, 3, 6)
    f = lambda x: module(x)[0]
    want, products = fused(f, [x], leaves_of(module))
    halves = halved(f, [x], leaves_of(module))
    if halves is not None:
        assert_same_bits(halves[0], want)
        assert sum(halves[1]) <= products


def test_a_linear_layer_costs_one_product_in_each_half():
    module = nn.Linear(6, 6)
    _, (b, w) = halved(module, [randn(4, 6)], leaves_of(module))
    assert (b, w) == (1, 1)


def test_gradients_by_several_inputs_are_those_of_one_backward():
    torch.manual_seed(1)
    module = Own(lambda m, x, y, z: (x @ m.a + torch.tanh(y @ m.b), z))
    inputs = [randn(4, 6), randn(4, 6).detach().mul(2).requires_grad_(), randn(6)]
    want, _ = fused(module, inputs, leaves_of(module))
    got, _ = halved(module, inputs, leaves_of(module))
    assert [x is None for x in got] == [x is None for x in want]
    assert_same_bits([x for x in got if x is not None], [x for x in want if x is not None])


def test_an_input_that_is_expanded_memory_has_its_gradient():
    torch.manual_seed(1)
    module = nn.Linear(6, 6)
    x = torch.randn(1, 6).expand(4, 6).detach().requires_grad_()
    want, _ = fused(module, [x], leaves_of(module))
    got, _ = halved(module, [x], leaves_of(module))
    assert_same_bits(got, want)


def test_without_inputs_all_of_backward_waits_for_w():
    torch.manual_seed(1)
    module, tokens = nn.Embedding(7, 6), torch.randint(0, 7, (4, 3))
    want, _ = fused(lambda: module(tokens), [], leaves_of(module))
    edges, grads = graph_of(lambda: module(tokens), [])
    found, rest = backward_input(edges, grads, [], leaves_of(module))
    assert found == [] and module.weight.grad is None
    rest()
    assert_same_bits(module.weight.grad, want[0])


class Kept:
    """What a graph keeps for its backward, and nobody else."""

    def __init__(self, x):
        self.x = x.detach()


@pytest.mark.parametrize("name", ["block", "transformer", "a weight in two branches", "complex numbers inside"])
def test_the_graph_is_gone_after_w(name):
    make, shape = SPLIT[name]
    torch.manual_seed(1)
    module, x, alive = make(), randn(*shape), weakref.WeakSet()

    def pack(x):
        kept = Kept(x)
        alive.add(kept)
        return kept

    with saved_tensors_hooks(pack, lambda kept: kept.x):
        edges, grads = graph_of(module, [x])
    halves = backward_input(edges, grads, [x], leaves_of(module))
    assert halves is not None and alive
    del edges
    halves[1]()
    del halves
    assert not alive


def trained(schedule, layers, *more, num_microbatches=4):
    """Return the step over some layers of width 6, after one call, and its parameters."""
    torch.manual_seed(1)
    loss = fds.Layers([make() for make in layers], nn.MSELoss())
    cut = fds.pipeline(schedule, 2, num_microbatches=num_microbatches, partition="uniform")
    step = fds.compose(cut, *more, fds.sgd(0.1))(loss)
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    state, _ = step(step.init(loss.init, key=0), (x, x))
    return step, step.params(state)


@pytest.mark.parametrize("name", WHOLE)
def test_layers_that_cannot_be_split_are_described_and_right(name):
    layers = [lambda: nn.Linear(6, 6), lambda: nn.Linear(6, 6), WHOLE[name], lambda: nn.Linear(6, 6)]
    split, params = trained(plans.zb_h1, layers)
    fused_, want = trained(plans.one_f_one_b, layers)
    assert_same_bits(params, want)
    assert "backward not split in layers 2" in str(split.describe())
    assert "not split" not in str(fused_.describe())


def test_layers_that_can_be_split_are_not_described():
    step, _ = trained(plans.zb_h1, [lambda: nn.Linear(6, 6), lambda: Block(6, 0.1), lambda: Attention(6, 0.1)])
    assert "not split" not in str(step.describe())


def test_a_function_of_python_computes_its_backward_once_a_microbatch():
    calls = Counter()

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx, grad):
            calls["backward"] += 1
            x, w = ctx.saved_tensors
            return grad @ w.T, x.T @ grad

    own = lambda: Own(lambda m, x: Counted.apply(x, m.a))
    trained(plans.zb_h1, [lambda: nn.Linear(6, 6), own, lambda: nn.Linear(6, 6)])
    assert calls == {"backward": 4}


@pytest.mark.parametrize("schedule", [plans.zb_h1, plans.one_f_one_b], ids=["zb_h1", "one_f_one_b"])
@pytest.mark.parametrize("every", [1, 2, 4])
def test_checkpointed_layers_are_computed_twice_a_microbatch_and_no_more(schedule, every):
    calls = Counter()

    def counted(name):
        def layer(x):
            calls[name] += 1
            return torch.tanh(x)

        return lambda: layer

    layers = [lambda: nn.Linear(6, 6), counted("a"), lambda: Block(6, 0.1), counted("b"), lambda: nn.Linear(6, 6)]
    _, plain = trained(schedule, layers)
    assert calls == {"a": 4, "b": 4}
    step, params = trained(schedule, layers, fds.checkpoint_activations(every=every))
    assert calls == {"a": 4 + 8, "b": 4 + 8}
    assert_same_bits(params, plain)
    if schedule is plans.zb_h1:
        assert "not split" in str(step.describe())


@pytest.mark.parametrize("schedule", [plans.zb_h1, plans.zb_h2, plans.zb_v], ids=["zb_h1", "zb_h2", "zb_v"])
def test_a_split_backward_computes_no_more_products_than_a_whole_one(schedule):
    layers = [
        lambda: nn.Linear(6, 6),
        lambda: Block(6, 0.1),
        lambda: nn.TransformerEncoderLayer(6, 2, 12, 0.0),
        lambda: nn.Linear(6, 6),
        lambda: Block(6, 0.1),
    ]
    with Products() as split:
        trained(schedule, layers)
    with Products() as whole:
        trained(plans.gpipe, layers)
    assert split.count == whole.count
