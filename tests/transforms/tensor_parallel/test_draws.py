"""Whatever draws on a piece of an activation draws what one rank draws, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fds
from fds.errors import LossError
from tests.transforms.tensor_parallel.models import check

PLAN: dict[str, Any] = {"up": "column", "down": "row"}


class MLP(nn.Module):
    """An MLP with something between its matrices, and something after them."""

    def __init__(self, between: Any, after: Any = None, hidden: int = 13, parts: int = 1):
        super().__init__()
        self.up, self.down, self.parts = nn.Linear(8, hidden * parts), nn.Linear(hidden, 8), parts
        self.between, self.after = between, after

    def forward(self, x):
        y = self.up(x)
        if self.parts == 2:
            a, b = y.chunk(2, -1)
            y = a.sigmoid() * b
        y = self.down(self.between(y))
        return x + (y if self.after is None else self.after(y))


def by_function(y):
    return F.dropout(y, 0.4)


KINDS = {
    "module": lambda: MLP(nn.Dropout(0.4), nn.Dropout(0.3)),
    "in place": lambda: MLP(nn.Dropout(0.4, inplace=True)),
    "function": lambda: MLP(by_function, by_function),
    "after": lambda: MLP(torch.tanh, by_function),
    "both": lambda: MLP(nn.Sequential(nn.Dropout(0.2), nn.GELU()), by_function),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_dropout_between_matrices_is_one_ranks(kind, size):
    check(KINDS[kind], PLAN, size=size)


@pytest.mark.parametrize("between", [nn.Dropout(0.4), by_function], ids=["module", "function"])
@pytest.mark.parametrize("hidden", [7, 8])
def test_dropout_of_one_of_two_parts_that_ranks_do_not_divide(between, hidden):
    plan = PLAN | {"up": fds.nn.column(parts=2)}
    check(lambda: MLP(between, hidden=hidden, parts=2), plan)


class Fused(nn.Module):
    """Dropout of what three projections of one matrix return together."""

    def __init__(self, width: int):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 3 * width), nn.Linear(width, 8), nn.Dropout(0.4)

    def forward(self, x):
        a, b, c = self.drop(self.up(x)).chunk(3, -1)
        return x + self.down(a * b + c)


@pytest.mark.parametrize("width", [4, 6, 7])
def test_dropout_of_all_parts_of_a_fused_projection(width):
    check(lambda: Fused(width), {"up": fds.nn.column(parts=3), "down": "row"}, size=3)


class Blocks(nn.Module):
    """Blocks that a plan calls "sequence", with dropout of every kind between matrices and beside them."""

    def __init__(self, drop: Any = by_function):
        super().__init__()
        self.blocks = nn.ModuleList(MLP(drop, nn.Dropout(0.3)) for _ in range(2))
        self.norm, self.drop = nn.LayerNorm(8), drop

    def forward(self, x):
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        return self.drop(self.norm(x))


class Attending(nn.Module):
    """Attention with dropout of what it returns inside, as GPT-2's has it."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.heads, self.after = 4, nn.Dropout(0.3)

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (self.heads, 2)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.after(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


class AttendingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), Attending()

    def forward(self, x):
        return x + self.attention(self.norm(x))


class AttendingBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(AttendingBlock(), AttendingBlock())

    def forward(self, x):
        return self.blocks(x)


@pytest.mark.parametrize("length", [5, 6])
def test_dropout_inside_of_attention_to_parts_of_sequences(length):
    plan = {"blocks.?": "sequence", "*.attention": fds.nn.heads("heads"), "*.[qkv]": "column", "*.out": "row"}
    check(AttendingBlocks, plan, sequence=True, shape=(2, length, 8), size=2)


@pytest.mark.parametrize("length", [5, 6])
def test_dropout_of_parts_of_sequences(length):
    plan = {"blocks.?": "sequence", "*.up": "column", "*.down": "row"}
    check(Blocks, plan, sequence=True, shape=(2, length, 8), size=4)


class Heads(nn.Module):
    """Attention by hand, with dropout on scores, and on heads that were put together."""

    def __init__(self, kind: str):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.heads, self.kind, self.drop = 4, kind, nn.Dropout(0.4)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.kind == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4 * self.training)
        else:
            weights = (q @ k.transpose(-2, -1)).softmax(-1)
            if self.kind == "weights":
                weights = self.drop(weights)
            elif self.kind == "function":
                weights = F.dropout(weights, 0.4, self.training)
            elif self.kind == "flat":
                weights = self.drop(weights.flatten(0, 1)).unflatten(0, (-1, self.heads))
            y = weights @ v
        y = y.transpose(1, 2).flatten(2)
        return x + self.out(self.drop(y) if self.kind == "output" else y)


ATTENTION = {"[qkv]": "column", "out": "row"}


@pytest.mark.parametrize("kind", ["sdpa", "weights", "function", "output"])
def test_dropout_in_attention_is_one_ranks(kind):
    check(lambda: Heads(kind), {"": fds.nn.heads("heads"), **ATTENTION}, size=4)


def test_dropout_of_heads_and_rows_in_one_dim_is_refused():
    with pytest.raises(LossError, match="cannot know the whole"):
        check(lambda: Heads("flat"), {"": fds.nn.heads("heads"), **ATTENTION})


class Unnamed(Heads):
    """Attention whose heads follow from widths, so that a plan may leave it out."""

    def forward(self, x):
        self.heads = self.q.weight.shape[0] // 2
        return super().forward(x)


@pytest.mark.parametrize("kind", ["weights", "function"])
def test_dropout_in_attention_that_no_plan_names_is_refused(kind):
    with pytest.raises(LossError, match="cannot know the whole"):
        check(lambda: Unnamed(kind), ATTENTION)


@pytest.mark.parametrize(
    "draw",
    [
        nn.AlphaDropout(0.3),
        nn.Dropout1d(0.3),
        lambda y: y + torch.rand_like(y),
        lambda y: F.alpha_dropout(y, 0.3, True),
    ],
    ids=["AlphaDropout", "Dropout1d", "rand_like", "alpha_dropout"],
)
def test_other_draws_on_pieces_are_refused_and_on_whole_activations_taken(draw):
    check(lambda: MLP(torch.tanh, draw), PLAN)
    with pytest.raises(LossError, match="draws for a piece"):
        check(lambda: MLP(draw), PLAN)


class Recomputing(nn.Module):
    """A user's blocks that recompute themselves, and begin with dropout."""

    def __init__(self, drop: Any):
        super().__init__()
        self.blocks = nn.ModuleList(MLP(drop, nn.Dropout(0.3)) for _ in range(3))
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda y, block=block: block(self.drop(y)), x, use_reentrant=False)
        return x


def test_dropout_of_a_module_that_recomputes_itself():
    check(lambda: Recomputing(nn.Dropout(0.4)), {"*.up": "column", "*.down": "row"})


def test_functions_that_draw_in_a_module_that_recomputes_itself_are_refused():
    with pytest.raises(LossError, match=r"torch\.utils\.checkpoint"):
        check(lambda: Recomputing(by_function), {"*.up": "column", "*.down": "row"})


def attending(y):
    x = y.unflatten(-1, (-1, 1)).transpose(-3, -2)  # a head of each feature
    return y + F.scaled_dot_product_attention(x, x, x).transpose(-3, -2).flatten(-2)


@pytest.mark.parametrize("between", [nn.Dropout(0.0), lambda y: F.dropout(y, 0.0), attending])
def test_functions_that_could_draw_and_do_not_run_again_in_backward(between):
    check(lambda: Recomputing(between), {"*.up": "column", "*.down": "row"})
    check(lambda: MLP(between), PLAN, fds.tile("up", tokens=3))


def layers(draw: Any):
    return nn.Sequential(nn.Linear(8, 13), nn.GELU(), draw, nn.Linear(13, 8), nn.Dropout(0.3))


@pytest.mark.parametrize("more", [(), (fds.checkpoint_activations(),)], ids=["", "recomputed"])
def test_dropout_in_a_layer_of_its_own(more):
    check(lambda: layers(nn.Dropout(0.4)), {"0": "column", "3": "row"}, *more, size=4)
