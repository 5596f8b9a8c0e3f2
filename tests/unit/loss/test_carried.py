"""Which buffers a module sees in an evaluation: those of its own call of functional, whatever they are named."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.errors import LossError
from tests.bits import assert_same_bits

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)) * 3 + 1


def net(seed, width=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def teacher(width=4):
    module = net(7, width)
    module(X * 2)
    return module.eval()


def trained(loss, params, eval_fn=None):
    step = fds.compose(fds.accumulate(2), fds.sgd(0.1))(loss, eval_fn)
    state = step.init(params)
    for _ in range(2):
        state, metrics = step(state, X)
    return step, state, metrics


def prefixed(name, tensors):
    return {f"{name}.{key}": x for key, x in tensors.items()}


def taken(name, tensors):
    return {key.removeprefix(f"{name}."): x for key, x in tensors.items() if key.startswith(f"{name}.")}


def by_torch(module, params, buffers):
    module = copy.deepcopy(module).eval()
    module.load_state_dict({**params, **buffers})
    return module(X)


class TwoStudents:
    """Two modules of one structure in one loss, their parameters and buffers under prefixes, and a teacher."""

    def __init__(self):
        self.modules = {"a": net(0), "b": net(1)}
        made = {name: fds.functional(module) for name, module in self.modules.items()}
        self.applies = {name: apply for name, (apply, _, _) in made.items()}
        self.params = {k: x for name, (_, p, _) in made.items() for k, x in prefixed(name, p).items()}
        self.buffers = {k: x for name, (_, _, b) in made.items() for k, x in prefixed(name, b).items()}
        self.teacher, self.teacher_params, _ = fds.functional(teacher())

    def loss(self, params, x, buffers):
        target, new, total = self.teacher(self.teacher_params, x), {}, 0.0
        for name, apply in self.applies.items():
            out, changed = apply.with_buffers(taken(name, params), taken(name, buffers), x)
            new, total = {**new, **prefixed(name, changed)}, total + F.mse_loss(out, target)
        return total, {"teacher": target.sum()}, new

    def eval_fn(self, params, x):
        outs = {name: apply(taken(name, params), x).sum() for name, apply in self.applies.items()}
        return torch.zeros(()), {**outs, "teacher": self.teacher(self.teacher_params, x).sum()}


def copied(both):
    return copy.deepcopy(both)


def pickled(both):
    file = io.BytesIO()
    torch.save(both, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("moved", [lambda both: both, copied, pickled], ids=["made", "copied", "pickled"])
def test_an_eval_fn_sees_the_states_buffers_of_each_module_and_a_teachers_own(moved):
    both = moved(TwoStudents())
    step, state, _ = trained(fds.with_buffers(both.loss, both.buffers), both.params, both.eval_fn)
    metrics = step.evaluate(state, X)
    for name, module in both.modules.items():
        assert_same_bits(metrics[name], by_torch(module, taken(name, state.params), taken(name, state.buffers)).sum())
    assert_same_bits(metrics["teacher"], teacher()(X).sum())


@pytest.mark.parametrize("width", [4, 6])
def test_a_teacher_of_the_same_names_keeps_its_statistics_in_the_loss_itself(width):
    apply, params, buffers = fds.functional(net(0))
    teach, teach_params, _ = fds.functional(teacher(width))

    def loss(params, x, buffers):
        target = teach(teach_params, x)
        out, new = apply.with_buffers(params, buffers, x)
        return F.mse_loss(out, target), {"target": target.sum()}, new

    step, state, _ = trained(fds.with_buffers(loss, buffers), params)
    assert_same_bits(step.evaluate(state, X)["target"], teacher(width)(X).sum())


def test_a_network_in_the_criterion_of_layers_keeps_its_statistics():
    apply, params, _ = fds.functional(teacher())
    layers = fds.Layers(net(0), lambda out, x: (F.mse_loss(out, apply(params, x)), {"t": apply(params, x).sum()}))
    step = fds.compose(fds.sgd(0.1))(layers)
    state, metrics = step(step.init(layers.init), (X, X))
    assert_same_bits(metrics["t"], teacher()(X).sum())
    assert_same_bits(step.evaluate(state, (X, X))["t"], teacher()(X).sum())


def threaded(apply):
    def loss(params, x, buffers):
        out, new = apply.with_buffers(params, buffers, x)
        return out.square().mean(), {}, new

    return loss


def shows(apply, **kwargs):
    return lambda params, x: (torch.zeros(()), {"out": apply(params, x, **kwargs).sum()})


def same_module(module):
    return fds.functional(module)[0]


def same_module_in_eval_mode(module):
    return fds.functional(module.eval())[0]


def other_module_in_training_mode(module):
    return fds.functional(copy.deepcopy(module))[0]


@pytest.mark.parametrize("second", [same_module, same_module_in_eval_mode, other_module_in_training_mode])
def test_a_second_functional_call_leaves_it_open_and_says_what_to_write(second):
    module = net(0)
    apply, params, buffers = fds.functional(module)
    other = second(module)
    step, state, _ = trained(fds.with_buffers(threaded(apply), buffers), params, shows(other))
    with pytest.raises(LossError, match="which buffers") as caught:
        step.evaluate(state, X)
    assert "buffers=" in caught.value.want
    explicit = fds.compose(fds.accumulate(2), fds.sgd(0.1))(step.loss, shows(other, buffers=state.buffers))
    want = by_torch(module, state.params, state.buffers).sum()
    assert_same_bits(explicit.evaluate(state, X)["out"], want)
    given = fds.with_buffers(lambda p, x, b: (torch.zeros(()), {"out": other(p, x, buffers=b).sum()}, b), buffers)
    assert_same_bits(fds.compose(fds.accumulate(2), fds.sgd(0.1))(step.loss, given).evaluate(state, X)["out"], want)


@pytest.mark.parametrize(
    "change",
    [
        lambda buffers: {name: b.clone() for name, b in buffers.items()},
        lambda buffers: {**buffers, **prefixed("again", buffers)},
    ],
    ids=["copies", "twice"],
)
def test_buffers_that_cannot_be_recognised_are_refused(change):
    apply, params, buffers = fds.functional(net(0))
    names = set(buffers)

    def loss(params, x, buffers):
        out, new = apply.with_buffers(params, {k: b for k, b in buffers.items() if k in names}, x)
        return out.square().mean(), {}, {**buffers, **new}

    step, state, _ = trained(fds.with_buffers(loss, change(buffers)), params, shows(apply))
    with pytest.raises(LossError, match="which buffers"):
        step.evaluate(state, X)


def test_an_eval_fn_beside_layers_leaves_it_open():
    module = net(0)
    layers = fds.Layers(module, F.mse_loss)
    apply, _, _ = fds.functional(module)
    step = fds.compose(fds.sgd(0.1))(layers, lambda params, batch: apply(params, batch[0]).sum())
    state = step.init(layers.init)
    with pytest.raises(LossError, match="which buffers"):
        step.evaluate(state, (X, X[:, :2]))


def test_part_of_the_buffers_in_the_state_is_enough():
    module = net(0)
    apply, params, buffers = fds.functional(module)
    some = {name: b for name, b in buffers.items() if "tracked" not in name}
    counted = buffers["1.num_batches_tracked"]

    def loss(params, x, some):
        out, new = apply.with_buffers(params, {**some, "1.num_batches_tracked": counted}, x)
        return out.square().mean(), {}, {name: new[name] for name in some}

    step, state, _ = trained(fds.with_buffers(loss, some), params, shows(apply))
    want = by_torch(module, state.params, {**buffers, **state.buffers}).sum()
    assert_same_bits(step.evaluate(state, X)["out"], want)


class Student(nn.Module):
    """Holds teachers where `parameters()` does not find them."""

    def __init__(self, holder):
        super().__init__()
        self.inner, self.held = nn.Linear(3, 2), holder

    def forward(self, x):
        held = self.held["teacher"][0] if isinstance(self.held, dict) else self.held[0]
        return self.inner(x) - held(x)


@pytest.mark.parametrize(
    "holder", [lambda t: [t], lambda t: (t,), lambda t: {"teacher": [t]}], ids=["list", "tuple", "dict"]
)
def test_a_module_hidden_in_a_list_is_as_its_owner_left_it(holder):
    hidden = teacher().eval().requires_grad_(False)
    module = Student(holder(hidden))
    apply, params, _ = fds.functional(module)
    step = fds.compose(fds.sgd(0.0))(lambda p, x: apply(p, x).pow(2).mean())
    state = step.init(params)
    for factor in (1.0, 3.0):
        hidden.load_state_dict({name: x * factor for name, x in hidden.state_dict().items()})
        want = module(X).pow(2).mean()
        for got in (step(state, X)[1], step.evaluate(state, X)):
            assert_same_bits(got["loss"], want)


class Calling(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


@pytest.mark.parametrize("how", ["a part", "a function", "a list"])
def test_a_hidden_module_that_leads_to_a_part_follows_the_parameters(how):
    module = Student([])
    shared = {
        "a part": lambda: module.inner,
        "a function": lambda: Calling(lambda x: module.inner(x)),
        "a list": lambda: Calling([module.inner].__getitem__(0).forward),
    }[how]()
    module.held.append(nn.Sequential(shared, nn.Linear(2, 2)))
    apply, params, _ = fds.functional(module)
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    assert_same_bits(apply(zeros, X), -module.held[0][1].bias.expand(len(X), 2))


def test_a_teacher_that_is_loaded_anew_is_called_with_its_buffers():
    module = teacher().eval()
    apply, params, buffers = fds.functional(module)
    module.load_state_dict({name: x * 3 for name, x in module.state_dict().items()})
    assert_same_bits(apply(params, X, buffers=buffers), module(X))
