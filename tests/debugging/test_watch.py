"""What is not finite first is found by name: planted faults, each where it was planted."""

from unittest import mock

import attrs
import pytest
import torch
from torch import nn

import fds
from fds.debugging import NonFinite
from fds.errors import FdsError
from tests.bits import assert_same_bits

ROWS = 16
PARAMS = ("0.weight", "0.bias", "2.weight", "2.bias")


class Unit(nn.Module):
    def forward(self, x):
        return x / x.norm(dim=1, keepdim=True)


class Root(nn.Module):
    """Finite where it is 0, with a gradient that is not."""

    def forward(self, x):
        return x + (x - x.detach()).abs().sqrt()


def unit(x):
    return x / x.norm(dim=1, keepdim=True)


def batch(*zeroed):
    """Return rows of which those are zero."""
    x = torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(0))
    x[list(zeroed)] = 0.0
    return x, torch.ones(ROWS, 1)


def of_module(middle, last=1.0, first=None):
    torch.manual_seed(0)
    apply, params, _ = fds.functional(nn.Sequential(first or nn.Linear(4, 8), middle, nn.Linear(8, 1)))
    return (lambda params, batch: (apply(params, batch[0]) - batch[1]).square().mean() * last), params


def watched(loss, params, *transforms):
    step = fds.compose(*transforms, fds.adamw(0.01))(loss)
    return fds.watch(step), step.init(params, key=0)


def called(loss, params, *transforms, given=None):
    """Return what is found of a watched call that is skipped."""
    watch, state = watched(loss, params, fds.skip_nonfinite(), *transforms)
    watch(state, batch() if given is None else given)
    return watch.last


def found(loss, params, *transforms, given=None):
    with pytest.warns(UserWarning, match="was skipped"):
        return called(loss, params, *transforms, given=given)


def found_on_ranks(rank, size):
    """Return what every rank finds, which is the same."""
    with pytest.warns(UserWarning, match="was skipped"):  # of all threads
        first, *others = fds.simulate(rank, size)
    assert all((one, str(one)) == (first, str(first)) for one in others)
    return first


@pytest.mark.parametrize(("num_microbatches", "row", "at"), [(1, 11, [11, 0]), (4, 11, [3, 0])])
def test_the_module_is_named_with_operator_microbatch_and_row(num_microbatches, row, at):
    loss, params = of_module(nn.Linear(4, 8), first=Unit())
    watch, state = watched(loss, params, fds.accumulate(num_microbatches))
    before = fds.tree.map(torch.clone, state)
    with pytest.raises(FdsError, match="a step is not finite") as error:
        watch(state, batch(row))
    assert_same_bits(state, before)
    first = watch.last
    assert (first.part, first.module, first.kind, first.operator) == ("forward", "0", "Unit", "aten.div")
    assert first.microbatch == row * num_microbatches // ROWS
    given, norm, made = first.tensors
    assert (given.num_nan, norm.least, made.num_nan, list(made.first)) == (0, 0.0, 4, at)
    assert "'0' (Unit), aten.div" in error.value.where and "loss nan" in error.value.got
    assert first.params == ("1.weight", "1.bias", "2.weight", "2.bias")


def test_a_finite_loss_with_gradients_that_are_not_is_found_in_backward():
    first = found(*of_module(Root()))
    assert (first.part, first.module, first.kind, first.operator) == ("backward", "1", "Root", "aten.div")
    assert first.params == ("0.weight", "0.bias")  # what is behind the fault, and nothing else


def test_what_is_computed_again_in_backward_is_named_as_well():
    first = found(*of_module(Root()), fds.checkpoint_activations())
    assert (first.part, first.module, first.operator) == ("backward", "1", "aten.div")


@pytest.mark.parametrize("mask", ["filled", "computed"])
def test_a_mask_of_infinities_is_not_blamed(mask):
    def loss(params, batch):
        scores = batch[0] @ params["w"]
        hidden = torch.ones(ROWS, 4).triu(1) > 0
        below = scores.masked_fill(hidden, -torch.inf) if mask == "filled" else scores + (~hidden).float().log()
        weights = below.softmax(1)
        return (weights.sum() / (weights.sum() - weights.sum().detach())).square()  # x / 0

    first = found(loss, {"w": torch.eye(4)})
    assert (first.part, first.operator) == ("forward", "aten.div")


def test_a_mask_in_forward_is_not_blamed_for_a_fault_in_backward():
    def loss(params, batch):
        below = [torch.ones(ROWS, 4).tril().log() for _ in range(40)]
        weights = (batch[0] @ params["w"] + sum(below)).softmax(1)
        return ((weights - weights.detach()).abs().sqrt() + weights).square().mean()

    first = found(loss, {"w": torch.eye(4)})
    assert (first.part, first.operator) == ("backward", "aten.div")


def test_an_overflow_of_float16_is_found_where_it_happens():
    loss, params = of_module(nn.Tanh(), last=100.0)
    first = found_by_scale(loss, params, fds.precision(torch.float16), fds.loss_scale(initial=2.0**15))
    assert first.part == "backward" and first.tensors[-1].dtype == "float16" and first.tensors[-1].num_inf
    assert not any(one.num_inf or one.num_nan for one in first.tensors[:-1])
    loss, params = of_module(nn.Tanh())
    params["0.weight"] *= 1e6
    first = found_by_scale(loss, params, fds.precision(torch.float16), fds.loss_scale(initial=2.0**8))
    assert first.part == "gather" and [one.num_inf > 0 for one in first.tensors] == [False, True]


def found_by_scale(loss, params, *transforms):
    watch, state = watched(loss, params, *transforms)
    with pytest.warns(UserWarning, match="was skipped"):
        after, _ = watch(state, batch())
    assert int(after.step) == 0
    return watch.last


def test_what_a_call_was_given_is_named_before_what_it_does_with_it():
    loss, params = of_module(nn.Tanh())
    x, y = batch()
    x[3, 2] = torch.nan
    first = found(loss, params, given=(x, y))
    assert (first.part, first.tensors[0].name, first.tensors[0].first) == ("batch", "batch.0", (3, 2))
    watch, state = watched(loss, params)
    state.params["2.bias"].fill_(torch.inf)
    with pytest.raises(FdsError, match="an update before this call"):
        watch(state, batch())
    assert (watch.last.part, watch.last.tensors[0].name) == ("state", "params.2.bias")


def layers():
    first, last = fds.LayerSpec(nn.Linear, 4, 8, bias=False), fds.LayerSpec(nn.Linear, 8, 1)
    return fds.Layers([first, nn.Tanh(), unit, last], lambda out, y: (out - y).square().mean())


def test_a_layer_that_is_a_function_has_a_name():
    watch, state = watched(layers(), layers().init)
    with pytest.raises(FdsError):
        watch(state, batch(5))
    assert (watch.last.part, watch.last.module, watch.last.operator) == ("forward", "layers[2]", "aten.div")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_rank_hears_on_which_of_them_it_was(stage):
    def rank():
        dp = fds.mesh(dp=-1)["dp"]
        loss, params = of_module(nn.Linear(4, 8), first=Unit())
        x, y = (x.chunk(2)[dp.index] for x in batch(14))
        sharded = fds.shard_optimizer(dp, stage=stage), fds.accumulate(2)
        return called(loss, params, *sharded, given=(x, y))

    first = found_on_ranks(rank, 2)
    assert (first.module, first.rank, first.num_ranks, first.microbatch) == ("0", 1, 2, 1)
    assert first.tensors[-1].first == (2, 0)


def test_of_a_pipeline_the_stage_is_named_and_all_gradients():
    def rank():
        mesh = fds.mesh(pp=2, dp=2)
        whole = fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=2, partition=[0, 2, 4])
        sharded = fds.shard_optimizer(mesh["dp"], stage=1)
        given = tuple(x.chunk(2)[mesh["dp"].index] for x in batch(3))
        return called(layers(), layers().init, whole, sharded, given=given)

    first = found_on_ranks(rank, 4)
    assert (first.module, first.stage, first.microbatch, first.rank) == ("layers[2]", 1, 0, 2)
    assert set(first.params) == {"0.weight", "3.weight", "3.bias"}


def test_a_sum_over_ranks_that_overflows_is_between_them():
    def loss(params, batch):
        return (params["w"] * batch[0].sum() * 3e38).sum() / batch[0].sum()

    def rank():
        dp = fds.mesh(dp=-1)["dp"]
        sharded = fds.shard_optimizer(dp, stage=0, predivide=1.0)
        return called(loss, {"w": torch.full((3,), 1e-30)}, sharded)

    first = found_on_ranks(rank, 2)
    assert (first.part, first.params, first.tensors) == ("reduce", ("w",), ())


@pytest.mark.parametrize("donates", [False, True])
def test_a_watched_run_has_the_bits_of_the_run(donates):
    loss, params = of_module(nn.Linear(4, 8), first=Unit())
    transforms = [fds.loss_scale(initial=2.0**8, hysteresis=1), fds.ema(0.9), *[fds.donate()] * donates]
    watch, state = watched(loss, params, *transforms)
    step = watch.step
    plain = step.init(params, key=0)
    random = torch.get_rng_state()
    state, metrics = watch(state, batch())
    with pytest.warns(UserWarning, match="after 1 others was skipped"):
        state, metrics = watch(state, batch(7))
    for _ in range(2):
        state, metrics = watch(state, batch())
    assert torch.equal(torch.get_rng_state(), random)
    for i in range(4):
        plain, expected = step(plain, batch(*[7] * (i == 1)))
    assert_same_bits((state, metrics), (plain, expected))
    assert (watch.last.call, watch.last.module, int(state.step)) == (1, "0", 3)


def test_a_replay_draws_the_numbers_of_the_call():
    seen = []

    def loss(params, batch):
        seen.append(torch.rand(()))
        return (params["w"] * batch[0]).sum() / 0

    watch, state = watched(loss, {"w": torch.ones(4)}, fds.skip_nonfinite(), fds.donate())
    for i in range(2):
        with pytest.warns(UserWarning, match=f"after {i} others was skipped"):
            state, _ = watch(state, batch())
    assert seen[0] == seen[1] != seen[2] == seen[3]


def test_a_step_without_a_norm_has_it_measured_and_others_are_taken_as_they_are():
    loss, params = of_module(Root())
    watch, state = watched(loss, params)
    with pytest.raises(FdsError, match="grad_norm nan"):
        watch(state, batch())
    step = fds.compose(fds.clip_by_global_norm(1.0), fds.adamw(0.01))(loss)
    assert fds.watch(step).step is step


def test_a_replay_of_what_is_finite_says_so():
    loss, params = of_module(nn.Tanh())
    watch, state = watched(loss, params)
    assert watch.replay(state, batch()) == NonFinite(0, 0, 1, "nowhere")
    assert str(watch.last) == "None" and repr(watch).startswith("watch(compose(")


class OnGPU(torch.Tensor):
    """A number that says that it is on a GPU."""

    @property
    def device(self):
        return torch.device("cuda", 0)

    def to(self, device, *, non_blocking):
        assert device == "cpu" and non_blocking
        return self.as_subclass(torch.Tensor).clone()


def test_on_a_gpu_a_call_is_looked_at_in_the_next_one_and_the_last_at_the_end():
    loss, params = of_module(nn.Tanh())
    watch, state = watched(loss, params)
    losses, replayed, waited = iter([torch.nan, 1.0, torch.nan]), [], []
    event = mock.Mock(synchronize=lambda: waited.append(1))

    def step(state, batch):
        after = attrs.evolve(state, step=state.step.as_subclass(OnGPU), calls=state.calls + 1)
        return after, {"loss": torch.tensor(next(losses)).as_subclass(OnGPU)}

    def replay(step, state, batch):
        replayed.append((int(state.calls), batch))
        return NonFinite(int(state.calls), 0, 1, "nowhere")

    watch.step = step
    with (
        mock.patch("torch.cuda.Event", return_value=event),
        mock.patch("torch.cuda.current_stream"),
        mock.patch("fds.debugging._watch.replay", replay),
    ):
        after, _ = watch(state, "first")
        assert not waited and not replayed
        with pytest.raises(FdsError, match="the call after 0 others"):
            watch(after, "second")
        assert replayed == [(0, "first")]
        watch(after, "third")
        assert len(waited) == 2 and len(replayed) == 1
        with pytest.raises(FdsError, match="the call after 1 others"):
            watch.finish()
    assert replayed == [(0, "first"), (1, "third")]


def test_steps_that_leave_nothing_to_replay_are_refused():
    loss, _ = of_module(nn.Tanh())
    with pytest.raises(FdsError, match="only a step can be watched"):
        fds.watch(loss)
    with pytest.raises(FdsError, match="a step that donates leaves no state"):
        fds.watch(fds.compose(fds.donate(), fds.adamw(0.01))(loss))
    watch, state = watched(lambda p, b: p["w"].sum() + torch.tensor(torch.inf), {"w": torch.ones(2)},
                           fds.skip_nonfinite(), fds.donate())  # fmt: skip
    with pytest.raises(FdsError, match="was not skipped"):
        watch(state, batch())
