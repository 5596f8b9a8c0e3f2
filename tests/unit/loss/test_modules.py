"""`functional`: a module as a function, and the module never knows."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.errors import LossError
from tests.bits import assert_same_bits, snapshot

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """Two names of one weight, one submodule under two names, one used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.again = self.first

    def forward(self, x, *, scale=1.0):
        return self.again(self.second(self.first(x))) * scale


class Reassigning(nn.Module):
    """Counts its calls as users write it: by assignment."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.linear(x) + self.calls


class Halving(nn.Module):
    """Keeps one buffer in files and one not, and writes into both."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("factor", torch.ones(()), persistent=False)

    def forward(self, x):
        self.calls.add_(1)
        self.factor.mul_(0.5)
        return self.linear(x) * self.factor


class Standardizing(nn.Module):
    """Calls torch's functional batch norm, which changes its statistics without telling their version."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("var", torch.ones(2))

    def forward(self, x):
        return F.batch_norm(self.linear(x), self.mean, self.var, training=True)


class Failing(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        self.norm(x)
        raise KeyError("forward")


def everything_of(module):
    flags = {name: m.training for name, m in module.named_modules()}
    parameters = {name: (id(p), p.requires_grad, p.grad, p._version) for name, p in module.named_parameters()}
    buffers = {name: (id(b), b._version) for name, b in module.named_buffers()}
    return flags, parameters, buffers, snapshot(dict(module.state_dict()))


def assert_untouched(module, before):
    now = everything_of(module)
    assert now[:3] == before[:3]
    assert_same_bits(now[3], before[3])


def test_apply_is_the_module():
    module = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 2))
    apply, params, buffers = fds.functional(module)
    assert list(params) == [name for name, _ in module.named_parameters()]
    assert buffers == {}
    assert_same_bits(apply(params, X), module(X))


def test_parameters_are_the_modules_memory_without_its_graph():
    module = nn.Linear(3, 2)
    _, params, _ = fds.functional(module)
    assert params["weight"].data_ptr() == module.weight.data_ptr()
    assert not params["weight"].requires_grad


def test_other_parameters_give_another_output():
    apply, params, _ = fds.functional(nn.Linear(3, 2))
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    assert_same_bits(apply(zeros, X), torch.zeros(4, 2))


def test_tied_weights_have_one_name_and_the_sum_of_the_gradients():
    module = Tied()
    apply, params, _ = fds.functional(module)
    assert set(params) == {"first.weight", "first.bias", "second.bias"}
    assert_same_bits(apply(params, X), module(X))
    _, grads = fds.autodiff.value_and_grad(lambda p: apply(p, X).sum())(params)
    module(X).sum().backward()
    assert_same_bits(grads, {name: p.grad for name, p in module.named_parameters()})


def test_a_module_under_two_names_forgets_the_parameters_of_the_last_call():
    apply, params, _ = fds.functional(Tied())
    zeros = {name: torch.zeros_like(p) for name, p in params.items()}
    want = apply(params, X)
    assert_same_bits(apply(zeros, X), torch.zeros(4, 3))
    assert_same_bits(apply(params, X), want)


def test_a_module_under_two_names_does_not_keep_the_parameters_alive():
    module = nn.Module()
    module.one, module.forward = nn.Linear(3, 2), lambda x: x
    module.two = module.one
    apply, params, _ = fds.functional(nn.Sequential(module))
    params = snapshot(params)
    watched = weakref.ref(params["0.one.weight"])
    apply(params, X)
    del params
    gc.collect()
    assert watched() is None


def test_keyword_arguments_reach_the_module():
    module = Tied()
    apply, params, _ = fds.functional(module)
    assert_same_bits(apply(params, X, scale=2.0), module(X, scale=2.0))


@pytest.mark.filterwarnings("ignore::fds.errors.LossWarning")
@pytest.mark.parametrize("train", [True, False])
def test_the_module_is_never_touched(train):
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).train(train)
    module[0].bias.requires_grad_(False)
    before = everything_of(module)
    apply, params, buffers = fds.functional(module)
    loss = fds.with_buffers(lambda p, x, b: _with_loss(apply, p, x, b), buffers)
    step = fds.compose(fds.donate(), fds.freeze("0.bias"), fds.adamw(0.1))(loss)
    state = step.init(params)
    for _ in range(3):
        state, _ = step(state, X)
    step.evaluate(state, X)
    assert_untouched(module, before)


def _with_loss(apply, params, x, buffers):
    out, new = apply.with_buffers(params, buffers, x)
    return (out**2).mean(), {}, new


def test_the_module_is_not_touched_by_an_exception():
    module = Failing()
    before = everything_of(module)
    apply, params, buffers = fds.functional(module)
    for call in (lambda: apply(params, X), lambda: apply.with_buffers(params, buffers, X)):
        with pytest.raises(KeyError, match="forward"):
            call()
        assert_untouched(module, before)


def test_a_module_that_changes_later_changes_nothing():
    module = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.9)).eval()
    apply, params, _ = fds.functional(module)
    params = snapshot(params)
    want = apply(params, X)
    module.train()
    nn.init.zeros_(module[0].weight)
    module[0] = nn.Identity()
    assert_same_bits(apply(params, X), want)


def test_parts_in_eval_mode_stay_in_it():
    module = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    module[0].eval()
    apply, _, _ = fds.functional(module)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        got = apply({}, X)
        torch.manual_seed(0)
        assert_same_bits(got, F.dropout(X, 0.5))


@pytest.mark.parametrize(("params", "word"), [({}, "missing"), ({"weight": 0, "bias": 0, "more": 0}, "more")])
def test_parameters_of_another_module_are_refused(params, word):
    apply, _, _ = fds.functional(nn.Linear(3, 2))
    with pytest.raises(LossError) as caught:
        apply(params, X)
    assert word in caught.value.got


def test_a_meta_module_runs_on_real_parameters():
    with torch.device("meta"):
        apply, params, _ = fds.functional(nn.Linear(3, 2))
    assert {p.device.type for p in params.values()} == {"meta"}
    real = fds.functional(nn.Linear(3, 2))
    assert_same_bits(apply(real[1], X), real[0](real[1], X))


# --- buffers ---


def norms():
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=None))


def test_constant_buffers_are_captured():
    module = norms().eval()
    apply, params, _ = fds.functional(module)
    want = module(X)
    module[0].running_mean.fill_(5.0)
    assert_same_bits(apply(params, X), want)


def test_buffers_may_be_passed():
    module = norms().eval()
    apply, params, buffers = fds.functional(module)
    other = {**buffers, "0.running_mean": torch.full((3,), 2.0)}
    got = apply(params, X, buffers=other)
    module[0].running_mean.fill_(2.0)
    assert_same_bits(got, module(X))


def test_new_buffers_are_returned_and_the_old_ones_stay():
    module = norms()
    apply, params, buffers = fds.functional(module)
    before = snapshot(buffers)
    out, new = apply.with_buffers(params, buffers, X)
    assert_same_bits(buffers, before)
    assert_same_bits(out, module(X))
    assert_same_bits(new, dict(module.named_buffers()))


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm1d(3), nn.InstanceNorm1d(4, track_running_stats=True), Standardizing(), Halving(), Reassigning()],
    ids=["batch_norm", "instance_norm", "functional_batch_norm", "in_place", "by_assignment"],
)
def test_losing_a_change_of_buffers_is_refused_and_the_constants_stay(module):
    apply, params, _ = fds.functional(module)
    before = snapshot(apply.constants)
    for _ in range(2):
        with pytest.raises(LossError, match="with_buffers"):
            apply(params, X)
        assert_same_bits(apply.constants, before)


class Sometimes(nn.Module):
    """Changes a buffer in a branch that the first calls do not take."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(3, 2), change
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("var", torch.ones(2))
        self.kept = self.mean

    def forward(self, x, now=False):
        out = self.linear(x)
        return self.change(self, out) if now else out


def assigned(module, out):
    module.mean = module.mean + out.mean()
    return out


def assigned_what_it_was(module, out):
    module.mean = module.kept
    return out


def written(module, out):
    module.mean.mul_(0.5)
    return out


def normalized(module, out):
    return F.batch_norm(out, module.mean, module.var, training=True)


def viewed(module, out):
    module.mean = module.mean.view(2)
    return out


@pytest.mark.parametrize("change", [assigned, written, normalized])
@pytest.mark.parametrize("constant", [False, True])
def test_a_change_of_buffers_in_a_later_call_is_refused(change, constant):
    apply, params, buffers = fds.functional(Sometimes(change))
    some = {"var": buffers["var"]} if constant else {}
    call = lambda now: apply.with_buffers(params, some, X, now) if constant else apply(params, X, now)
    for _ in range(2):
        call(False)
        with pytest.raises(LossError, match="lose the change") as caught:
            call(True)
        assert "mean" in caught.value.where
    step = fds.compose(fds.sgd(0.1))(lambda p, b: apply(p, b[0], b[1]).mean())
    state, _ = step(step.init(params), (X, False))
    with pytest.raises(LossError, match="lose the change"):
        step(state, (X, True))


@pytest.mark.parametrize("change", [viewed, assigned_what_it_was])
def test_assigning_what_a_buffer_is_loses_nothing(change):
    apply, params, _ = fds.functional(Sometimes(change))
    for now in (False, True, True):
        apply(params, X, now)


def test_a_buffer_that_is_assigned_is_returned():
    module = Reassigning()
    apply, params, buffers = fds.functional(module)
    out, new = apply.with_buffers(params, buffers, X)
    assert_same_bits(out, module(X))
    assert new["calls"] == 1


def test_buffers_that_were_not_passed_never_change():
    apply, params, buffers = fds.functional(Halving())
    call = lambda: apply.with_buffers(params, {"calls": buffers["calls"]}, X)
    try:
        first = call()
        assert_same_bits(call(), first)
    except LossError:
        pass  # refusing is as good


def test_buffers_are_threaded_as_torch_does():
    module = norms()
    apply, params, buffers = fds.functional(module)
    step = fds.compose(fds.accumulate(4), fds.sgd(0.0))(
        fds.with_buffers(lambda p, x, b: _with_loss(apply, p, x, b), buffers)
    )
    x = torch.randn(8, 3)
    state = step.init(params)
    for _ in range(2):
        state, _ = step(state, x)
        for part in x.split(2):
            module(part)
    assert state.buffers["0.num_batches_tracked"] == 8
    assert_same_bits(state.buffers, dict(module.named_buffers()))


# --- recipes ---


def test_a_recipe_is_a_function_of_its_key():
    make = fds.recipe(lambda: nn.Linear(3, 2))
    before = torch.get_rng_state()
    a, b, c = make(fds.random.key(0)), make(fds.random.key(0)), make(fds.random.key(1))
    assert_same_bits(a, b)
    assert not torch.equal(a["weight"], c["weight"])
    assert not a["weight"].requires_grad
    assert torch.equal(torch.get_rng_state(), before)


def test_a_recipe_that_fails_leaves_the_generator():
    before = torch.get_rng_state()
    with pytest.raises(TypeError):
        fds.recipe(lambda: nn.Linear(int(torch.rand(3).sum()) + 2, "three"))(fds.random.key(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_that_the_module_wants_no_gradient_for_are_not_trained_by_accident():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    module[0].requires_grad_(False)
    apply, params, _ = fds.functional(module)
    loss = lambda p, x: apply(p, x).mean()
    step = fds.compose(fds.sgd(0.1))(loss)
    with pytest.raises(LossError, match="wants no gradient") as caught:
        step(step.init(params), X)
    assert caught.value.where == "0.bias, 0.weight"
    frozen = fds.compose(fds.freeze("0.*"), fds.sgd(0.1))(loss)
    state, _ = frozen(frozen.init(params), X)
    assert_same_bits(state.params["0.weight"], module[0].weight.detach())


def test_a_loss_that_calls_the_module_itself_is_refused():
    module = nn.Linear(3, 1)
    _, params, _ = fds.functional(module)
    step = fds.compose(fds.adamw(0.1))(lambda p, x: module(x).mean())
    with pytest.raises(LossError, match="a parameter of a module itself"):
        step(step.init(params), X)
