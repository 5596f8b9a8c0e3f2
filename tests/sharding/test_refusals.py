"""What sharding refuses, in words; and how a first state is made where no rank has room for all of it."""

import functools

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import tree
from fds.errors import ComposeError, DonatedStateError, FdsError, LossError, RankError, StateError
from fds.layout import Sharded
from tests import ranks
from tests.bits import assert_same_bits, snapshot
from tests.memory import peak_bytes
from tests.sharding.models import data_axis, gpt, mine, tokens


def loss_fn(p, batch):
    return (p["w"] * batch.mean()).tanh().sum() + p["b"].sum() * batch.mean()


PARAMS = {"w": torch.linspace(-1, 1, 50), "b": torch.ones(3)}


def make(*more, optimizer=None, loss=loss_fn, **sharding):
    return fds.compose(fds.shard_optimizer(data_axis(), **sharding), *more, optimizer or fds.adamw(0.1))(loss)


def both(f, size=2):
    return fds.simulate(f, size)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"stage": 4}, "stage"),
        ({"stage": True}, "stage"),
        ({"stage": "2"}, "stage"),
        ({"stage": -1}, "stage"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"bucket_bytes": 1e6}, "bucket_bytes"),
        ({"bucket_bytes": True}, "bucket"),
        ({"prefetch": -1}, "prefetch"),
        ({"prefetch": None}, "prefetch"),
        ({"prefetch": 1.0}, "prefetch"),
        ({"persist_below": -1}, "persist_below"),
        ({"persist_below": "1"}, "persist_below"),
        ({"max_live_bytes": 0}, "max_live_bytes"),
        ({"max_live_bytes": "1GB"}, "max_live_bytes"),
        ({"predivide": 0}, "predivide"),
        ({"predivide": -1.0}, "predivide"),
        ({"predivide": float("inf")}, "predivide"),
        ({"predivide": float("nan")}, "predivide"),
        ({"predivide": "2"}, "predivide"),
        ({"replicate": 2}, "replicate"),
        ({"replicate": "dp"}, "replicate"),
    ],
)
def test_wrong_arguments_are_refused_by_name(wrong, words):
    with pytest.raises(ComposeError, match=words) as caught:
        fds.shard_optimizer(fds.mesh(dp=1)["dp"], **wrong)
    assert repr(next(iter(wrong.values()))) in str(caught.value)


@pytest.mark.parametrize("predivide", [True])
def test_a_flag_is_no_divisor(predivide):
    with pytest.raises(ComposeError):
        fds.shard_optimizer(fds.mesh(dp=1)["dp"], predivide=predivide)


@pytest.mark.parametrize("make_axis", [lambda: None, lambda: "dp", lambda: 2, lambda: fds.mesh(dp=1)])
def test_what_is_no_axis_is_refused(make_axis):
    with pytest.raises(ComposeError, match="axis is not an axis"):
        fds.shard_optimizer(make_axis())


def test_the_axis_may_be_written_once():
    with pytest.raises(ComposeError, match="shard_optimizer"):
        both(lambda: make(fds.shard_optimizer(data_axis())))


def test_axes_of_two_meshes_and_axes_that_overlap_are_refused():
    def run():
        one, other = fds.mesh(a=2, b=2), fds.mesh(c=2, b=2)
        for axis, replicate in ((one["a"], other["b"]), (one["a"], one["a"])):
            with pytest.raises(ComposeError, match="two axes of one mesh"):
                fds.shard_optimizer(axis, replicate=replicate)

    both(run, 4)


@pytest.mark.parametrize("case", ["overlap", "flattened"])
def test_flattened_axes_are_replicas_or_refused_in_words(case):
    def run():
        mesh = fds.mesh(a=2, b=2, c=1)
        if case == "overlap":
            with pytest.raises(ComposeError, match="two axes of one mesh"):
                fds.shard_optimizer(mesh["a", "b"], replicate=mesh["b"])
        else:
            fds.shard_optimizer(mesh["c"], replicate=mesh["a", "b"])

    both(run, 4)


def test_a_bound_without_room_is_refused_at_init_on_every_rank():
    def run():
        step = make(stage=3, bucket_bytes=256, max_live_bytes=300)
        with pytest.raises(StateError, match="max_live_bytes") as caught:
            step.init(PARAMS)
        return caught.value.got, caught.value.want

    for got, want in both(run):
        assert got.startswith("300") and want.startswith("at least 512")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda i: {**PARAMS, "more": torch.ones(2)} if i else PARAMS,
        lambda i: {"w": torch.ones(51), "b": torch.ones(3)} if i else PARAMS,
        lambda i: tree.map(lambda x: x.double() if i else x, PARAMS),
        lambda i: {"w": PARAMS["w"], "b": PARAMS["b"] / i},
        lambda i: {"w": PARAMS["w"], "b": [1.0] if i else PARAMS["b"]},
    ],
)
def test_other_parameters_on_one_rank_are_refused_on_all(wrong):
    def run():
        with pytest.raises(StateError) as caught:
            make().init(wrong(data_axis().index))
        return str(caught.value)

    assert all(both(run))


def test_a_donated_state_is_refused_everywhere():
    def run():
        axis = data_axis()
        step = make(fds.donate(), stage=2)
        state, batch = step.init(PARAMS), torch.ones(2) + axis.index
        step(state, batch)
        for use in (
            lambda: step(state, batch),
            lambda: step.params(state),
            lambda: step.evaluate(state, batch),
            lambda: step.describe(state),
            lambda: tree.map(torch.clone, state),
        ):
            with pytest.raises(DonatedStateError):
                use()

    both(run)


OTHERS = {
    "a plain state": lambda: fds.compose(fds.adamw(0.1))(loss_fn),
    "stage 0": lambda: make(stage=0),
    "half the ranks": lambda: fds.compose(hybrid(), fds.adamw(0.1))(loss_fn),
    "another optimizer": lambda: make(optimizer=fds.sgd(0.1, momentum=0.9), stage=1),
    "an average": lambda: make(fds.ema(0.9), stage=1),
    "groups": lambda: make(optimizer=fds.by_name({"b": fds.adamw(0.2), "*": fds.adamw(0.1)}), stage=1),
    "frozen": lambda: make(fds.freeze("b"), stage=1),
    "kept in float32": lambda: make(fds.precision(keep_float32="b"), stage=1),
    "another bound": lambda: make(stage=1, bucket_bytes=64),
}


def hybrid():
    mesh = fds.mesh(r=2, s=2)
    return fds.shard_optimizer(mesh["s"], replicate=mesh["r"])


@pytest.mark.parametrize("other", [*list(OTHERS)[:5], *(name for name in ("groups", "frozen", "kept in float32"))])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_of_another_sharding_is_refused_or_means_the_same(other, stage):
    """What a step would do with the parameters, it does; or it says that the state is not its own."""

    def run():
        batch = torch.ones(2) + data_axis().index
        seen = []

        def told(p, b):
            seen.append({k: x.dtype for k, x in p.items()})
            return loss_fn(p, b).float()

        given, takes = OTHERS[other](), make(stage=stage, loss=told)
        if other in ("groups", "frozen", "kept in float32"):  # here the state is one without them
            given, takes = make(fds.precision(keep_float32=()) if "kept" in other else fds.accumulate(1)), given
            takes = attrs.evolve(takes, loss=told)
        state = given.init(PARAMS)
        try:
            new, _ = takes(state, batch)
        except FdsError:
            return
        if other == "frozen":
            assert_same_bits(takes.params(new)["b"], PARAMS["b"])
        if other == "kept in float32":
            assert seen[-1]["b"] is torch.float32
        if other in ("a plain state", "stage 0", "half the ranks", "another optimizer", "an average"):
            raise AssertionError("this state was taken")

    both(run, 4)


def test_a_state_of_other_buckets_is_taken_as_it_is():
    def run():
        axis = data_axis()
        batch = torch.ones(2) + axis.index
        one, other = make(stage=1, bucket_bytes=64), make(stage=3)
        state, _ = one(one.init(PARAMS), batch)
        return one.params(one(state, batch)[0]), other.params(other(state, batch)[0])

    for a, b in both(run):
        assert_same_bits(a, b)


@pytest.mark.parametrize("stage", range(4))
def test_batches_that_do_not_divide_on_one_rank_alone_end_in_words(stage):
    def run():
        axis = data_axis()
        step = make(fds.accumulate(2), stage=stage)
        return step(step.init(PARAMS), torch.ones(2 + axis.index))

    with pytest.raises(FdsError, match="does not divide") as caught:
        both(run)
    assert "rank 1" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("stage", range(4))
def test_a_loss_that_writes_over_a_parameter_is_refused_with_its_name(stage):
    def f(p, b):
        p["w"].detach().add_(1)
        return loss_fn(p, b)

    def run():
        step = make(stage=stage, loss=f)
        state = step.init(PARAMS)
        kept = snapshot(step.params(state))
        with pytest.raises(LossError, match="w"):
            step(state, torch.ones(2))
        if stage:  # what was written was a gathered copy
            assert_same_bits(step.params(state), kept)

    both(run)


def test_ranks_that_do_different_things_are_told():
    def run():
        axis = data_axis()
        step = make(stage=1)
        state = step.init(PARAMS)
        return step(state, torch.ones(2)) if axis.index == 0 else step.evaluate(state, torch.ones(2))

    with pytest.raises(RankError):
        both(run)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x * self.scale


def specs():
    return fds.Layers(
        [
            fds.LayerSpec(nn.Embedding, 10, 8),
            *(fds.LayerSpec(nn.Linear, 8, 8) for _ in range(4)),
            fds.TiedLayerSpec("out", nn.Linear, 8, 10),
        ],
        lambda x, y: F.cross_entropy(x, y),
    )


@pytest.mark.sweep
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("recipe", ["module", "layers", "function"])
def test_what_a_recipe_makes_is_what_the_plain_step_makes(stage, recipe):
    layers = specs()
    loss = layers if recipe == "layers" else lambda p, b: sum(x.sum() for x in p.values()) * 0.1
    source = {
        "module": fds.recipe(Tiny),
        "layers": layers.init,
        "function": lambda key: {"w": torch.randn(40, generator=torch.Generator().manual_seed(int(key[0]) % 1000))},
    }[recipe]
    plain = fds.compose(fds.ema(0.9), fds.adamw(0.1))(loss)
    want = plain.init(source, key=7)

    def run():
        torch.manual_seed(data_axis().index)
        before = torch.get_rng_state()
        step = make(fds.ema(0.9), loss=loss, stage=stage, bucket_bytes=200)
        state, traced = step.init(source, key=7), step.structure(source)
        assert torch.equal(torch.get_rng_state(), before)
        got, told = tree.paths(state), tree.paths(traced)
        assert isinstance(state.params, Sharded) == (stage > 0)
        assert {k: (x.shape, x.dtype) for k, x in got.items()} == {k: (x.shape, x.dtype) for k, x in told.items()}
        assert all(x.is_meta for x in told.values())
        return step.params(state), state.key, step.params(attrs.evolve(state, params=state.slots["ema"]))

    for whole, key, average in both(run, 3):
        assert_same_bits((whole, key, average), (want.params, want.key, want.params))


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["module", "layers"])
def test_a_recipe_is_never_whole(stage, kind):
    """Beside its slices a rank holds little more than one layer, of ten."""
    layers = fds.Layers([fds.LayerSpec(nn.Linear, 128, 128) for _ in range(10)], nn.MSELoss())
    module = fds.recipe(lambda: nn.Sequential(*(nn.Linear(128, 128) for _ in range(10))))
    source, loss = (layers.init, layers) if kind == "layers" else (module, lambda p, b: p["0.weight"].sum())
    one = 4 * (128 * 128 + 128)

    def run():
        step, kept = make(loss=loss, stage=stage, bucket_bytes=1 << 17), []
        work = lambda: kept.append(step.init(source))
        peak = peak_bytes(work) if data_axis().index == 0 else work()
        return peak, tree.num_bytes(kept[0])

    peak, held = both(run)[0]
    assert held == pytest.approx(3 * 10 * one / 2, rel=0.02)
    assert peak <= held + 2.5 * one


@pytest.mark.parametrize("other", [lambda x: x * float("nan"), lambda x: x.to("meta")])
def test_ranks_that_have_room_but_no_values_take_those_of_rank_0(other):
    def run():
        step = make()
        return step.params(step.init(PARAMS if data_axis().index == 0 else tree.map(other, PARAMS)))

    for got in both(run):
        assert_same_bits(got, PARAMS)


def test_ranks_that_were_given_other_keys_have_the_key_of_rank_0():
    first, second = both(lambda: make().init(PARAMS, key=3 + data_axis().index))
    assert_same_bits([first.key, second.key], [fds.random.key(3)] * 2)


def test_ranks_at_different_calls_are_told_on_all():
    def run():
        step = make()
        state = step.init(PARAMS)
        with pytest.raises(RankError, match="at different calls") as caught:
            step(attrs.evolve(state, calls=state.calls + data_axis().index), torch.ones(2))
        return caught.value.got

    assert both(run) == ["call 0 on this rank", "call 1 on this rank"]


@pytest.mark.parametrize("stage", [0, 1])
def test_layers_that_were_built_start_with_the_values_of_rank_0(stage):
    def run():
        torch.manual_seed(data_axis().index)
        layers = fds.Layers([nn.Linear(4, 4), nn.Linear(4, 2)], nn.MSELoss())
        step = make(loss=layers, stage=stage)
        want = {
            k: x.detach().clone()
            for m, i in zip(layers.layers, "01", strict=True)
            for k, x in ((f"{i}.{n}", p) for n, p in m.named_parameters())
        }
        return step.params(step.init(layers.init)), want

    results = both(run)
    for got, _ in results:
        assert_same_bits(got, results[0][1])


def test_buffers_start_with_the_values_of_rank_0():
    def run():
        torch.manual_seed(data_axis().index)
        loss = fds.with_buffers(lambda p, b, f: (loss_fn(p, b), {}, f), {"f": torch.randn(3)})
        return make(loss=loss).init(PARAMS).buffers["f"]

    one, other = both(run)
    assert torch.equal(one, other)


def one_raises_in_backward(stage):
    """Rank 1 ends in the middle of its backward; what does rank 0 hear?"""
    loss, params = gpt(width=16, layers=2, dropout=0.0)
    axis = data_axis()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise ZeroDivisionError

    def f(p, batch):
        p = {**p, "blocks.0.up.weight": Fails.apply(p["blocks.0.up.weight"])} if axis.index == 1 else p
        return loss(p, batch)

    step = fds.compose(fds.shard_optimizer(axis, stage=stage, bucket_bytes=4000), fds.adamw(0.1))(f)
    state = step.init(params)
    try:
        step(state, mine(tokens(4), axis))
    except BaseException as error:
        return type(error).__name__


def test_a_backward_that_raises_on_one_rank_ends_the_others():
    assert ranks.run(one_raises_in_backward, 2, timeout=8.0) == ["RankError", "ZeroDivisionError"]


def forgets_a_leaf():
    axis = data_axis()
    step = fds.compose(fds.shard_optimizer(axis, stage=1), fds.adamw(0.1))(loss_fn)
    try:
        step.init({**PARAMS, "more": torch.ones(2)} if axis.index else PARAMS)
    except FdsError as error:
        return type(error).__name__, error.what


def test_other_parameters_on_one_real_rank_are_refused_on_all():
    assert ranks.run(forgets_a_leaf) == [("StateError", "ranks were given different parameters")] * 2


def mixed(stage):
    """Bools, integers, empty and 0-d leaves, doubles: whatever gloo must carry."""
    params = {
        "mask": torch.tensor([True, False, True]),
        "table": torch.arange(70),
        "none": torch.ones(0, 3),
        "t": torch.tensor(0.5),
        "wide": torch.linspace(0, 1, 33, dtype=torch.float64),
        "low": torch.linspace(0, 1, 65).bfloat16(),
        "half": torch.ones(5, dtype=torch.float16),
    }

    def f(p, b):
        x = p["wide"].sum() * b.mean() + p["low"].float().square().sum() + p["half"].float().sum()
        return x + p["t"] * p["mask"].sum() + p["table"].float().mean() * p["t"] + p["none"].sum()

    axis = data_axis()
    step = fds.compose(
        fds.shard_optimizer(axis, stage=stage, bucket_bytes=200), fds.clip_by_global_norm(1.0), fds.adamw(0.1)
    )(f)
    state = step.init(params)
    for _ in range(2):
        state, _ = step(state, torch.ones(2) + axis.index)
    return step.params(state), step.evaluate(state, torch.ones(2))


@pytest.mark.parametrize("stage", [1, 3])
def test_leaves_of_every_dtype_travel_between_real_ranks(stage):
    found = ranks.run(mixed, stage)
    assert_same_bits(found, fds.simulate(functools.partial(mixed, stage), 2))
    assert found[0][0]["mask"].tolist() == [True, False, True]
