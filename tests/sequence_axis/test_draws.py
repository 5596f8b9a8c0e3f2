"""Ranks that pass parts of rows draw what one rank draws for the whole rows: dropout, noise, whatever a loss draws."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fds
from fds.collectives import Axis
from fds.errors import ComposeError, KernelError, LossError
from tests.sequence_axis.language_model import DTYPE, HEADS, VOCABULARY, WIDTH

ROWS, TOKENS, CALLS = 4, 16, 2
# A gradient element is a sum of at most 2**12 rounded products of size 1, and three updates each add their error to it.
ROUNDING = torch.finfo(DTYPE).eps * 2**14


class Block(nn.Module):
    """Attention and a nonlinear layer, with dropout as a module and as a function."""

    def __init__(self, axis: Axis | None, how: dict[str, Any]):
        super().__init__()
        self.axis, self.how, self.drop, self.last = axis, how, nn.Dropout(0.3), nn.Dropout(0.1)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, dtype=DTYPE) for _ in range(4))
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, dtype=DTYPE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = fds.nn.attention(q, k, v, axis=self.axis, causal=True, **self.how)
        x = x + self.out(self.drop(y.transpose(1, 2).flatten(2)))
        return self.last(x + self.down(F.dropout(torch.tanh(self.up(x)), 0.2, self.training)))


class Model(nn.Module):
    """Two blocks; of its embedding some elements are dropped in place."""

    def __init__(self, axis: Axis | None, how: dict[str, Any]):
        super().__init__()
        self.embedding, self.drop = nn.Embedding(VOCABULARY, WIDTH, dtype=DTYPE), nn.Dropout(0.1, inplace=True)
        self.blocks = nn.ModuleList(Block(axis, how) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, dtype=DTYPE)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embedding(tokens) + 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def error(logits: Tensor, targets: Tensor) -> Any:
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    return fds.Mean(losses, (targets != -100).sum())


def batch(mesh: fds.Mesh, layout: str, call: int) -> Any:
    """Return this rank's part of a batch."""
    g = torch.Generator().manual_seed(call)
    tokens, targets = torch.randint(VOCABULARY, (2, ROWS, TOKENS), generator=g)
    targets = targets.masked_fill(torch.rand(ROWS, TOKENS, generator=g) < torch.arange(TOKENS) / TOKENS, -100)
    cut = lambda x: x.chunk(mesh["sp"].size, 1)[mesh["sp"].index]
    if layout == "zigzag":
        cut = lambda x: fds.nn.zigzag(x, mesh["sp"])
    return tuple(cut(x.chunk(mesh["dp"].size)[mesh["dp"].index]) for x in (tokens, targets))


def trained(
    sp: int = 1, dp: int = 1, *parts: Any, kind: str = "function", stage: int = 0, tp: int = 1, pp: int = 1,
    in_parts: bool = False, **how: Any,
) -> list[Tensor]:  # fmt: skip
    """Return what a rank computes: the losses of every call, whole parameters and the loss of an evaluation."""
    mesh, layout = fds.mesh(pp=pp, dp=dp, sp=sp, tp=tp), how.get("layout", "contiguous")
    torch.manual_seed(0)
    model = Model(mesh["sp"], how)
    apply, params, _ = fds.functional(model)

    def loss(params: Any, batch: Any) -> Any:
        tokens, targets = batch
        logits = apply(params, tokens)
        level = torch.rand(len(tokens), 1, 1, dtype=DTYPE)  # of each row, alike on all ranks
        noise = torch.randn_like(logits) + torch.rand(*tokens.shape, 1, dtype=DTYPE)
        kept = torch.empty(tokens.shape, dtype=DTYPE).bernoulli_(0.5)[..., None]
        return error(logits + level * noise * kept + torch.randint(3, logits.shape), targets)

    if kind == "layers":
        torch.manual_seed(0)
        block = fds.LayerSpec(Block, mesh["sp"], how)
        drop, head = fds.LayerSpec(nn.Dropout, 0.4), fds.LayerSpec(nn.Linear, WIDTH, VOCABULARY, dtype=DTYPE)
        loss: Any = fds.Layers(
            [fds.LayerSpec(nn.Embedding, VOCABULARY, WIDTH, dtype=DTYPE), drop, block, block, head],
            lambda logits, targets: error(F.dropout(logits, 0.1), targets),
        )
        params = loss.init
    each = 2 // dp
    split = fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=each) if pp > 1 else fds.accumulate(each)
    if tp > 1:
        plan = {"blocks.*.[qkv]": "column", "*.up": "column", "*.out": "row", "*.down": "row", "blocks.?": "sequence"}
        divided = fds.tensor_parallel(mesh["tp"], plan, sequence=in_parts)
        parts = (*parts, divided)
    shard = fds.shard_optimizer(mesh["dp", "sp"], stage=stage)
    step = fds.compose(split, shard, fds.context_parallel(mesh["sp"], layout=layout), *parts, fds.sgd(0.1))(loss)
    state, found = step.init(params, key=5), list[Tensor]()
    for call in range(CALLS):
        state, metrics = step(state, batch(mesh, layout, call))
        found.append(metrics["loss"])
    found += [x.detach() for _, x in sorted(fds.tree.paths(step.params(state)).items())]
    if each == 2 and pp == 1:  # more ranks evaluate other microbatches, which draw otherwise
        found.append(step.evaluate(state, batch(mesh, layout, 9))["loss"])
    return found


@functools.cache
def plain(kind: str) -> list[Tensor]:
    """Return what one rank computes."""
    return trained(kind=kind)


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (2, {"sp": 2}),
        (4, {"sp": 4, "method": "ring"}),
        (2, {"sp": 2, "layout": "zigzag"}),
        (4, {"sp": 4, "method": "ring", "layout": "zigzag", "stage": 2}),
        (4, {"sp": 2, "dp": 2, "stage": 1}),
        (4, {"sp": 2, "dp": 2, "stage": 3, "layout": "zigzag"}),
        (2, {"sp": 2, "kind": "layers"}),
        (4, {"sp": 2, "dp": 2, "kind": "layers", "stage": 2, "method": "ring", "layout": "zigzag"}),
        (4, {"sp": 2, "pp": 2, "kind": "layers", "layout": "zigzag"}),
        (4, {"sp": 2, "tp": 2, "layout": "zigzag"}),
        (4, {"sp": 2, "tp": 2, "in_parts": True}),
        (4, {"sp": 2, "tp": 2, "in_parts": True, "layout": "zigzag", "method": "ring"}),
    ],
    ids=str,
)
def test_parts_draw_what_one_rank_draws(ranks, how):
    want = plain(how.get("kind", "function"))
    for found in fds.simulate(lambda: trained(**how), ranks):
        for x, y in zip(found, want, strict=False):
            assert torch.allclose(x, y, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("kind", ["function", "layers"])
def test_what_runs_again_in_backward_draws_the_same(kind):
    for found in fds.simulate(lambda: trained(2, 1, fds.checkpoint_activations(), kind=kind, layout="zigzag"), 2):
        for x, y in zip(found, plain(kind), strict=True):
            assert torch.allclose(x, y, rtol=ROUNDING, atol=ROUNDING)


def first_call(
    loss: Any, n: int = 2, *parts: Any, layout: Any = "contiguous", shape: tuple[int, ...] = (3, 8)
) -> list[Any]:
    """Return what a step of a loss of (params, batch, axis) gives on every rank, or the error that it raises."""

    def body() -> Any:
        axis = fds.mesh(sp=n)["sp"]
        step = fds.compose(fds.context_parallel(axis, layout=layout), *parts, fds.sgd(0.1))(
            lambda p, b: loss(p, b, axis)
        )
        state = step.init({"w": torch.ones(5)}, key=1)
        try:
            return step(state, torch.ones(shape))[1]
        except (LossError, KernelError) as error:
            return error

    return fds.simulate(body, n)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo reads
def test_compiled_code_draws_the_same_and_attention_runs_beside_it():
    def loss(params: Any, batch: Any, axis: Axis) -> Any:
        hidden = F.dropout(params["w"] * batch[..., None], 0.3)
        x = hidden[:, None]
        return (fds.nn.attention(x, x, x, axis=axis, method="ring")[:, 0] + F.dropout(hidden, 0.2)).square().mean()

    want = first_call(loss, 1, shape=(3, 16))
    compiled = fds.compile(backend="aot_eager", fullgraph=False)
    for found in first_call(loss, 2, compiled):
        torch.testing.assert_close(found["loss"], want[0]["loss"])
    for found in first_call(loss, 2, fds.compile(backend="aot_eager")):
        assert "fds.compile(fullgraph=False)" in str(found)


HIDDEN = (3, 8, 5)  # of rows of 8 tokens on every rank


@pytest.mark.parametrize(
    "draw",
    [
        lambda: F.dropout(torch.ones(3, 4, 8, 5)),  # heads before tokens
        lambda: F.dropout(torch.ones(8, 3, 5)),  # tokens before rows
        lambda: F.dropout(torch.ones(24, 5)),  # flattened
        lambda: F.dropout(torch.ones(3, 5, 8)),  # features before tokens
        lambda: F.dropout(torch.ones(12, 8, 5)),  # rows and heads
        lambda: torch.randn(5, 8),  # features
        lambda: torch.rand(8),
        lambda: torch.randperm(8),
        lambda: F.dropout(torch.ones(3, 8, 8, 5)),  # heads or tokens
        lambda: F.dropout1d(torch.ones(HIDDEN)),
        lambda: F.alpha_dropout(torch.ones(HIDDEN), training=True),
        lambda: F.gumbel_softmax(torch.ones(HIDDEN)),
        lambda: torch.bernoulli(torch.full(HIDDEN, 0.5)),
        lambda: torch.ones(HIDDEN).bernoulli_(torch.full(HIDDEN, 0.5)),
        lambda: torch.normal(0.0, 1.0, HIDDEN),
        lambda: torch.normal(torch.zeros(HIDDEN), 1.0),
        lambda: torch.normal(0.0, 1.0, size=HIDDEN),
        lambda: torch.multinomial(torch.ones(24, 4), 1),
        lambda: nn.init.kaiming_uniform_(torch.empty(3, 8)),
        lambda: F.rrelu(torch.ones(HIDDEN), training=True),
    ],
)
def test_a_draw_whose_tokens_are_not_known_is_refused(draw):
    def loss(params: Any, batch: Any, axis: Axis) -> Any:
        return (params["w"] * batch[..., None]).mean() + draw().float().mean()

    assert all("draw" in str(found) for found in first_call(loss)), first_call(loss)
    assert all(isinstance(found, LossError) for found in first_call(loss))


WHOLE = {  # what one rank draws for rows of 16 tokens, and what has nothing of tokens
    "tokens": lambda n: torch.rand(3, n),
    "listed": lambda n: torch.randn([3, n]),
    "sized": lambda n: torch.randn(size=(3, n, 5)),
    "integers": lambda n: torch.randint(9, (3, n)),
    "between": lambda n: torch.randint(2, 9, size=(3, n)),
    "like": lambda n: torch.randn_like(torch.ones(3, n)),
    "integers like": lambda n: torch.randint_like(torch.ones(3, n), 9),
    "filled": lambda n: torch.empty(3, n).uniform_(2, 3),
    "initial": lambda n: nn.init.normal_(torch.empty(3, n, 5), 2.0),
    "transposed": lambda n: F.dropout(torch.ones(n, 3, 5).transpose(0, 1)),
    "of images": lambda n: F.dropout(torch.ones(3, n, 7, 5)),
    "in place": lambda n: torch.dropout_(torch.ones(3, n, 5), 0.5, True),
    "alpha": lambda n: F.alpha_dropout(torch.ones(3, n), training=False),
    "levels": lambda n: torch.rand(3),
    "rows": lambda n: torch.randn(3, 1, 1),
    "features": lambda n: F.dropout(torch.ones(3, 5)),
    "number": lambda n: torch.rand(()),
    "chosen": lambda n: torch.multinomial(torch.ones(3, 4), 1),
    "normal": lambda n: torch.normal(0.0, 1.0, (3, 4)),
    "stream": lambda n: _of_a_stream(n),
}


def _of_a_stream(n: int) -> Tensor:
    with fds.random.stream("noise"):
        return torch.rand(3, n)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_every_rank_has_its_part_of_what_one_rank_draws(name, layout):
    drawn: dict[int, Tensor] = {}  # by rank: simulated ranks take turns in an order of their own

    def loss(params: Any, batch: Any, axis: Axis) -> Any:
        drawn[axis.index] = WHOLE[name](batch.shape[1])
        return (params["w"] * batch[..., None]).mean()

    first_call(loss, layout=layout)
    parts, _ = dict(drawn), drawn.clear()
    first_call(loss, 1, shape=(3, 16))
    for rank, part in parts.items():
        axis = fds.simulate(lambda: fds.mesh(sp=2)["sp"], 2)[rank]
        whole = drawn[0]
        if whole.dim() > 1 and whole.shape[1] == 16:
            whole = fds.nn.zigzag(whole, axis) if layout == "zigzag" else whole.chunk(2, 1)[rank]
        assert torch.equal(part, whole)


def test_numbers_of_a_generator_of_its_own_are_left_to_a_rank():
    def loss(params: Any, batch: Any, axis: Axis) -> Any:
        own = torch.Generator().manual_seed(axis.index)
        drawn.append(torch.rand(3, 8, generator=own))
        return (params["w"] * batch[..., None]).mean()

    drawn: list[Tensor] = []
    first_call(loss)
    assert [torch.equal(x, torch.rand(3, 8, generator=torch.Generator().manual_seed(i))) for i, x in enumerate(drawn)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_in_a_function_that_torch_runs_again_is_refused(reentrant):
    def loss(params: Any, batch: Any, axis: Axis) -> Any:
        hidden = params["w"] * batch[..., None]
        return checkpoint(F.dropout, hidden, use_reentrant=reentrant).mean()

    for found in first_call(loss):
        assert "fds.checkpoint_activations()" in str(found)


def test_attention_over_a_part_of_the_tokens_is_refused():
    x = torch.ones(3, 2, 8, 4)
    plain = lambda params, batch, axis: F.scaled_dot_product_attention(x * params["w"].sum(), x, x).mean()
    ours = lambda params, batch, axis: fds.nn.attention(x * params["w"].sum(), x, x).mean()
    attention = nn.MultiheadAttention(4, 2)

    def module(params: Any, batch: Any, axis: Axis) -> Any:
        y = x[0].transpose(0, 1) * params["w"].sum()
        return attention(y, y, y)[0].mean()

    layer = fds.nn.TransformerLayer(fds.nn.TransformerConfig(hidden_size=8, heads=2, num_hidden_layers=1))
    whole = lambda params, batch, axis: layer(batch[..., None].expand(3, 8, 8) * params["w"].sum()).mean()
    for loss in (plain, ours, module, whole):
        assert all("this rank's tokens alone" in str(found) for found in first_call(loss))


def test_attention_to_other_tokens_runs_without_dropout():
    x, others = torch.ones(3, 2, 8, 4), torch.ones(3, 2, 7, 4)
    attend = lambda p: (
        lambda params, batch, axis: F.scaled_dot_product_attention(
            x * params["w"].sum(), others, others, dropout_p=p
        ).mean()
    )
    assert all("loss" in found for found in first_call(attend(0.0)))
    assert all("weights of attention are dropped" in str(found) for found in first_call(attend(0.5)))


def test_the_layout_of_attention_is_that_of_the_step():
    x = torch.ones(3, 2, 8, 4)
    loss = lambda params, batch, axis: fds.nn.attention(
        x * params["w"].sum(), x, x, axis=axis, layout="zigzag", causal=True
    ).mean()
    assert all("laid out in one way" in str(found) for found in first_call(loss))
    assert all("loss" in found for found in first_call(loss, layout="zigzag"))
    with pytest.raises(ComposeError, match="no such layout"):
        fds.context_parallel(fds.mesh(sp=-1)["sp"], layout="striped")  # pyright: ignore[reportArgumentType]


def test_attention_over_other_ranks_than_the_step_knows_is_refused():
    def body() -> None:
        mesh, x = fds.mesh(dp=2, sp=2), torch.ones(3, 2, 8, 4)
        for axis, parts in (("sp", []), ("dp", [fds.context_parallel(mesh["sp"])])):
            loss = lambda params, batch, axis=axis: fds.nn.attention(x * params["w"], x, x, axis=mesh[axis]).mean()
            step = fds.compose(*parts, fds.shard_optimizer(mesh["dp"]), fds.sgd(0.1))(loss)
            with pytest.raises(KernelError, match="other ranks than those that pass parts"):
                step(step.init({"w": torch.ones(())}), torch.ones(3, 8))

    fds.simulate(body, 4)


def test_of_a_mask_for_whole_rows_a_rank_keeps_its_part():
    def loss(params: Any, batch: Any, axis: Axis) -> Any:
        hidden = params["w"] * batch[..., None]
        dropped: Any = F.dropout(hidden)
        assert dropped.grad_fn._saved_other.untyped_storage().nbytes() == hidden.nbytes
        return dropped.mean()

    assert all("loss" in found for found in first_call(loss))
