"""A step that ranks divide beside the same step on one rank: what no other check sees is named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.debugging import compare_with_one_rank
from fds.errors import BatchError, ComposeError, LossError, StateError
from fds.nn import column, heads, replicated, vocab
from tests import ranks
from tests.transforms.tensor_parallel.models import Head

X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Block(nn.Module):
    """An up and a down, and what stands between them."""

    def __init__(self, between=lambda self, x, y: F.gelu(y)):
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, 12), nn.Linear(12, 8), between

    def forward(self, x):
        return F.dropout(self.down(self.between(self, x, self.up(x))), 0.25, self.training)


class Lora(Block):
    def __init__(self):
        super().__init__(lambda self, x, y: y + self.b(self.a(x)))
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 12, bias=False)


class HeadByHead(nn.Module):
    """Queries, keys and values of one head after those of another, as GPT-NeoX, Bloom and Falcon have them."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, 6)).transpose(1, 2).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


PAIR = {"up": "column", "down": "row"}
LORA = {**PAIR, "b": "column"}
square = lambda y: y.square().mean()
tokens = lambda y: F.cross_entropy(y.flatten(0, 1), torch.arange(8) % 6)


def compared(make, plan, loss=square, dtype=torch.float64, world=2, **options):
    """Return what `compare_with_one_rank` says of a plan, or raises, the same on every rank."""

    def run():
        torch.manual_seed(0)
        apply, params, _ = fds.functional(make().to(dtype))
        recipe = fds.compose(fds.tensor_parallel(fds.mesh(tp=-1)["tp"], plan, **options), fds.adamw(0.1))
        step = recipe(lambda params, batch: loss(apply(params, batch)))
        state = step.init(params, key=1)
        before = fds.tree.map(torch.clone, state)
        try:
            found = compare_with_one_rank(step, state, X.to(dtype))
        except LossError as error:
            found = str(error)
        assert all(map(torch.equal, fds.tree.leaves(state), fds.tree.leaves(before)))
        return found

    found = fds.simulate(run, world)
    assert all(one == found[0] for one in found)
    return found[0]


WRONG = {
    "softmax of features": (lambda: Block(lambda self, x, y: y.softmax(-1)), PAIR, square, "down.bias"),
    "a mean of features": (lambda: Block(lambda self, x, y: y - y.mean(-1, keepdim=True)), PAIR, square, "up.weight"),
    "parts of one matrix": (lambda: Block(lambda self, x, y: y.flip(-1)), PAIR, square, "down.weight"),
    "a gradient twice": (Lora, {**LORA, "a": replicated("sum")}, square, "a.weight: off by 1, it is 2 times"),
    "parts where heads were meant": (
        HeadByHead, {"": heads(), "qkv": column(parts=3), "out": "row"}, square, "qkv.weight",
    ),
    "a head that every rank has a piece of": (Head, {"head": "column"}, tokens, "head.weight"),
    "its vocabulary": (Head, {"head": vocab(gather=False)}, tokens, "head.weight"),
}  # fmt: skip
RIGHT = {
    "a pair": (Block, PAIR, square),
    "heads": (HeadByHead, {"": heads(), "qkv": column(unit=6), "out": "row"}, square),
    "logits that are gathered": (Head, {"head": "vocab"}, tokens),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_no_other_check_sees_is_named(case):
    make, plan, loss, name = WRONG[case]
    found = compared(make, plan, loss)
    if "compare_with_one_rank" in found:  # else another check saw it before
        assert "the step over these ranks is not that of one rank" in found and name in found, found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_is_within_roundings(case, dtype):
    found = compared(*RIGHT[case], dtype=dtype)
    assert max(found.differences.values()) < found.tolerance < 400 * torch.finfo(dtype).eps, found
    assert abs(found.loss - found.loss_of_one_rank) < found.tolerance and "gradients differ by at most" in str(found)


def product(stage):
    """Return how far a step over data, sequence and tensor ranks is from one rank, with microbatches and more."""
    mesh = fds.mesh(dp=2, sp=2)
    axis = mesh["sp"]

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(0.3)

        def forward(self, x):
            q, k, v = (y.unflatten(-1, (4, 2)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
            y = fds.nn.attention(q, k, v, axis=axis, method="ring", layout="zigzag", causal=True)
            return x + self.drop(self.out(y.transpose(1, 2).flatten(2)))

    torch.manual_seed(0)
    apply, params, _ = fds.functional(Attention().double())
    loss = lambda p, x: fds.Mean(apply(p, x["x"]).square().sum() * x["scale"], x["x"].shape[:2].numel())
    step = fds.compose(
        fds.context_parallel(axis, layout="zigzag", verify=True),
        fds.shard_optimizer(mesh["dp", "sp"] if stage == 3 else mesh["dp"], stage=stage),
        fds.accumulate(2),
        fds.freeze("qkv.bias"),
        fds.clip_by_global_norm(0.1),
        fds.ema(0.9),
        fds.loss_scale(),
        fds.adamw(0.1),
    )(loss)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4, 8, 8, generator=g, dtype=torch.float64).chunk(2)[mesh["dp"].index]
    batch = {"x": fds.nn.zigzag(x, axis), "scale": fds.whole(torch.tensor(2.0, dtype=torch.float64))}
    state, _ = step(step.init(params, key=0), batch)
    state, _ = step(state, batch)
    return compare_with_one_rank(step, state, batch)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_data_and_sequence_ranks_are_one_rank_with_whole_rows(stage):
    found = fds.simulate(lambda: product(stage), 4)
    assert all(one == found[0] for one in found) and {*found[0].differences} == {"qkv.weight", "out.weight", "out.bias"}
    assert max(found[0].differences.values()) < 1e-14


def test_processes_over_gloo_say_the_same():
    found = ranks.run(_gloo)
    assert found[0] == found[1] and ("a.weight" in found[0] or "tensor_parallel" in found[0])


def _gloo():
    torch.manual_seed(0)
    apply, params, _ = fds.functional(Lora().double())
    plan = {**LORA, "a": replicated("sum")}
    tp = fds.tensor_parallel(fds.mesh(tp=-1)["tp"], plan, verify=True)
    step = fds.compose(tp, fds.adamw(0.1))(lambda params, batch: apply(params, batch).square().mean())
    state = step.init(params)
    with pytest.raises(LossError) as error:
        step(state, X)
    return str(error.value)


def pipelined():
    mesh = fds.mesh(pp=2, tp=2)
    torch.manual_seed(0)
    pair = lambda: nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
    layers = fds.Layers(
        nn.Sequential(nn.Embedding(16, 8), pair(), nn.Dropout(0.2), pair(), nn.Linear(8, 16)).double(),
        lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
    )
    plan = {"1.0": "column", "1.2": "row", "3.0": "column", "3.2": "row", "0": "vocab"}
    step = fds.compose(
        fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=4),
        fds.tensor_parallel(mesh["tp"], plan),
        fds.adamw(0.1),
    )(layers)
    state, x = step.init(layers.init, key=0), torch.arange(32).view(8, 4) % 16
    with pytest.raises(fds.FdsError) as error:
        compare_with_one_rank(step, state, (x, x) if mesh["pp"].index else None)
    assert isinstance(error.value, BatchError if mesh["pp"].index == 0 else StateError)
    return compare_with_one_rank(step, state, (x, x))


def test_stages_are_one_rank_and_every_rank_hears_of_one_without_a_batch():
    found = fds.simulate(pipelined, 4)
    assert all(one == found[0] for one in found) and max(found[0].differences.values()) < 1e-14


def test_one_rank_is_one_rank():
    step = fds.compose(fds.adamw(0.1))(lambda params, batch: (params["w"] * batch).square().mean())
    found = compare_with_one_rank(step, step.init({"w": torch.ones(8)}), X.float())
    assert found.differences == {"w": 0.0} and found.loss == found.loss_of_one_rank


def test_copies_that_are_made_equal_now_and_then_are_refused():
    def run():
        local = fds.local_updates(fds.mesh(n=-1)["n"], every=2)
        step = fds.compose(local, fds.sgd(0.1))(lambda params, batch: (params["w"] * batch).square().mean())
        with pytest.raises(StateError, match="parameters of their own"):
            compare_with_one_rank(step, step.init({"w": torch.ones(8)}), X.float())

    fds.simulate(run, 2)


def test_two_that_compare_are_told_that_one_does():
    def run():
        mesh = fds.mesh(tp=2, sp=2)
        apply, _, _ = fds.functional(Block())
        recipe = fds.compose(
            fds.tensor_parallel(mesh["tp"], PAIR, verify=True),
            fds.context_parallel(mesh["sp"], verify=True),
            fds.sgd(1.0),
        )
        with pytest.raises(ComposeError, match="one verify=True compares all of a step"):
            recipe(lambda params, batch: apply(params, batch).square().mean())

    fds.simulate(run, 4)


def test_a_first_call_alone_is_compared():
    calls = list[int]()

    def run():
        apply, params, _ = fds.functional(Block().double())
        tp = fds.tensor_parallel(fds.mesh(tp=-1)["tp"], PAIR, verify=True)
        loss = lambda params, batch: (calls.append(1), apply(params, batch).square().mean())[1]
        step = fds.compose(tp, fds.sgd(0.1))(loss)
        plain = fds.compose(fds.tensor_parallel(fds.mesh(tp=-1)["tp"], PAIR), fds.sgd(0.1))(loss)
        state = other = step.init(params, key=1)
        for _ in range(3):
            state, _ = step(state, X)
            other, _ = plain(other, X)
        assert all(map(torch.equal, fds.tree.leaves(state), fds.tree.leaves(other)))
        assert "compared with one rank" in str(step.describe())

    fds.simulate(run, 2)
    assert len(calls) == 2 * (3 + 2 + 3)
