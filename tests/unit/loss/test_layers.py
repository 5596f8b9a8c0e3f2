"""`Layers`: a sequence in the open, equal to the sequence in the closed."""

import functools
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import Layers, LayerSpec, TiedLayerSpec, random
from fds.errors import BatchError, LossError, StateError
from tests.bits import assert_same_bits, snapshot
from tests.unit.loss.test_modules import Halving

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
Y = torch.randn(4, 2, generator=torch.Generator().manual_seed(1))


class Counting(nn.Linear):
    """A layer that knows how often, and where, it was built."""

    built: list = []  # noqa: RUF012

    def __init__(self, *args):
        super().__init__(*args)
        Counting.built.append(self.weight.device.type)


class Drawing(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


@pytest.fixture
def builds():
    Counting.built.clear()
    return Counting.built


def sequence():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))


@pytest.mark.parametrize("listed", [False, True])
def test_layers_are_the_sequence_they_are_made_of(listed):
    net = sequence()
    loss = Layers(list(net) if listed else net, F.mse_loss)
    params = loss.init(random.key(0))
    assert_same_bits(params, {name: p.detach() for name, p in net.named_parameters()})
    value, grads = fds.autodiff.value_and_grad(loss)(params, (X, Y))
    want = F.mse_loss(net(X), Y)
    want.backward()
    assert_same_bits(value, want)
    assert_same_bits(grads, {name: p.grad for name, p in net.named_parameters()})


def test_names_of_specs_are_those_of_the_sequence():
    loss = Layers([LayerSpec(nn.Linear, 3, 4), torch.tanh, LayerSpec(nn.Linear, 4, 2, bias=False)], F.mse_loss)
    assert list(loss.init(random.key(0))) == ["0.weight", "0.bias", "2.weight"]
    assert len(loss) == 3


def test_plain_functions_and_criterion_modules_serve():
    net = sequence()
    loss = Layers([net, lambda x: x * 2, torch.sigmoid], nn.BCELoss())
    params = {f"0.{name}": p.detach() for name, p in net.named_parameters()}
    targets = torch.rand(4, 2)
    assert_same_bits(loss(params, (X, targets)), nn.BCELoss()(torch.sigmoid(net(X) * 2), targets))


def test_a_tuple_between_layers_is_one_argument():
    loss = Layers([lambda pair: (pair[0] + 1, pair[1]), lambda pair: pair[0] * pair[1]], F.mse_loss)
    assert_same_bits(loss({}, ((X[:, :2], Y), Y)), F.mse_loss((X[:, :2] + 1) * Y, Y))


def test_the_batch_may_be_a_list():
    loss = Layers([lambda x: x], F.mse_loss)
    assert loss({}, [Y, Y]) == 0


@pytest.mark.parametrize("batch", [X, (X,), (X, Y, Y), {"x": X, "y": Y}, None, "ab"])
def test_a_batch_that_is_no_pair_is_refused(batch):
    with pytest.raises(BatchError, match="pair"):
        Layers([lambda x: x], F.mse_loss)({}, batch)


def test_a_named_pair_is_a_pair():
    pair = namedtuple("pair", "inputs targets")
    assert Layers([lambda x: x], F.mse_loss)({}, pair(Y, Y)) == 0


@pytest.mark.parametrize("bad", [nn.Linear, 3, None, "relu", torch.ones(2)])
def test_what_is_no_layer_is_refused_by_its_place(bad):
    with pytest.raises(LossError) as caught:
        Layers([nn.ReLU(), bad], F.mse_loss)
    assert caught.value.where == "layers[1]"


def test_specs_read_as_they_were_written():
    assert repr(LayerSpec(nn.Linear, 3, 4, bias=False)) == "LayerSpec(Linear, 3, 4, bias=False)"


def test_nothing_is_built_before_it_is_needed(builds):
    loss = Layers([LayerSpec(Counting, 3, 4), LayerSpec(Counting, 4, 2)], F.mse_loss)
    step = fds.compose(fds.accumulate(2), fds.sgd(0.1))(loss)
    assert builds == []
    loss.layer(1)
    assert len(builds) == 1
    state = step.init(loss.init)
    done = len(builds)
    step(state, (X, Y))
    step.evaluate(state, (X, Y))
    assert len(builds) == done


def test_tracing_the_structure_builds_nothing_real(builds):
    step = fds.compose(fds.adam(0.1))(loss := Layers([LayerSpec(Counting, 3, 2)], F.mse_loss))
    step.structure(loss.init)
    assert set(builds) <= {"meta"}


def test_initial_values_follow_the_key_and_the_place_alone():
    specs = [LayerSpec(nn.Linear, 3, 3), LayerSpec(nn.Linear, 3, 3), LayerSpec(nn.Linear, 3, 3)]
    one = Layers(specs, F.mse_loss).init(random.key(0))
    other = Layers([nn.Identity(), *specs[1:]], F.mse_loss).init(random.key(0))
    assert_same_bits(one["2.weight"], other["2.weight"])
    assert not torch.equal(one["1.weight"], one["2.weight"])
    assert not torch.equal(one["1.weight"], Layers(specs, F.mse_loss).init(random.key(1))["1.weight"])
    assert_same_bits(one, Layers(specs, F.mse_loss).init(random.key(0)))


def test_building_leaves_the_generator():
    before = torch.get_rng_state()
    loss = Layers([LayerSpec(nn.Linear, 3, 2)], F.mse_loss)
    params = loss.init(random.key(0))
    loss(params, (X, Y))
    fds.compose(fds.sgd(0.1))(loss).init(loss.init, key=1)
    assert torch.equal(torch.get_rng_state(), before)


# --- tied layers ---


def tied(dropout=0.0):
    use = lambda module, x: F.linear(x, module.weight)
    return Layers(
        [
            TiedLayerSpec("embed", nn.Embedding, 5, 3),
            nn.Dropout(dropout),
            LayerSpec(nn.Linear, 3, 3),
            TiedLayerSpec("embed", nn.Embedding, 5, 3, forward_fn=use),
        ],
        F.cross_entropy,
    )


TOKENS = torch.tensor([0, 3, 3, 4])


def test_tied_layers_share_one_parameter_and_its_gradient_is_the_sum():
    loss = tied()
    params = loss.init(random.key(0))
    assert list(params) == ["embed.weight", "2.weight", "2.bias"]
    value, grads = fds.autodiff.value_and_grad(loss)(params, (TOKENS, TOKENS))

    first, last = (params["embed.weight"].clone().requires_grad_() for _ in range(2))
    out = F.linear(F.linear(F.embedding(TOKENS, first), params["2.weight"], params["2.bias"]), last)
    want = F.cross_entropy(out, TOKENS)
    want.backward()
    assert_same_bits(value, want)
    torch.testing.assert_close(grads["embed.weight"], first.grad + last.grad, rtol=0, atol=1e-7)


def test_tied_layers_stay_tied_while_training():
    step = fds.compose(fds.adam(0.1))(loss := tied(0.2))
    state = step.init(loss.init)
    state, _ = step(state, (TOKENS, TOKENS))
    assert list(state.params) == ["embed.weight", "2.weight", "2.bias"]
    assert loss.owner(3) == 0
    assert loss.owner(2) == 2


def test_the_key_of_a_tied_layer_is_a_word():
    with pytest.raises(LossError, match="begins with a digit"):
        TiedLayerSpec("3", nn.Linear, 3, 3)


@pytest.mark.parametrize("names", [{"extra": torch.ones(2)}, {"0.weight": None}])
def test_parameters_of_other_layers_are_refused(names):
    loss = Layers([nn.Linear(3, 2)], F.mse_loss)
    params = {**loss.init(random.key(0)), **names}
    params = {name: p for name, p in params.items() if p is not None}
    with pytest.raises((LossError, StateError)):
        loss(params, (X, Y))


def test_one_module_in_two_places_is_tied():
    shared = nn.Linear(3, 3)
    loss = Layers([shared, torch.tanh, shared], F.mse_loss)
    assert set(loss.init(fds.random.key(0))) == {"0.weight", "0.bias"}
    step = fds.compose(fds.sgd(0.1))(loss)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    state, _ = step(step.init(loss.init), (x, y))
    F.mse_loss(shared(torch.tanh(shared(x))), y).backward()
    torch.testing.assert_close(state.params["0.weight"], (shared.weight - 0.1 * shared.weight.grad).detach())


def test_a_sequential_keeps_its_names():
    net = nn.Sequential(OrderedDict(first=nn.Linear(3, 3), last=nn.Linear(3, 1)))
    assert list(Layers(net, F.mse_loss).init(fds.random.key(0))) == list(net.state_dict())


def test_a_sequential_that_does_more_is_refused():
    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(super().forward(x))

    with pytest.raises(LossError, match="more than"):
        Layers(Twice(nn.Linear(3, 3)), F.mse_loss)


# --- buffers and random numbers ---


def test_persistent_buffers_are_state_and_others_are_constants():
    class Scaled(nn.BatchNorm1d):
        def __init__(self):
            super().__init__(3)
            self.register_buffer("scale", torch.tensor(3.0), persistent=False)

        def forward(self, x):
            return super().forward(x) * self.scale

    loss = Layers([Scaled(), LayerSpec(nn.Linear, 3, 2)], F.mse_loss)
    step = fds.compose(fds.accumulate(2), fds.sgd(0.1))(loss)
    state = step.init(loss.init)
    assert set(state.buffers) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    net, state = Scaled(), step(state, (X, Y))[0]
    net(X[:2])
    net(X[2:])
    assert_same_bits(state.buffers, {f"0.{k}": b for k, b in net.state_dict().items() if k not in ("weight", "bias")})


def test_constants_never_change():
    loss = Layers([Halving()], lambda out, targets: out.sum())
    step = fds.compose(fds.sgd(0.0))(loss)
    state = step.init(loss.init)
    try:
        first = step(state, (X, Y))
        assert_same_bits(step(state, (X, Y)), first)
    except LossError:
        pass  # refusing is as good


def test_the_plain_call_loses_its_updates_of_buffers():
    loss = Layers([nn.BatchNorm1d(3)], F.mse_loss)
    params, before = loss.init(random.key(0)), snapshot(loss.buffers())
    loss(params, (X, X))
    assert_same_bits(loss.buffers(), before)


def _hooked():
    linear = nn.Linear(3, 2)
    linear.register_forward_hook(lambda module, args, out: F.dropout(out, 0.5))
    return linear


def _patched():
    relu = nn.ReLU()
    relu.forward = F.dropout
    return relu


@pytest.mark.parametrize(
    "drawing",
    [
        nn.Dropout(0.5),
        nn.AlphaDropout(0.5),
        nn.RReLU(),
        nn.Sequential(nn.Identity(), nn.Dropout(0.5)),
        Drawing(),
        F.dropout,
        nn.TransformerEncoderLayer(3, 1, 4),
        _hooked(),
        _patched(),
    ],
    ids=["dropout", "alpha", "rrelu", "nested", "own", "function", "transformer", "hook", "patched"],
)
def test_whatever_draws_follows_the_key_and_not_the_generator(drawing):
    loss = Layers([nn.Linear(3, 3), drawing], lambda out, targets: (out**2).mean())
    step = fds.compose(fds.accumulate(2), fds.sgd(0.1))(loss)
    state, results = step.init(loss.init), []
    with torch.random.fork_rng():
        for seed in range(2):
            torch.manual_seed(seed)
            results.append(step(state, (X, Y)))
    assert_same_bits(results[0], results[1])


# --- what specs are made of ---


def test_specs_nest_and_follow_the_key():
    block = lambda: LayerSpec(
        nn.Sequential, OrderedDict(a=LayerSpec(nn.Linear, 3, 4), b=nn.GELU(), c=LayerSpec(nn.Linear, 4, 2))
    )
    flat = LayerSpec(nn.Sequential, LayerSpec(nn.Linear, 3, 4), nn.GELU(), LayerSpec(nn.Linear, 4, 2))
    values = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        values.append(Layers([block()], F.mse_loss).init(random.key(0)))
    assert_same_bits(values[0], values[1])
    assert list(values[0]) == ["0.a.weight", "0.a.bias", "0.c.weight", "0.c.bias"]
    plain = LayerSpec(lambda: nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)))
    got, want = (Layers([spec], F.mse_loss).init(random.key(0)) for spec in (flat, plain))
    assert_same_bits(got, want)
    assert not torch.equal(Layers([flat], F.mse_loss).init(random.key(1))["0.0.weight"], got["0.0.weight"])
    step = fds.compose(fds.sgd(0.1))(loss := Layers([block()], F.mse_loss))
    step(step.init(loss.init), (X, Y))


class Holding(nn.Module):
    def __init__(self, *parts, **named):
        super().__init__()


@pytest.mark.parametrize(
    "make",
    [
        lambda: LayerSpec(nn.Sequential, nn.Linear(4, 4)),
        lambda: TiedLayerSpec("tied", nn.Sequential, nn.Linear(4, 4)),
        lambda: LayerSpec(nn.Sequential, OrderedDict(a=nn.GELU(), b=nn.Linear(4, 4))),
        lambda: LayerSpec(Holding, [nn.BatchNorm1d(3, affine=False)]),
        lambda: LayerSpec(Holding, weight=nn.Parameter(torch.ones(2))),
        lambda: LayerSpec(Holding, {"f": nn.Linear(4, 4).forward}),
        lambda: LayerSpec(functools.partial(Holding, nn.Linear(4, 4))),
        lambda: LayerSpec(Holding, TiedLayerSpec("tied", nn.Linear, 4, 4)),
    ],
)
def test_what_no_key_would_initialise_is_refused_with_the_spec_to_write(make):
    with pytest.raises(LossError) as caught:
        make()
    assert "LayerSpec(" in caught.value.want


def test_constants_may_be_arguments():
    spec = LayerSpec(Holding, torch.ones(3), nn.GELU(), nn.Dropout(0.1), activation=torch.tanh, sizes=(3, 4))
    assert isinstance(spec.build(), Holding)


@pytest.mark.parametrize("layers", [nn.LSTM(3, 3), nn.ModuleDict({"a": nn.Linear(3, 3)}), 3, "layers"])
def test_what_has_no_order_of_layers_is_refused(layers):
    with pytest.raises(LossError, match="layers") as caught:
        Layers(layers, F.mse_loss)
    assert "list" in caught.value.want
    assert len(Layers(nn.ModuleList([nn.Linear(3, 2)]), F.mse_loss)) == 1


@pytest.mark.parametrize("criterion", [None, "mse", nn.MSELoss])
def test_what_is_no_criterion_is_refused(criterion):
    with pytest.raises(LossError, match="criterion"):
        Layers([nn.Linear(3, 2)], criterion)
