"""What stands beside what a plan divides: attention left whole, learned masks, padded vocabularies."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.errors import KernelError, LossError
from tests.transforms.tensor_parallel.models import check, steps


class Whole(nn.Module):
    """Attention of functions of torch, then a feed-forward that is divided."""

    def __init__(self, p: float = 0.4):
        super().__init__()
        self.qkv, self.up, self.down, self.p = nn.Linear(8, 24), nn.Linear(8, 16), nn.Linear(16, 8), p

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        p = self.p if self.training else 0.0
        x = x + F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2)
        return self.down(F.dropout(self.up(x), 0.3, self.training))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask, self.padding = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(2, 6))
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, attn_mask=self.mask, key_padding_mask=self.padding, need_weights=False)[0]


class Blocks(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, x):
        return self.blocks[0](x)


class Torchs(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x)[0]


def test_attention_that_a_plan_leaves_whole_drops_as_on_one_rank():
    check(Whole, {"up": "column", "down": "row"})


def test_masks_that_are_learned_have_the_gradients_of_all_heads():
    check(Masked, {"attention": "heads"})


@pytest.mark.parametrize("block", [lambda: Whole(0.0), Torchs])
def test_attention_that_is_left_whole_in_parts_of_sequences_is_refused(block):
    def job():
        with pytest.raises(LossError, match="attention sees this rank's tokens alone"):
            steps(lambda: Blocks(block()), {"blocks.*": "sequence"}, size=2, sequence=True)

    fds.simulate(job, 2)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.g, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 1), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = x + self.norm(x)
        gate = self.g(x).sigmoid()
        return x + self.down(self.up(x) * gate)


class Derived(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.up, self.down = nn.Parameter(torch.ones(1)), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        gain = self.gain * 2
        return self.down(self.up(x) * gain)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = self.norm(x)
        return self.down(self.up(x) * x.mean(-1, keepdim=True))


class OfHeads(Torchs):
    """Attention of the user's own, with a mask that is learned and whole."""

    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x, self.inner.mask.sigmoid())


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask, self.num_heads = nn.Parameter(torch.randn(6, 6)), 4
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, mask):
        q, k, v = (part(x).unflatten(-1, (self.num_heads, 2)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("make", "plan", "name"),
    [
        (Gate, {"up": "column", "down": "row"}, r"g\.(weight|bias)"),
        (Derived, {"up": "column", "down": "row"}, "gain"),
        (Residual, {"up": "column", "down": "row"}, r"norm\.(weight|bias)"),
        (OfHeads, {"inner": fds.nn.heads("num_heads"), "inner.[qkv]": "column", "inner.out": "row"}, r"inner\.mask"),
    ],
)
@pytest.mark.parametrize("overlap", [0, 2])
def test_what_is_whole_and_meets_pieces_is_refused_by_its_parameter(make, plan, name, overlap):
    def job():
        with pytest.raises(LossError, match=f"(?s)something whole meets pieces.*{name}"):
            steps(make, plan, size=2, overlap=overlap)

    fds.simulate(job, 2)


@pytest.mark.sweep
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("parts", [(), (fds.accumulate(2),), (fds.checkpoint_activations(),)])
def test_a_gate_of_columns_is_none(sequence, parts):
    plan = {"blocks.*": "sequence", "blocks.*.[gu]*": "column", "blocks.*.down": "row", "blocks.*.norm": "replicated"}

    def make():
        block = Gate()
        block.g = nn.Linear(8, 16)
        return Blocks(block)

    steps_of = lambda size: steps(make, plan, *parts, size=size, sequence=sequence)
    fds.simulate(lambda: steps_of(2), 2)


def of_head(rows: int, classes: int, size: int):
    axis = fds.mesh(tp=size)["tp"]

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(8, rows)

        def forward(self, x):
            return self.head(x)

    def loss(logits, targets):
        return fds.nn.vocab_cross_entropy(logits, targets, axis, num_classes=classes)

    g = torch.Generator().manual_seed(7)
    batch = torch.randn(2, 6, 8, dtype=torch.float64, generator=g), torch.arange(12).reshape(2, 6)
    return steps(Head, {"head": fds.nn.vocab(gather=False)}, size=size, loss=loss, batch=batch)


@pytest.mark.parametrize(("rows", "classes", "size"), [(51, 50, 2), (51, 50, 4), (50, 40, 4), (64, 50, 3)])
def test_padded_rows_that_ranks_do_not_divide_are_refused(rows, classes, size):
    def job():
        with pytest.raises(KernelError, match="the ranks do not divide the padded rows"):
            of_head(rows, classes, size)

    fds.simulate(job, size)


@pytest.mark.parametrize(("rows", "classes", "size"), [(51, 51, 2), (52, 50, 2), (52, 52, 3), (64, 50, 4)])
def test_padded_rows_that_ranks_divide_and_rows_without_padding_are_not(rows, classes, size):
    want = of_head(rows, classes, 1)
    for found in fds.simulate(lambda: of_head(rows, classes, size), size):
        assert all(torch.allclose(found[name], x) for name, x in want.items())
