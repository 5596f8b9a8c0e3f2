"""Views that read other parameters: scores of a mask, factors of low rank, at every stage and in a pipeline."""

import pytest
import torch
from torch import nn

import fds
from fds import plans
from fds.errors import ComposeError
from tests.bits import assert_rounding, assert_same_bits
from tests.sharding.models import data_axis, mine

WIDTH = 6
ROWS = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)), torch.ones(8, WIDTH)


class Adapted(nn.Linear):
    """A linear layer whose weight is read with the product of two factors, and through a mask that scores choose."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.up, self.down = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))
        self.scores = nn.Parameter(torch.randn(WIDTH, WIDTH))


class Product:
    """weight + up @ down."""

    draws = False

    def reads(self, leaf, call):
        name, _, last = leaf.name.rpartition(".")
        return (f"{name}.up", f"{name}.down") if last == "weight" and name in ("0", "2") else ()

    def __call__(self, x, leaf, call, read):
        up, down = read.values() if read else (None, None)
        return x if up is None else x + up @ down


class Mask:
    """weight where its score is above 0; straight through to the scores."""

    draws = False

    def reads(self, leaf, call):
        return [leaf.name.replace("weight", "scores")] if leaf.name in ("0.weight", "2.weight") else []

    def __call__(self, x, leaf, call, read):
        for scores in read.values():
            mask = (scores > 0).to(x.dtype)
            return x * (mask + scores - scores.detach())
        return x


@fds.step.transform
def adapted(*views):
    def apply(step):
        for view in views:
            step = fds.step.fill(step, view=view)
        return step

    return apply


def layers():
    return fds.Layers([fds.LayerSpec(Adapted), torch.tanh, fds.LayerSpec(Adapted)], nn.MSELoss())


VIEWS = (Product(), Mask())
PARAMS = layers().init(fds.random.key(1))


def trained(*more, axis=None, views=VIEWS):
    step = fds.compose(*more, adapted(*views), fds.sgd(0.1, momentum=0.9))(layers())
    state = step.init(PARAMS)
    for _ in range(3):
        state, _ = step(state, ROWS if axis is None else mine(ROWS, axis))
    return step.params(state), step.evaluate(state, ROWS if axis is None else mine(ROWS, axis))["loss"]


@pytest.fixture(scope="module")
def by_hand():
    """Return what torch's own autograd makes of it: no view, the weight computed in the loss."""
    params = {name: x.clone().requires_grad_() for name, x in PARAMS.items()}
    momenta = {name: torch.zeros_like(x) for name, x in params.items()}

    def loss(rows, targets):
        for i, then in (("0", torch.tanh), ("2", lambda x: x)):
            scores = params[f"{i}.scores"]
            mask = (scores > 0).float() + scores - scores.detach()
            weight = (params[f"{i}.weight"] + params[f"{i}.up"] @ params[f"{i}.down"]) * mask
            rows = then(nn.functional.linear(rows, weight, params[f"{i}.bias"]))
        return nn.functional.mse_loss(rows, targets)

    for _ in range(3):
        grads = torch.autograd.grad(loss(*ROWS), list(params.values()))
        with torch.no_grad():
            for (name, x), grad in zip(params.items(), grads, strict=True):
                momenta[name] = 0.9 * momenta[name] + grad
                x -= 0.1 * momenta[name]
    return {name: x.detach() for name, x in params.items()}, loss(*ROWS).detach()


def test_one_rank_is_the_loss_that_computes_it_itself(by_hand):
    assert_rounding(trained(), by_hand, additions=64)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("microbatches", [1, 2])
def test_stages(stage, microbatches, by_hand):
    def run():
        axis = data_axis()
        sharding = fds.shard_optimizer(axis, stage=stage, bucket_bytes=200)
        return trained(sharding, fds.accumulate(microbatches), axis=axis)

    for params, _ in fds.simulate(run, 2):
        assert_rounding(params, by_hand[0], additions=512)


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", [plans.one_f_one_b, plans.zb_h1])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_pipeline_with_data_ranks(schedule, stage, by_hand):
    def run():
        mesh = fds.mesh(pp=2, dp=2)
        shard = fds.shard_optimizer(mesh["dp"], stage=stage, bucket_bytes=200)
        return trained(fds.pipeline(schedule, mesh["pp"], num_microbatches=2), shard, axis=mesh["dp"])

    for params, _ in fds.simulate(run, 4):
        assert_rounding(params, by_hand[0], additions=4096)


class Shared:
    """Weights times a gain that the loss reads too."""

    draws = False

    def __init__(self, *names):
        self.names = names

    def reads(self, leaf, call):
        return ["gain"] if leaf.name in self.names else []

    def __call__(self, x, leaf, call, read):
        return x * read["gain"] if read else x


@pytest.mark.parametrize("names", ["a", "b", "ab"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_parameter_that_views_and_the_loss_read(stage, names):
    g = torch.Generator().manual_seed(0)
    params = {name: torch.randn(*shape, generator=g) for name, shape in (("a", (6, 6)), ("b", (6, 6)), ("last", (6,)))}
    params["gain"] = torch.tensor([0.5])
    loss_fn = lambda p, batch: ((torch.tanh(batch[0] @ p["a"]) @ p["b"] * p["gain"]).mul(p["last"])).square().mean()

    def run(*more, axis=None):
        step = fds.compose(*more, adapted(Shared(*names)), fds.sgd(0.01))(loss_fn)
        state = step.init(params)
        for _ in range(5):
            state, _ = step(state, ROWS if axis is None else mine(ROWS, axis))
        return step.params(state)

    def staged():
        axis = data_axis()
        return run(fds.shard_optimizer(axis, stage=stage, bucket_bytes=100), axis=axis)

    want = run(fds.accumulate(2))
    for got in fds.simulate(staged, 2):
        assert_rounding(got, want, additions=256)


def test_others_composed_with_it_move_no_bit():
    plain = trained()
    assert_same_bits(trained(fds.donate()), plain)
    assert_same_bits(trained(fds.checkpoint_activations()), plain)


class Itself:
    """The difference that the views before make, of a parameter that reads itself."""

    draws = False

    def reads(self, leaf, call):
        return [leaf.name] if leaf.name.endswith("weight") else []

    def __call__(self, x, leaf, call, read):
        return x - read[leaf.name] if read else x


@pytest.mark.parametrize("stage", [None, 0, 2, 3])
def test_a_view_reads_its_own_parameter_as_no_view_has_changed_it(stage):
    def run():
        axis = None if stage is None else data_axis()
        more = [] if stage is None else [fds.shard_optimizer(axis, stage=stage, bucket_bytes=200)]
        return trained(*more, axis=axis, views=(Product(), Itself()))[0]

    for params in [run()] if stage is None else fds.simulate(run, 2):
        for name in ("0", "2"):  # up @ down alone is left: a weight's own gradients are 0
            assert_same_bits(params[f"{name}.weight"], PARAMS[f"{name}.weight"])
            assert not torch.equal(params[f"{name}.up"], PARAMS[f"{name}.up"])


class Wrong(Product):
    def __init__(self, names):
        self.names = names

    def reads(self, leaf, call):
        return self.names


def test_what_is_not_there_is_refused():
    with pytest.raises(ComposeError, match="a view reads a parameter that is not there"):
        trained(views=(Wrong(["nothing"]),))
    for names in (None, "gain", [3]):
        with pytest.raises(ComposeError, match="no list of names"):
            trained(views=(Wrong(names),))
    with pytest.raises(ComposeError, match=r"\(x, leaf, call, read\)"):
        trained(
            views=(
                type("Three", (), {"reads": lambda self, leaf, call: (), "__call__": lambda self, x, leaf, call: x})(),
            )
        )
