"""What a plan says of gradients is held against what parameters are used for; what is refused trains as advised."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.errors import LossError
from tests.transforms.tensor_parallel.models import Head, check, squares, steps

row, column, heads, replicated, vocab = fds.nn.row, fds.nn.column, fds.nn.heads, fds.nn.replicated, fds.nn.vocab
PAIR = {"up": "column", "down": "row"}


class Lora(nn.Module):
    """As peft writes it: the base first, then the adapter, which is given the same."""

    def __init__(self, num_in: int, num_out: int):
        super().__init__()
        self.base = nn.Linear(num_in, num_out)
        self.A, self.B = nn.Linear(num_in, 2, bias=False), nn.Linear(2, num_out, bias=False)
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        return self.base(x) + self.B(self.A(self.drop(x)))


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), Lora(8, 16), Lora(16, 8)  # pieces are as wide as the whole

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads, self.out = 4, nn.Linear(8, 8)
        self.q, self.k, self.v = Lora(8, 8), nn.Linear(8, 8, bias=False), Lora(8, 8)

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (self.num_heads, 2)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(8), Attention(), Adapted()

    def forward(self, x):
        return self.mlp(x + self.attention(self.norm(x)))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


LORA = {"*up.base": "column", "*up.B": "column", "*down.base": "row", "*down.A": "row"}
BLOCKS = LORA | {
    "blocks.*.attention": heads("num_heads"),
    "*.[qv].base": "column",
    "*.[qv].B": "column",
    "*.k": "column",
    "*.out": "row",
    "blocks.*": "sequence",
}


@pytest.mark.parametrize("overlap", [0, 2])
def test_adapters_in_the_order_of_peft_train_as_on_one_rank(overlap):
    check(Adapted, LORA, overlap=overlap)


@pytest.mark.sweep
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("parts", [(), (fds.checkpoint_activations(),)])
def test_adapters_inside_of_attention_train_as_on_one_rank(sequence, parts):
    check(Blocks, BLOCKS, *parts, sequence=sequence)


class Late(nn.Module):
    """A norm of the whole input, used after a column of it."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.3)
        self.a, self.b, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.drop(self.a(x)) * self.b(self.drop(self.norm(x))))


LATE = {"a": "column", "b": "column", "down": "row"}


def test_a_norm_of_the_whole_after_a_column_trains_as_on_one_rank():
    check(Late, LATE)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.g, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 1), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        x = x + self.norm(x)
        return x + self.down(self.up(x) * self.g(x).sigmoid())


class GateOfBatch(Gate):
    def forward(self, x):
        return self.down(self.up(x) * self.g(x))


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self):
        return self.gain * 2


class Derived(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.up, self.down = Gain(), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x) * self.gain())


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(-1, keepdim=True)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.mean = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), Mean()

    def forward(self, x):
        x = self.norm(x)
        return self.down(self.up(x) * self.mean(x))


class Summed(nn.Module):
    """What a row returned, which meets pieces; all of its parameters are divided."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)
        self.up, self.down, self.mean = nn.Linear(8, 16), nn.Linear(16, 8), Mean()

    def forward(self, x):
        return self.down(self.up(x) * self.mean(self.last(self.first(x))))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.down(F.gelu(self.up(x))))


class OfPieces(Normed):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(2)

    def forward(self, x):
        return self.down(self.norm(self.up(x).unflatten(-1, (-1, 2))).flatten(-2))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.down = nn.Linear(8, 12), nn.Linear(8, 3), nn.Linear(15, 8)

    def forward(self, x):
        return self.down(F.gelu(torch.cat([self.a(x), self.b(x).tanh()], -1)))


class ByHeads(nn.Module):
    """A fused projection laid out head by head: GPT-NeoX, Bloom, Falcon."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv, self.out = 12, nn.Linear(8, 72), nn.Linear(24, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:-1], self.num_heads, 6).transpose(1, 2).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def by_class(logits, targets):
    return F.cross_entropy(logits.flatten(0, -2), (targets[..., 0] > 0).long().flatten())


HEADS = {"": heads("num_heads"), "out": "row"}
MEETS, COUNTED, ENDS = "something whole meets pieces", "would be counted by each", "nothing puts them together"
REFUSED = [  # a module, a plan, what is said of it, the advice as it is given, and the plan that follows it
    (Adapted, LORA | {"up.A": replicated("sum")}, COUNTED, "up.A.weight.*no entry", LORA),
    (Late, LATE | {"norm": replicated("sum")}, COUNTED, "norm.*no entry", LATE),
    (Normed, PAIR | {"norm": replicated("sum")}, COUNTED, "norm.*no entry", PAIR),
    (OfPieces, PAIR, MEETS, r"norm.*grads='sum'", PAIR | {"norm": replicated("sum")}),
    (GateOfBatch, PAIR, MEETS, r"g\..*grads='sum'", PAIR | {"g": replicated("sum")}),
    (Derived, PAIR, MEETS, r"gain.*grads='sum'", PAIR | {"gain": replicated("sum")}),
    (Gate, PAIR, MEETS, r"g\..*enters=True", PAIR | {"g": replicated(enters=True)}),
    (Gate, PAIR | {"g": replicated("sum")}, MEETS, r"norm\..*enters=True", PAIR | {"g": replicated(enters=True)}),
    (Residual, PAIR, MEETS, r"norm\..*enters=True", PAIR | {"mean": replicated(enters=True)}),
    (
        Summed,
        PAIR | {"first": "column", "last": "row"},
        MEETS,
        r"last\..*enters=True",
        PAIR | {"first": "column", "last": "row", "mean": replicated(enters=True)},
    ),
    (Head, {"head": "column"}, ENDS, r"head\..*gather=True", {"head": column(gather=True)}),
    (Head, {"head": vocab(gather=False)}, ENDS, r"head\..*'vocab'", {"head": "vocab"}),
    (Two, LATE, "several columns return", r"down.*row\(parts=\(12, 3\)\)", LATE | {"down": row(parts=(12, 3))}),
    (
        ByHeads,
        HEADS | {"qkv": column(parts=3)},
        "head by head",
        r"qkv.*column\(unit=6\)",
        HEADS | {"qkv": column(unit=6)},
    ),
]


@pytest.mark.parametrize(("make", "plan", "said", "advice", "better"), REFUSED)
def test_what_is_refused_trains_as_advised(make, plan, said, advice, better):
    loss = by_class if make is Head else squares

    def job():
        for _ in range(2):  # the second try too
            with pytest.raises(LossError, match=f"(?s){said}.*{advice}"):
                steps(make, plan, size=2, loss=loss)

    fds.simulate(job, 2)
    check(make, better, loss=loss)


def test_a_step_that_was_refused_is_refused_again():
    def job():
        apply, params, _ = fds.functional(Head())
        tp = fds.tensor_parallel(fds.mesh(tp=2)["tp"], {"head": "column"})
        step = fds.compose(tp, fds.sgd(0.1))(lambda params, x: apply(params, x).square().mean())
        state = step.init(params)
        for _ in range(2):
            with pytest.raises(LossError, match=ENDS):
                step(state, torch.ones(2, 8))

    fds.simulate(job, 2)


@pytest.mark.parametrize("parts", [(), (fds.accumulate(2),), (fds.compile(),)])
def test_a_loss_that_reads_pieces_of_parameters_is_refused(parts):
    def job():
        apply, params, _ = fds.functional(Normed())
        tp = fds.tensor_parallel(fds.mesh(tp=2)["tp"], PAIR)
        decayed = lambda params, x: apply(params, x).mean() + sum(p.square().sum() for p in params.values())
        step = fds.compose(tp, *parts, fds.sgd(0.1))(decayed)
        with pytest.raises(LossError, match=f"(?s){ENDS}.*where: tensor_parallel: (up|down)"):
            step(step.init(params), torch.ones(2, 8))

    fds.simulate(job, 2)


class Routed(nn.Module):
    """A block that returns a loss of its router beside what goes on, as Mixtral's."""

    def __init__(self):
        super().__init__()
        self.router, self.up, self.down = nn.Linear(8, 2), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        share = self.router(x).softmax(-1)
        return x + share[..., :1] * self.down(F.gelu(self.up(x))), share.square().mean()


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Routed(), Routed()])

    def forward(self, x):
        balance = 0.0
        for block in self.blocks:
            x, one = block(x)
            balance = balance + one
        return x, balance


def with_balance(out, targets):
    return squares(out[0], targets) + 0.01 * out[1]


MIXTURE = {"*.up": "column", "*.down": "row", "blocks.*": "sequence"}


def test_a_loss_of_routers_in_parts_of_sequences_is_refused_and_of_whole_ones_is_not():
    def job():
        with pytest.raises(LossError, match=r"(?s)a part of the tokens.*router.*no 'sequence'"):
            steps(Mixture, MIXTURE, size=2, sequence=True, loss=with_balance)

    fds.simulate(job, 2)
    check(Mixture, MIXTURE, loss=with_balance)


@pytest.mark.parametrize("divided", [False, True])
def test_a_loss_of_a_divided_vocabulary_refuses_logits_of_a_whole_head(divided):
    def of_head(size):
        axis = fds.mesh(tp=size)["tp"]
        loss = lambda y, targets: fds.nn.vocab_cross_entropy(y, (targets[..., 0] > 0).long(), axis)
        plan = {"up": "column", "down": "row"} | ({"head": vocab(gather=False)} if divided else {})
        return steps(Headed, plan, size=size, loss=loss)

    def job():
        if divided:
            return of_head(2)
        with pytest.raises(LossError, match=r"(?s)something whole meets pieces.*head.*vocab\(gather=False\)"):
            of_head(2)

    results = fds.simulate(job, 2)
    if divided:
        want = of_head(1)
        assert all(torch.allclose(one[name], x) for one in results for name, x in want.items())


class Headed(Normed):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(super().forward(x))


class Counting(nn.Module):
    def __init__(self, scaled):
        super().__init__()
        self.num_heads, self.width, self.scaled = 4, 8, scaled
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape[:2], self.width)
        return self.out(self.scaled(self, y))


COUNTING = {"": heads("num_heads", "width"), "qkv": column(parts=3), "out": "row"}


@pytest.mark.parametrize(
    "scaled",
    [
        lambda m, y: y / m.num_heads,
        lambda m, y: y * m.num_heads**-0.5,
        lambda m, y: y / torch.tensor(float(m.num_heads)),
        lambda m, y: y * (1 / m.width),
        lambda m, y: y / (8 // m.num_heads),
    ],
)
def test_numbers_computed_from_an_attribute_that_heads_divides_are_refused(scaled):
    def job():
        with pytest.raises(LossError, match=r"(?s)computed from an attribute that 'heads' divides.*(num_heads|width)"):
            steps(lambda: Counting(scaled), COUNTING, size=2)

    fds.simulate(job, 2)


def test_shapes_computed_from_an_attribute_that_heads_divides_are_not():
    check(lambda: Counting(lambda m, y: y / (y.shape[-1] // m.num_heads) ** 0.5), COUNTING)


class Folded(Counting):
    """Heads are in the batch, as Falcon has them: with one a rank its queries have the shape of what the row gets."""

    def forward(self, x):
        fold = lambda y: y.unflatten(-1, (self.num_heads, 4)).transpose(1, 2).flatten(0, 1)
        q, k, v = map(fold, self.qkv(x).chunk(3, -1))
        q, k = (torch.cat([-y[..., 2:], y[..., :2]], -1) for y in (q, k))
        y = (q @ k.transpose(1, 2)).softmax(-1) @ v
        return self.out(y.unflatten(0, (-1, self.num_heads)).transpose(1, 2).flatten(2))


def test_rotated_queries_are_not_what_several_columns_return():
    def make():
        module = Folded(None)
        module.num_heads = 2
        return module

    check(make, {"": heads("num_heads"), "qkv": column(parts=3, unit=4), "out": "row"})
