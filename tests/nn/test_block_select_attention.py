"""`BlockSelectAttention`: against attention by hand, and on a task that only chosen blocks can solve."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fds
from fds.errors import FdsError
from fds.kernels import BlockSelection
from fds.nn import BlockSelectAttention, SelfAttention

TOKENS = 37


def made(**options: Any) -> BlockSelectAttention:
    torch.manual_seed(0)
    return BlockSelectAttention(16, 4, **{"top": 1, "block": 8, **options}).double()


def test_all_blocks_and_no_convolution_are_self_attention():
    layer = made(top=9, num_kv_heads=2, theta=100.0)
    dense = SelfAttention(16, 4, num_kv_heads=2, theta=100.0).double()
    dense.load_state_dict(layer.state_dict())
    x = torch.randn(2, TOKENS, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], dense(x))


@pytest.mark.parametrize("packed", [False, True])
def test_keys_are_convolved_with_those_before_them_of_the_same_document(packed):
    layer = made(top=9, key_convolution=3)
    assert layer.key_weight is not None
    nn.init.normal_(layer.key_weight)
    x = torch.randn(2, TOKENS, 16, dtype=torch.float64)
    documents = torch.arange(TOKENS).expand(2, -1) // 10 if packed else None
    out = layer(x, documents=documents)[0]
    parts = x.split(10, 1) if packed else [x]
    wanted = []
    for part in parts:
        q, k, v = layer.qkv(part).unflatten(-1, (12, 4)).transpose(1, 2).chunk(3, 1)
        flat = k.transpose(2, 3).flatten(1, 2)
        sums = F.conv1d(F.pad(flat, (2, 0)), layer.key_weight.flip(1)[:, None], groups=16)
        k = k + F.silu(sums).unflatten(1, (4, 4)).transpose(2, 3)
        wanted.append(layer.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
    torch.testing.assert_close(out, torch.cat(wanted, 1))


def test_no_token_depends_on_those_after_it():
    layer, x = made(key_convolution=3, theta=10.0), torch.randn(1, TOKENS, 16, dtype=torch.float64)
    nn.init.normal_(layer.get_parameter("key_weight"))
    changed = torch.cat([x[:, :20], torch.randn_like(x[:, 20:])], 1)
    torch.testing.assert_close(layer(changed)[0][:, :20], layer(x)[0][:, :20])


def test_a_selection_of_an_earlier_call_can_be_given_back():
    layer, (x, other) = made(), torch.randn(2, 1, TOKENS, 16, dtype=torch.float64)
    y, selection = layer(x)
    again, same = layer(x, selection=BlockSelection(selection.chosen.clone(), TOKENS, 8))
    assert torch.equal(y, again) and torch.equal(same.chosen, selection.chosen)
    assert not torch.equal(layer(other, selection=selection)[0], layer(other)[0])


def test_under_autocast_keys_are_convolved_and_keep_their_dtype():
    layer, x = made(key_convolution=2, theta=100.0).float(), torch.randn(2, TOKENS, 16)
    nn.init.normal_(layer.key_weight)
    with torch.autocast("cpu", torch.bfloat16):
        y, selection = layer(x)
    y.square().sum().backward()
    want, _ = layer(x, selection=selection)
    assert y.dtype == torch.bfloat16 and layer.key_weight.grad.abs().amax() > 0
    torch.testing.assert_close(y.float(), want, rtol=0.05, atol=0.05)


PLAN = {"*": fds.nn.heads("num_heads", "num_kv_heads"), "*.qkv": "column", "*.out": "row"}
PARTS: dict[str, Any] = {
    "this rank's tokens alone": lambda axis: fds.context_parallel(axis),
    "not those of some heads": lambda axis: fds.tensor_parallel(axis, PLAN),
}


@pytest.mark.parametrize("words", PARTS)
def test_a_part_of_the_tokens_or_of_the_heads_is_refused(words):
    def trained():
        axis = fds.mesh(axis=2)["axis"]
        loss = fds.Layers([made()], F.mse_loss)
        step = fds.compose(PARTS[words](axis), fds.sgd(0.5))(loss)
        x = torch.zeros(1, 8, 16).double()
        return step(step.init(loss.init), (x, x))

    with pytest.raises(FdsError, match=words):
        fds.simulate(trained, 2)


PAIRS = 12  # of a key and a value, as tokens side by side; then all keys again, in another order


class Recall(nn.Module):
    """Look up the values of keys: a value's key is the token before it, which the convolution adds."""

    def __init__(self, top: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(2 * PAIRS, 32)
        self.attention = BlockSelectAttention(32, 1, top=top, block=4, together=1, key_convolution=2)
        self.head = nn.Linear(32, PAIRS)

    def forward(self, tokens: Tensor) -> tuple[Tensor, BlockSelection]:
        y, selection = self.attention(self.embed(tokens))
        return self.head(y[:, 2 * PAIRS :]), selection


def pairs(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return sequences (num, 3 * PAIRS), and the values of their last keys."""
    draw = torch.Generator().manual_seed(seed)
    order = lambda: torch.rand(num, PAIRS, generator=draw).argsort(1)
    keys, values, asked = order(), torch.randint(PAIRS, (num, PAIRS), generator=draw), order()
    told = torch.stack([keys, values + PAIRS], 2).flatten(1)
    return torch.cat([told, keys.gather(1, asked)], 1), values.gather(1, asked)


def learned(top: int) -> tuple[float, dict[str, Tensor]]:
    """Return how many values are right after training, and the metrics of the last step."""
    torch.manual_seed(0)
    apply, params, _ = fds.functional(Recall(top))

    def loss_fn(params, batch):
        logits, selection = apply(params, batch[0])
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()), selection.metrics()

    step = fds.compose(fds.checkpoint_activations(), fds.adamw(lr=1e-2))(loss_fn)
    state, metrics = step.init(params), {}
    for i in range(STEPS):
        state, metrics = step(state, pairs(32, i))
    tokens, values = pairs(200, 10**6)
    return float((apply(state.params, tokens)[0].argmax(-1) == values).float().mean()), metrics


STEPS = 110


def test_it_learns_to_choose_the_block_with_the_value_that_is_asked_for(monkeypatch):
    right, metrics = learned(top=1)
    assert right > 0.6  # of 1 / 12 by chance
    assert metrics["block_entropy"] > 0.6  # all blocks of pairs are asked for
    monkeypatch.setattr("tests.nn.test_block_select_attention.STEPS", 30)
    assert learned(top=0)[0] < 0.2


WRONG: Any = "wrong"
REFUSED = {
    "heads that do not divide": lambda: BlockSelectAttention(16, 3, top=1),
    "groups that do not divide": lambda: BlockSelectAttention(16, 4, top=1, num_kv_heads=3),
    "no width": lambda: BlockSelectAttention(0, 1, top=1),
    "fewer than no blocks": lambda: BlockSelectAttention(16, 4, top=-1),
    "a block of nothing": lambda: BlockSelectAttention(16, 4, top=1, block=0),
    "rows that do not divide": lambda: BlockSelectAttention(16, 4, top=1, block=8, together=3),
    "a flag of words": lambda: BlockSelectAttention(16, 4, top=1, causal=WRONG),
    "no bias": lambda: BlockSelectAttention(16, 4, top=1, bias=WRONG),
    "positions of odd heads": lambda: BlockSelectAttention(12, 4, top=1, theta=10.0),
    "half a token": lambda: BlockSelectAttention(16, 4, top=1, key_convolution=WRONG),
    "no input": lambda: made()(WRONG),
    "narrow input": lambda: made()(torch.zeros(1, 9, 15).double()),
    "an input of integers": lambda: made()(torch.zeros(1, 9, 16, dtype=torch.int64)),
    "an unknown dtype": lambda: BlockSelectAttention(16, 4, top=1, dtype=torch.int64),
    "a mask of other tokens": lambda: made()(
        torch.zeros(1, 9, 16).double(), key_padding=torch.ones(1, 8, dtype=torch.bool)
    ),
    "documents of fractions": lambda: made()(torch.zeros(1, 9, 16).double(), documents=torch.zeros(1, 9)),
    "documents of other tokens": lambda: made(key_convolution=2)(
        torch.zeros(1, 9, 16).double(), documents=torch.zeros(1, 8, dtype=torch.int64)
    ),
    "a selection of other tokens": lambda: made()(
        torch.zeros(1, 9, 16).double(), selection=made()(torch.zeros(1, 8, 16).double())[1]
    ),
    "no selection": lambda: made()(torch.zeros(1, 9, 16).double(), selection=WRONG),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused(call):
    with pytest.raises(FdsError):
        call()
