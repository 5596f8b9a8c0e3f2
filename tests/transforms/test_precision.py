"""16-bit computation from float32 masters; autocast."""

from collections import UserDict, namedtuple
from collections.abc import Mapping

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fds
from fds import tree
from fds.errors import ComposeError, StateError
from fds.step import sums
from tests.bits import assert_same_bits
from tests.devices import DEVICE
from tests.laws.problems import squared_error


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.seen = {}

    def forward(self, x):
        self.seen["first"] = x.dtype
        x = self.norm(self.first(x))
        self.seen["norm"] = x.dtype
        return self.last(torch.tanh(x))


def problem():
    torch.manual_seed(0)
    net = Net()
    apply, params, _ = fds.functional(net)
    batch = {"x": torch.randn(8, 5), "y": torch.randn(8, 3)}
    return net, apply, params, batch


def mse(apply):
    return lambda params, batch: F.mse_loss(apply(params, batch["x"]).float(), batch["y"].float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equals_casting_by_hand_and_adding_gradients_in_float32(dtype):
    _, apply, params, batch = problem()
    step = fds.compose(fds.precision(dtype), fds.accumulate(4), fds.sgd(0.5))(mse(apply))
    state, metrics = step(step.init(params), batch)

    total = {k: torch.zeros_like(v) for k, v in params.items()}
    loss = 0.0
    for i in range(4):
        low = {k: v.to(dtype).requires_grad_() for k, v in params.items()}
        part = mse(apply)(low, {k: v[2 * i : 2 * i + 2].to(dtype) for k, v in batch.items()})
        for t, g in zip(total.values(), torch.autograd.grad(part, list(low.values())), strict=True):
            t.add_(g.float())
        loss = loss + part.detach()
    opt = [nn.Parameter(v.clone()) for v in params.values()]
    for p, g in zip(opt, total.values(), strict=True):
        p.grad = g / 4
    torch.optim.SGD(opt, 0.5, fused=True).step()
    assert_same_bits(list(state.params.values()), [p.detach() for p in opt])
    assert float(metrics["loss"]) == float(loss / 4)
    assert all(x.dtype is torch.float32 for x in tree.leaves(state.params))


def test_kept_modules_compute_in_float32_and_hand_on_16_bit():
    seen = {}

    class Watch(nn.LayerNorm):
        def forward(self, x):
            seen["in"], seen["weight"] = x.dtype, self.weight.dtype
            return super().forward(x)

    layers = fds.Layers(
        [nn.Linear(5, 6), Watch(6), lambda x: seen.update(out=x.dtype) or x, nn.Linear(6, 3)], squared_error
    )
    batch = (torch.randn(8, 5), torch.randn(8, 3))
    step = fds.compose(fds.precision(keep_float32=["0.*", "1.*"]), fds.checkpoint_activations(), fds.sgd(0.1))(layers)
    step(step.init(layers.init), batch)
    assert seen == {"in": torch.float32, "weight": torch.float32, "out": torch.bfloat16}
    step = fds.compose(fds.precision(), fds.sgd(0.1))(layers)
    step(step.init(layers.init), batch)
    assert seen == {"in": torch.bfloat16, "weight": torch.bfloat16, "out": torch.bfloat16}


def test_batch_statistics_stay_in_float32():
    layers = fds.Layers([nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)], squared_error)
    step = fds.compose(fds.precision(), fds.accumulate(2), fds.sgd(0.1))(layers)
    state = step.init(layers.init)
    state, _ = step(state, (torch.randn(8, 5), torch.randn(8, 3)))
    assert state.buffers["1.running_mean"].dtype is torch.float32
    assert int(state.buffers["1.num_batches_tracked"]) == 2
    assert step.evaluate(state, (torch.randn(8, 5), torch.randn(8, 3)))["loss"].isfinite()


def test_targets_of_layers_keep_their_dtype_and_inputs_can_be_named():
    seen = {}

    def loss_fn(params, batch):
        seen.update({k: v.dtype for k, v in batch.items()})
        return (params["w"] * batch["x"]).sum() + batch["y"].sum()

    batch = {"x": torch.ones(2), "y": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}
    step = fds.compose(fds.precision(inputs="x"), fds.sgd(0.1))(loss_fn)
    step(step.init({"w": torch.ones(2)}), batch)
    assert seen == {"x": torch.bfloat16, "y": torch.float32, "n": torch.int64}


def test_a_pattern_without_a_match_is_named():
    _, apply, params, _ = problem()
    step = fds.compose(fds.precision(keep_float32=["*.nrom"]), fds.sgd(0.1))(mse(apply))
    with pytest.raises(StateError, match="nrom"):
        step.init(params)
    with pytest.raises(ComposeError):
        fds.precision(torch.int8)


class Called(TorchDispatchMode):
    """Note the names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("slices", [1, 3])
def test_parameters_and_gradients_are_cast_by_one_call_for_many(slices):
    def calls(num_layers):
        apply, params, _ = fds.functional(nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers))))
        parts = fds.precision(torch.bfloat16), fds.accumulate(slices), fds.sgd(0.1)
        step = fds.compose(*parts)(lambda p, x: apply(p, x).float().square().mean())
        state, _ = step(step.init(params), torch.ones(6, 4))
        with Called() as called:
            step(state, torch.ones(6, 4))
        return called.names

    few, many = calls(2), calls(20)
    assert few.count("_to_copy") == many.count("_to_copy")
    assert many.count("_foreach_copy_") == few.count("_foreach_copy_")
    assert many.count("_foreach_add_") == few.count("_foreach_add_") == slices - 1


@pytest.mark.parametrize("limit", ["MOST", "MOST_BYTES"])
def test_gradients_that_wait_to_be_cast_are_few(limit, monkeypatch):
    _, apply, params, batch = problem()
    step = fds.compose(fds.precision(torch.bfloat16), fds.sgd(0.1))(mse(apply))
    want, _ = step(step.init(params), batch)
    monkeypatch.setattr(sums, limit, 2)  # of gradients, or bytes: each by itself
    waited = []
    add = sums.Wide.add
    monkeypatch.setattr(sums.Wide, "add", lambda wide: (waited.append(len(wide.waiting)), add(wide))[1])
    got, _ = step(step.init(params), batch)
    assert max(waited) == (2 if limit == "MOST" else 1)
    assert_same_bits(got.params, want.params)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_equals_torch_autocast(dtype):
    net, apply, params, batch = problem()
    step = fds.compose(fds.autocast(dtype), fds.checkpoint_activations(), fds.sgd(0.5))(mse(apply))
    state, metrics = step(step.init(params), batch)
    opt = torch.optim.SGD(net.parameters(), 0.5, fused=True)
    with torch.autocast(DEVICE.type, dtype=dtype):
        loss = F.mse_loss(net(batch["x"]).float(), batch["y"])
    loss.backward()
    opt.step()
    assert_same_bits(list(state.params.values()), [p.detach() for p in net.parameters()])
    assert float(metrics["loss"]) == float(loss.detach())


class Encoding(UserDict):
    """A mapping such as Hugging Face's BatchEncoding."""


Named = namedtuple("Named", "x y")


@attrs.frozen
class Sample:
    x: torch.Tensor
    y: torch.Tensor


@pytest.mark.parametrize("make", [dict, lambda **b: Encoding(b), Named, Sample, lambda **b: fds.whole(Sample(**b))])
def test_inputs_are_cast_in_whatever_container_they_come(make):
    *_, batch = problem()
    seen = []
    get = lambda b, k: b[k] if isinstance(b, Mapping) else getattr(b, k)
    loss = lambda p, b: seen.append((type(b), get(b, "x").dtype)) or (get(b, "x") * p["w"]).mean().float()
    step = fds.compose(fds.precision(torch.bfloat16), fds.sgd(0.1))(loss)
    given = make(**batch)
    step(step.init({"w": torch.ones(5)}), given)
    assert seen == [(type(getattr(given, "value", given)), torch.bfloat16)]


def test_inputs_of_layers_are_cast_by_place_if_the_pair_has_names_too():
    seen = []
    layers = fds.Layers([nn.Linear(5, 3)], lambda out, y: seen.append((out.dtype, y.dtype)) or (out - y).mean())
    step = fds.compose(fds.precision(torch.bfloat16), fds.sgd(0.1))(layers)
    state = step.init(layers.init)
    for pair in (Named(torch.ones(2, 5), torch.ones(2, 3)), (torch.ones(2, 5), torch.ones(2, 3))):
        step(state, pair)
    assert seen == [(torch.bfloat16, torch.float32)] * 2
