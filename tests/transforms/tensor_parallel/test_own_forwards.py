"""Modules whose own forwards use parameters: linear layers and embeddings of a user's class."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.errors import ComposeError, LossError
from tests.transforms.tensor_parallel.models import check, steps

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
