"""`step.into`: what was trained, back in a module."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.errors import StateError
from tests.bits import assert_same_bits, snapshot

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


class Tied(nn.Module):
    """A tied weight, batch norm, a constant buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("factor", torch.ones(4), persistent=False)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))) * self.factor


def made(seed=0):
    torch.manual_seed(seed)
    return Tied()


def with_norm(apply):
    def loss(params, batch, buffers):
        out, new = apply.with_buffers(params, buffers, batch[0])
        return F.mse_loss(out, batch[1]), {}, new

    return loss


def trained(*transforms):
    apply, params, buffers = fds.functional(made())
    step = fds.compose(*transforms, fds.adamw(0.1))(fds.with_buffers(with_norm(apply), buffers))
    state, _ = step(step.init(params), (X, Y))
    return step, state


@pytest.mark.parametrize("transforms", [(), (fds.donate(),), (fds.freeze("norm.*"), fds.accumulate(2))])
def test_a_module_is_what_was_trained(transforms):
    step, state = trained(*transforms)
    module, before = made(5), snapshot(state)
    tensors = {id(x) for x in [*module.parameters(), *module.buffers()]}
    assert step.into(module, state) is module
    assert {id(x) for x in [*module.parameters(), *module.buffers()]} == tensors
    assert module.last.weight is module.first.weight
    assert_same_bits(dict(module.named_parameters()), state.params)
    assert_same_bits(dict(module.named_buffers()), state.buffers)
    assert_same_bits(module.eval()(X), step.evaluate(state, (X, Y), outputs=True)["outputs"])
    assert_same_bits(state, before)
    assert all(p.requires_grad and p.is_leaf for p in module.parameters())


def test_the_module_keeps_its_dtypes():
    step, state = trained()
    module = step.into(made().bfloat16(), state)
    assert_same_bits(module.first.weight.detach(), state.params["first.weight"].bfloat16())
    assert module.norm.num_batches_tracked == 1


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_share_a_step_all_get_it_whole(stage):
    def run():
        dp = fds.mesh(dp=-1)["dp"]
        step, state = trained(fds.shard_optimizer(dp, stage=stage))
        module = step.into(made(5 + dp.index), state)
        return dict(module.state_dict()), step.params(state)

    (one, params), (two, _) = fds.simulate(run, 2)
    assert_same_bits(one, two)
    assert_same_bits({name: one[name] for name in params}, params)


def test_stages_of_a_pipeline_collect_parameters_and_buffers():
    def layers():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4))

    def run(*transforms):
        loss = fds.Layers(layers(), F.mse_loss)
        step = fds.compose(*(t() for t in transforms), fds.sgd(0.1))(loss)
        state, _ = step(step.init(loss.init), (X, Y))
        return dict(step.into(copy.deepcopy(layers()), state).state_dict())

    (want,) = fds.simulate(lambda: run(lambda: fds.accumulate(2)), 1)
    piped = lambda: fds.pipeline(fds.plans.one_f_one_b, fds.mesh(pp=-1)["pp"], num_microbatches=2)
    for got in fds.simulate(lambda: run(piped), 2):
        assert_same_bits(got, want)


@pytest.mark.parametrize("nested", [False, True])
def test_a_prefix_names_one_of_several_modules(nested):
    student, other = fds.functional(made()), fds.functional(nn.Linear(4, 4))
    tree = {"student": student[1], "other": other[1]}
    flat = {f"{name}.{key}": x for name, params in tree.items() for key, x in params.items()}
    buffers = {f"student.{key}": b for key, b in student[2].items()}

    def loss(params, batch, buffers):
        part = lambda name: {k.removeprefix(name): x for k, x in params.items() if k.startswith(name)}
        split = params if nested else {name: part(f"{name}.") for name in tree}
        mine = {k.removeprefix("student."): b for k, b in buffers.items()}
        out, new = student[0].with_buffers(split["student"], mine, other[0](split["other"], batch[0]))
        return F.mse_loss(out, batch[1]), {}, {f"student.{key}": b for key, b in new.items()}

    step = fds.compose(fds.sgd(0.1))(fds.with_buffers(loss, buffers))
    state, _ = step(step.init(tree if nested else flat), (X, Y))
    module = step.into(made(5), state, prefix="student.")
    paths = fds.tree.paths(state.params)
    assert_same_bits(module.first.weight.detach(), paths["student.first.weight"])
    assert_same_bits(module.norm.running_mean, state.buffers["student.norm.running_mean"])
    assert_same_bits(step.into(nn.Linear(4, 4), state, prefix="other.").weight.detach(), paths["other.weight"])
    with pytest.raises(StateError, match="another prefix"):
        step.into(made(5), state, prefix="student.", buffers_prefix="teacher.")


class Renamed(Tied):
    def __init__(self):
        super().__init__()
        self.again = self._modules.pop("first")


class Wider(Tied):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)


class Untied(Tied):
    def __init__(self):
        super().__init__()
        self.last.weight = nn.Parameter(self.first.weight.detach().clone())


class Overlapping(Tied):
    def __init__(self):
        super().__init__()
        self.last.bias = nn.Parameter(self.first.bias.detach())


class WithoutNorm(Tied):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)


REFUSED = {
    "missing": Renamed,
    "shape": Wider,
    "untied": Untied,
    "overlapping": Overlapping,
    "buffers": WithoutNorm,
    "meta": lambda: Tied().to("meta"),
    "no module": dict,
    "integers": lambda: _integers(),
    "expanded": lambda: _expanded(),
}


def _integers():
    module = made()
    module.norm.num_batches_tracked = module.norm.num_batches_tracked.int()
    return module


def _expanded():
    module = made()
    module.last.bias = nn.Parameter(torch.zeros(1).expand(4))
    return module


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_a_module_that_does_not_fit_is_refused_before_anything_is_written(make):
    step, state = trained()
    module = make()
    real = isinstance(module, nn.Module) and not module.last.weight.is_meta
    before = snapshot(dict(module.state_dict())) if real else None
    with pytest.raises(StateError):
        step.into(module, state)
    if real:
        assert_same_bits(dict(module.state_dict()), before)


def test_tied_parameters_that_are_apart_in_the_state_are_refused():
    apply, params, buffers = fds.functional(Untied())
    step = fds.compose(fds.sgd(0.1))(fds.with_buffers(with_norm(apply), buffers))
    with pytest.raises(StateError, match="ties"):
        step.into(made(), step.init(params))


def test_where_one_rank_refuses_nobody_writes():
    def run():
        dp = fds.mesh(dp=-1)["dp"]
        step, state = trained(fds.shard_optimizer(dp, stage=2))
        module = made(5) if dp.index else Wider()
        before = snapshot(dict(module.state_dict()))
        with pytest.raises(StateError) as caught:
            step.into(module, state)
        assert_same_bits(dict(module.state_dict()), before)
        return caught.value.what

    assert fds.simulate(run, 2) == ["the module's is of another kind", "another rank cannot write into its module"]
