"""Sparse models and longer tables, of modules named and called as those of transformers are."""

import functools
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.attention_layouts import bigbird
from fds.errors import ComposeError, KernelError

RULE = functools.partial(bigbird, block=4, key=2, different_layout_per_head=True)
TOKENS, HEADS, WIDTH = 15, 4, 12


REGISTERED = {}  # by kind and name


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """Stand in for transformers."""
    package, masking = ModuleType("transformers"), ModuleType("transformers.masking_utils")
    register = lambda kind: SimpleNamespace(register=lambda name, f: REGISTERED.update({(kind, name): f}))
    package.AttentionInterface, masking.AttentionMaskInterface = register("attention"), register("masks")
    masking.causal_mask_function, masking.bidirectional_mask_function = object(), object()
    monkeypatch.setitem(sys.modules, "transformers", package)
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masking)


class LlamaAttention(nn.Module):
    """Attention by the function that is registered."""

    is_causal = True
    dropout = 0.0

    def __init__(self):
        super().__init__()
        self.kv, self.kind = nn.Linear(WIDTH, WIDTH), ""

    def forward(self, x, mask=None, past=None):
        q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, HEADS // 2, -1)).permute(2, 0, 3, 1, 4)
        k, v = (k, v) if past is None else (torch.cat([a, b], 2) for a, b in zip(past, (k, v), strict=True))
        out, _ = REGISTERED["attention", self.kind](self, q, k, v, mask, dropout=self.dropout, scaling=0.4)
        return out.flatten(2), (k, v)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(model_type="llama")
        self.attention = LlamaAttention()

    def set_attn_implementation(self, name):
        self.attention.kind = name

    def forward(self, x, mask=None, past=None):
        return self.attention(x, mask, past)


def states():
    return torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def dense(model, x, layout, key_padding=None):
    q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
    k, v = model.attention.kv(x).unflatten(-1, (2, HEADS // 2, -1)).permute(2, 0, 3, 1, 4).repeat_interleave(2, 2)
    listed = torch.from_numpy(layout.as_array()).repeat_interleave(4, 1).repeat_interleave(4, 2)
    seen = listed[:, :TOKENS, :TOKENS].tril().expand(2, -1, -1, -1)
    seen = seen if key_padding is None else seen & key_padding[:, None, None]
    bias = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.4).transpose(1, 2).flatten(2)


def test_attention_is_that_of_the_layout_and_the_weights_are_the_models():
    model = Model().double()
    sparse = fds.hf.sparsify(model, RULE)
    assert sparse.attention.kv.weight is model.attention.kv.weight and model.attention.kind == ""
    keys = torch.arange(TOKENS) < torch.tensor([[TOKENS], [10]])
    for mask in (None, keys):
        got = sparse(states(), mask)[0]
        torch.testing.assert_close(got, dense(model, states(), RULE(HEADS, 4), mask))


def test_the_last_tokens_see_what_they_see_without_a_cache():
    model = Model().double()
    sparse = fds.hf.sparsify(model, RULE, max_tokens=32)
    keys = torch.arange(TOKENS) >= torch.tensor([[0], [3]])
    whole, _ = sparse(states(), keys)
    torch.testing.assert_close(whole, dense(model, states(), RULE(HEADS, 8).cropped(4), keys))
    _, past = sparse(states()[:, :9], keys[:, :9])
    torch.testing.assert_close(sparse(states()[:, 9:], keys, past)[0], whole[:, 9:])
    with pytest.raises(KernelError, match="use_cache=False"):
        fds.hf.sparsify(model, RULE)(states()[:, 9:], keys, past)


def test_weights_are_dropped_beside_a_cache_too():
    sparse = fds.hf.sparsify(Model().double(), RULE, max_tokens=32)
    _, past = sparse(states()[:, :9])
    again = lambda: sparse(states()[:, 9:], None, past)[0]
    assert torch.equal(again(), again())
    sparse.attention.dropout = 0.5
    assert not torch.allclose(again(), again())


def test_a_mask_of_integers_in_four_dims_is_refused():
    with pytest.raises(KernelError, match="integers"):
        fds.hf.sparsify(Model().double(), RULE)(states(), torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.int64))


def test_a_cache_that_holds_other_keys_is_refused():
    fds.hf.sparsify(Model(), RULE)
    mask = REGISTERED["masks", "fds_sparse"]
    causal = sys.modules["transformers.masking_utils"].causal_mask_function
    keys = torch.ones(2, 5, dtype=torch.bool)
    assert mask(2, 1, 5, 4, mask_function=causal, attention_mask=keys) is keys
    assert mask(2, 5, 5, mask_function=causal) is None
    for q_offset, kv_offset, length in ((torch.tensor(4), 0, 5), (4, 1, 5), (4, 0, 16)):
        with pytest.raises(KernelError, match="DynamicCache"):
            mask(2, 1, length, q_offset, kv_offset, mask_function=causal, attention_mask=keys)


class RobertaEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(model_type="roberta", max_position_embeddings=10)
        self.position_embeddings = nn.Embedding(10, 3, padding_idx=1)
        self.register_buffer("position_ids", torch.arange(10)[None], persistent=False)


def test_a_longer_table_keeps_the_rows_before_the_first_position():
    short = RobertaEmbeddings()
    old = short.position_embeddings.weight
    longer = fds.hf.extend_position_embedding(short, 20)
    table = longer.position_embeddings
    assert torch.equal(table.weight, torch.cat([old[:2], old[2:], old[2:], old[2:6]]))
    assert table.padding_idx == 1 and longer.position_ids.shape == (1, 22)
    assert (longer.config.max_position_embeddings, short.config.max_position_embeddings) == (22, 10)
    for length in (8, 0, None):
        with pytest.raises(ComposeError, match="max_position"):
            fds.hf.extend_position_embedding(short, length)
