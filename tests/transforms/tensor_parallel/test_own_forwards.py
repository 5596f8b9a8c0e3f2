"""Modules whose own forwards use parameters: linear layers and embeddings of a user's class, and bare parameters."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.errors import ComposeError, LossError
from tests.transforms.tensor_parallel.models import EPS, check, squares, steps

split = fds.nn.split
IDS = torch.tensor([[0, 3, 6, 1], [2, 2, 5, 4]])
TOKENS = (IDS, torch.linspace(-1, 1, 56, dtype=torch.float64).view(2, 4, 7))


class FalconLinear(nn.Linear):
    """As transformers writes it."""

    def forward(self, input):
        hidden = input @ self.weight.T
        return hidden if self.bias is None else hidden + self.bias


class Scaled(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


class Noisy(nn.Linear):
    def forward(self, input):
        return F.dropout(super().forward(input), 0.5, self.training)


class Adapted(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.a, self.b = nn.Parameter(torch.randn(sizes[0], 2)), nn.Parameter(torch.randn(2, sizes[1]))

    def forward(self, input):
        return super().forward(input) + input @ self.a @ self.b


class Pair(nn.Module):
    def __init__(self, kind=FalconLinear, bias=True):
        super().__init__()
        self.up, self.down, self.drop = kind(8, 12), kind(12, 8), nn.Dropout(0.2)

    def forward(self, x):
        assert isinstance(self.up, nn.Linear)
        return x + self.down(self.drop(F.gelu(self.up(x))))


class ScaledEmbedding(nn.Embedding):
    """As Gemma's: what it looks up is scaled."""

    def forward(self, ids):
        return super().forward(ids) * self.scale().to(self.weight.dtype)

    def scale(self):
        return torch.tensor(3.0)


class Positions(nn.Embedding):
    """As BART's: with other ids, and normed."""

    def forward(self, ids):
        return F.normalize(super().forward(ids.flip(1) + 1), dim=-1)


class Direct(nn.Embedding):
    def forward(self, ids):
        return F.embedding(ids, self.weight)


class Tokens(nn.Module):
    def __init__(self, kind=ScaledEmbedding, kinds=FalconLinear):
        super().__init__()
        self.tokens, self.positions = kind(7, 6, padding_idx=3), Positions(8, 6)
        self.head = kinds(6, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head((self.tokens(ids) + self.positions(ids)).tanh())


class MLP(nn.Module):
    """Written out: a gate and a column in one, a norm of what is divided, a row, and its bias."""

    def __init__(self, inner=0.0):
        super().__init__()
        self.wide, self.narrow = nn.Parameter(torch.randn(8, 10) / 3), nn.Parameter(torch.randn(5, 8) / 3)
        self.scale, self.bias, self.inner = nn.Parameter(torch.rand(8)), nn.Parameter(torch.randn(8)), inner

    def forward(self, x):
        gate, up = ((x * self.scale) @ self.wide).chunk(2, -1)
        return F.dropout(F.silu(gate) * up, self.inner, self.training) @ self.narrow + self.bias


class Experts(nn.Module):
    """As Mixtral's: banks of weights, and a router's choice from outside."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 4) / 3), nn.Parameter(torch.randn(3, 4, 8) / 3)

    def forward(self, x, chosen, weights):
        out = torch.zeros_like(x)
        for expert in range(3):
            at = torch.where(chosen == expert)
            y = F.gelu(x[at[:-1]] @ self.up[expert]) @ self.down[expert]
            out = out.index_put(at[:-1], y * weights[at][:, None], accumulate=True)
        return out


class Mixture(nn.Module):
    def __init__(self, inner=0.0):
        super().__init__()
        self.router, self.experts, self.mlp = nn.Linear(8, 3), Experts(), MLP(inner)
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.2)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        x = x + self.drop(self.experts(self.norm(x), chosen, weights=weights))
        return x + self.drop(self.mlp(x))


SPLIT = {"wide": (1, 2), "narrow": 0, "scale": "sum", "bias": "once"}
MIXTURE = {"experts": split({"up": 2, "down": -2}), "mlp": split(SPLIT)}


@pytest.mark.parametrize("size", [2, 3])
def test_linear_layers_of_a_class_that_computes_the_same_are_divided(size):
    check(Pair, {"up": "column", "down": "row"}, size=size)


@pytest.mark.parametrize("kind", [Scaled, Noisy, Adapted])
def test_a_linear_layer_that_computes_something_else_is_refused(kind):
    for name, how in (("up", "column"), ("down", "row")):
        with pytest.raises(ComposeError, match=rf"cannot be divided as '{how}'[\s\S]*{kind.__name__}"):
            fds.simulate(lambda how=how, name=name: steps(lambda: Pair(kind), {name: how}, size=2), 2)


def test_embeddings_whose_own_forward_goes_on_with_what_is_looked_up_are_divided():
    check(Tokens, {"tokens": "vocab", "positions": "vocab", "head": "vocab"}, batch=TOKENS)


def test_an_embedding_that_looks_up_by_itself_is_refused_by_name():
    with pytest.raises(LossError, match=r"tokens.weight[\s\S]*embedding"):
        fds.simulate(lambda: steps(lambda: Tokens(Direct), {"[th]*": "vocab"}, size=2, batch=TOKENS), 2)


@pytest.mark.parametrize("size", [2, 3])
def test_bare_parameters_are_divided_as_they_are_named(size):
    check(Mixture, MIXTURE, size=size)


def test_bare_parameters_in_blocks_of_parts_of_sequences_are_divided():
    make = lambda: nn.Sequential(MLP(), MLP())
    check(make, {"*": split(SPLIT), "0": split(SPLIT)}, sequence=True)
    check(Holder, {"blocks.*": "sequence", "blocks.*.mlp": split(SPLIT)}, sequence=True)


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential() for _ in range(2)))
        for block in self.blocks:
            block.add_module("norm", nn.LayerNorm(8))
            block.add_module("mlp", MLP())
            block.add_module("drop", nn.Dropout(0.2))

    def forward(self, x):
        return self.blocks(x)


def test_bare_parameters_are_saved_whole_and_go_on_over_other_ranks(tmp_path):
    x = torch.linspace(-1, 1, 96, dtype=torch.float64).view(2, 6, 8)

    def run(size, calls, at):
        torch.manual_seed(0)
        apply, params, _ = fds.functional(Mixture().double())
        loss = lambda params, batch: squares(apply(params, batch), batch)
        axis = fds.mesh(tp=size)["tp"]
        step = fds.compose(fds.tensor_parallel(axis, MIXTURE, verify=True), fds.adamw(lr=0.01))(loss)
        state, losses = step.init(params, key=1), []
        state = fds.load(tmp_path / at, step, params)[0] if calls == 1 else state
        for _ in range(calls):
            state, metrics = step(state, x)
            losses.append(metrics["loss"])
        if calls == 2:
            fds.save(tmp_path / at, state, step)
        return losses, [tuple(state.params[name].shape) for name in ("experts.up", "mlp.wide", "mlp.bias")]

    (first, shapes), *_ = fds.simulate(lambda: run(2, 2, "two"), 2)
    assert shapes in ([(3, 8, 2), (8, 6), (8,)], [(3, 8, 2), (8, 4), (8,)])
    (last, _), *_ = fds.simulate(lambda: run(1, 1, "two"), 1)
    (want, _), *_ = fds.simulate(lambda: run(1, 3, "one"), 1)
    for got, wanted in zip([*first, *last], want, strict=True):
        assert torch.allclose(got, wanted, rtol=EPS, atol=EPS)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"wide": 1, "narrow": 0, "scale": "sum"}, "'bias', which it does not name"),
        (SPLIT | {"narow": 0}, "'narow', which is no parameter"),
        (SPLIT | {"narrow": 2}, "dim 2 of shape"),
        (SPLIT | {"wide": (1, 3)}, "parts of a projection"),
    ],
)
def test_a_split_that_does_not_fit_the_parameters_is_refused(plan, text):
    with pytest.raises((ComposeError, LossError), match=text):
        fds.simulate(lambda: steps(MLP, {"": split(plan)}, size=2), 2)


@pytest.mark.parametrize("plan", [None, {"w": "summed"}, {"w": True}, {"w": (1, 2, 3)}, {3: 1}, ["w"]])
def test_split_takes_names_and_dims(plan):
    with pytest.raises(ComposeError, match="split takes names"):
        split(plan)


def test_what_draws_for_what_may_be_a_piece_is_refused():
    with pytest.raises(LossError, match="a module that 'split' divides"):
        fds.simulate(lambda: steps(lambda: Mixture(0.3), MIXTURE, size=2), 2)


def test_a_whole_submodule_that_meets_pieces_says_so():
    class Inside(MLP):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x):
            return super().forward(self.norm(x))

    with pytest.raises(LossError, match=r"norm.weight[\s\S]*grads='sum'"):
        fds.simulate(lambda: steps(Inside, {"": split(SPLIT)}, size=2), 2)
    check(Inside, {"": split(SPLIT), "norm": fds.nn.replicated(grads="sum")})
