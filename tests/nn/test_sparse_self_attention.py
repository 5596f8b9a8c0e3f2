"""Modules of sparse attention beside dense attention with the expanded mask, and in steps of several ranks."""

import functools
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.attention_layouts import LayoutByLength, bigbird, bslongformer, fixed, local_sliding_window
from fds.errors import AttentionLayoutError, KernelError
from fds.nn import BertSparseSelfAttention, SparseSelfAttention, pad_to_block, sparse_attention, unpad

B, H, S, D = 2, 4, 43, 6
PER_HEAD = functools.partial(bigbird, block=8, key=1, different_layout_per_head=True)
CONFIG = SimpleNamespace(hidden_size=H * D, num_attention_heads=H)


def numbers(*shape, seed=0):
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_()


def listed(layout):
    return torch.from_numpy(layout.as_array()).repeat_interleave(layout.block, 1).repeat_interleave(layout.block, 2)


def dense(q, k, v, layout, *masks):
    """Return attention by torch, with what masks add to scores: 0 or -inf of bool ones."""
    bias = torch.zeros(B, H, S, S, dtype=q.dtype).masked_fill(~listed(layout)[:, :S, :S], -math.inf)
    for mask in masks:
        added = (
            torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask
        )
        bias = bias + added
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def assert_same(got, want, leaves):
    torch.testing.assert_close(got, want)
    weights = numbers(*want.shape, seed=9).detach()
    grads = [torch.autograd.grad((out * weights).sum(), leaves) for out in (got, want)]
    torch.testing.assert_close(*grads)


KEYS = torch.arange(S) < torch.tensor([[S], [30]])
SEEN = torch.rand(S, S, generator=torch.Generator().manual_seed(3)) > 0.2
SEEN |= torch.eye(S, dtype=torch.bool)


@pytest.mark.parametrize("keys_mode", ["add", "mul"])
@pytest.mark.parametrize("mask_mode", ["add", "mul"])
@pytest.mark.parametrize("with_rpe", [False, True])
def test_masks_of_both_modes_and_a_bias_are_those_of_dense_attention(keys_mode, mask_mode, with_rpe):
    q, k, v = (numbers(B, H, S, D, seed=i) for i in range(3))
    rpe = numbers(H, S, S, seed=4) if with_rpe else None
    keys = torch.where(KEYS, 0.0, -10000.0) if keys_mode == "add" else KEYS.long() * 3
    mask = torch.randn(S, S, dtype=torch.float64) if mask_mode == "add" else SEEN.float()
    module = SparseSelfAttention(PER_HEAD, keys_mode, mask_mode, max_seq_length=None)
    got = module(q, k, v, rpe, keys, mask)
    masks = [keys[:, None, None].double() if keys_mode == "add" else KEYS[:, None, None]]
    masks += [mask if mask_mode == "add" else SEEN, *([rpe] if with_rpe else [])]
    leaves = [q, k, v, *([rpe] if with_rpe else [])]
    assert_same(got, dense(q, k, v, PER_HEAD(H, 6), *masks), leaves)


@pytest.mark.parametrize(
    "keys", [KEYS, KEYS[:, None, None], torch.where(KEYS, 0.0, torch.finfo(torch.float16).min).half()]
)
def test_key_padding_comes_in_any_form(keys):
    q, k, v = (numbers(B, H, S, D, seed=i) for i in range(3))
    got = SparseSelfAttention(PER_HEAD, max_seq_length=None)(q, k, v, key_padding_mask=keys)
    assert_same(got, dense(q, k, v, PER_HEAD(H, 6), KEYS[:, None, None]), [q, k, v])


def test_a_rule_makes_one_layout_for_the_longest_sequences_as_deepspeed_does():
    q, k, v = (numbers(B, H, S, D, seed=i) for i in range(3))
    rule = functools.partial(fixed, block=8, num_local_blocks=4)
    for most, layout in ((64, rule(H, 8).cropped(6)), (None, rule(H, 6))):
        torch.testing.assert_close(SparseSelfAttention(rule, max_seq_length=most)(q, k, v), dense(q, k, v, layout))
    assert rule(H, 8).cropped(6) != rule(H, 6)
    with pytest.raises(AttentionLayoutError, match="at most 40"):
        SparseSelfAttention(rule, max_seq_length=40)(q, k, v)
    with pytest.raises(AttentionLayoutError, match="at most 40"):
        SparseSelfAttention(rule(H, 5))(q, k, v)


def test_a_module_that_is_saved_whole_has_layouts_of_its_own():
    q, k, v = (numbers(B, H, S, D, seed=i) for i in range(3))
    module, other = (SparseSelfAttention(rule, max_seq_length=None) for rule in (PER_HEAD, fixed))
    again = pickle.loads(pickle.dumps(module))
    assert len({x.layouts.key for x in (module, other, again)}) == 3
    torch.testing.assert_close(again(q, k, v), module(q, k, v))


def test_a_rule_is_asked_once_for_the_longest_sequences_and_says_why_it_takes_none():
    asked = []
    layouts = LayoutByLength(lambda heads, blocks: asked.append(blocks) or fixed(heads, blocks), 1000)
    assert [layouts.at(2, n).blocks for n in (17, 100, 1000, 999)] == [2, 7, 63, 63] and asked == [63]
    beyond = functools.partial(bslongformer, global_block_indices=[9999])
    with pytest.raises(AttentionLayoutError, match="beyond the last"):  # and not of two blocks, that a window has three
        LayoutByLength(beyond).at(2, 20)


def test_two_layouts_of_one_length_stand_side_by_side():
    q, k, v = (numbers(B, H, S, D, seed=i) for i in range(3))
    for rule in (PER_HEAD, functools.partial(fixed, block=8)):
        got = SparseSelfAttention(rule, max_seq_length=None)(q, k, v)
        torch.testing.assert_close(got, dense(q, k, v, rule(H, 6)))


def test_bert_takes_and_shares_weights():
    theirs = nn.Module()
    theirs.config, theirs.query, theirs.key, theirs.value = CONFIG, *(nn.Linear(H * D, H * D) for _ in range(3))
    theirs.double().eval()
    shared = BertSparseSelfAttention.of(theirs, PER_HEAD, max_seq_length=None)
    assert shared.query.weight is theirs.query.weight and not shared.training
    loaded = BertSparseSelfAttention(CONFIG, PER_HEAD, max_seq_length=None).double()
    loaded.load_state_dict(theirs.state_dict())
    x = numbers(B, S, H * D)
    q, k, v = (layer(x).view(B, S, H, D).transpose(1, 2) for layer in (theirs.query, theirs.key, theirs.value))
    want = dense(q, k, v, PER_HEAD(H, 6), KEYS[:, None, None]).transpose(1, 2).flatten(2)
    mask = torch.where(KEYS, 0.0, -math.inf)[:, None, None].double()
    for module in (shared, loaded):
        torch.testing.assert_close(module(x, mask), want)


class Model(nn.Module):
    """A layer of sparse attention and a feed-forward layer, of which ranks of an axis may have parts."""

    def __init__(self, layout, axis=None):
        super().__init__()
        self.attention = BertSparseSelfAttention(CONFIG, layout, max_seq_length=None, axis=axis)
        self.out = nn.Linear(H * D, H * D)
        self.norm = nn.LayerNorm(H * D)

    def forward(self, x):
        return self.norm(x + self.out(self.attention(x, torch.ones(x.shape[:2], dtype=torch.bool))))


PLAN = {
    "*.attention": fds.nn.heads("num_attention_heads", "all_head_size"),
    **{f"*.attention.{name}": "column" for name in ("query", "key", "value")},
    "*.out": "row",
}


def module_of(seed, **options):
    torch.manual_seed(seed)
    return Model(PER_HEAD, **options).double()


def rows():
    return numbers(4, S + 1, H * D, seed=5).detach()


def trained(axes, *more, tp=1, sp=1, dp=1, layers=False):
    """Return the loss and parameters after three steps of two layers."""
    mesh = fds.mesh(**axes)
    axis = mesh["sp"] if sp > 1 else None
    modules = [module_of(i, axis=axis) for i in range(2)]
    loss = fds.Layers(modules, F.mse_loss)
    transforms = [make(mesh) for make in more]
    step = fds.compose(*transforms, fds.sgd(0.5))(loss)
    state, x = step.init(loss.init), rows()[:, : S - S % 2]
    mine = x.chunk(dp)[mesh["dp"].index if dp > 1 else 0]
    mine = mine.chunk(sp, 1)[axis.index] if axis is not None else mine
    for _ in range(3):
        state, metrics = step(state, (mine, mine * 0.5))
    return metrics["loss"], step.params(state)


def test_heads_of_these_layouts_differ():
    """Or ranks that compute by the layouts of other heads would be like one rank."""
    assert len(PER_HEAD(H, 6).patterns) == H


@functools.cache
def alone():
    return trained({"dp": 1})


WAYS = {
    "heads": (2, {"tp": 2}, [lambda mesh: fds.tensor_parallel(mesh["tp"], PLAN)], {"tp": 2}),
    "tokens": (2, {"sp": 2}, [lambda mesh: fds.context_parallel(mesh["sp"])], {"sp": 2}),
    "heads and tokens": (
        4, {"tp": 2, "sp": 2},
        [lambda mesh: fds.tensor_parallel(mesh["tp"], PLAN), lambda mesh: fds.context_parallel(mesh["sp"])],
        {"tp": 2, "sp": 2},
    ),
    "stages": (2, {"pp": 2}, [lambda mesh: fds.pipeline(fds.plans.one_f_one_b, mesh["pp"], num_microbatches=2)], {}),
    "recomputation": (1, {"dp": 1}, [lambda mesh: fds.checkpoint_activations()], {}),
    **{
        f"slices, stage {n}": (
            2, {"dp": 2}, [lambda mesh, n=n: fds.shard_optimizer(mesh["dp"], stage=n)], {"dp": 2},
        )
        for n in range(4)
    },
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_a_step_over_ranks_is_the_step_of_one(way):
    ranks, axes, transforms, sizes = WAYS[way]
    want = alone()
    for got in fds.simulate(lambda: trained(axes, *transforms, **sizes), ranks):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile itself
def test_a_compiled_step_is_one_graph_for_each_length():
    def steps(*more):
        apply, params, _ = fds.functional(module_of(0))
        step = fds.compose(*more, fds.sgd(0.5))(lambda params, x: apply(params, x).square().mean())
        state = step.init(params)
        for length in (40, 16, 40):
            state, metrics = step(state, rows()[:, :length])
        return metrics["loss"], step.evaluate(state, rows())["loss"], step.params(state)

    torch.testing.assert_close(steps(fds.compile(backend="aot_eager")), steps())


def test_ids_masks_and_embeddings_are_padded_to_a_block_and_taken_back():
    ids = torch.arange(1, 11).view(2, 5)
    table = nn.Embedding(20, 3)
    padded = pad_to_block(4, ids, None, torch.ones_like(ids), ids % 5, pad_token_id=7)
    assert padded.pad_len == 3 and padded.input_ids[:, 5:].unique().tolist() == [7]
    assert padded.attention_mask.tolist() == [[1] * 5 + [0] * 3] * 2
    assert padded.token_type_ids[:, 5:].unique().tolist() == [0]
    assert padded.position_ids[:, 5:].unique().tolist() == [7]
    by_embeddings = pad_to_block(
        4, inputs_embeds=table(ids), attention_mask=ids > 0, pad_token_id=7, model_embeddings=table
    )
    torch.testing.assert_close(by_embeddings.inputs_embeds, table(padded.input_ids))
    assert by_embeddings.attention_mask.dtype == torch.bool and not by_embeddings.attention_mask[:, 5:].any()
    torch.testing.assert_close(unpad(3, by_embeddings.inputs_embeds), table(ids))
    assert pad_to_block(5, ids) == (0, ids, None, None, None, None) and unpad(0, ids) is not None


QKV = torch.zeros(3, 1, 2, 16, 4)
REFUSED = {
    "a mode": (lambda: SparseSelfAttention(attn_mask_mode="or"), "attn_mask_mode"),
    "no rule": (lambda: SparseSelfAttention(3), "layout"),
    "no length": (lambda: SparseSelfAttention(max_seq_length=0), "max_tokens"),
    "no axis": (lambda: SparseSelfAttention(axis="sp"), "axis"),
    "a class": (lambda: LayoutByLength(dict), "layout"),
    "a rule of heads alone": (lambda: LayoutByLength(lambda heads: fixed(heads, 4)), "layout"),
    "a rule of other options": (lambda: LayoutByLength(functools.partial(fixed, sizes=4)), "layout"),
    "another block": (lambda: LayoutByLength(lambda h, n: fixed(h, n, block=8)).at(2, 16), "<lambda>(2, 1)"),
    "no layout": (lambda: LayoutByLength(lambda h, n: None).at(2, 16), "<lambda>(2, 1)"),
    "other heads": (lambda: LayoutByLength(fixed(3, 4)).at(2, 16), "layout"),
    "no tokens": (lambda: LayoutByLength(fixed).at(2, 0), "layout"),
    "no query": (lambda: SparseSelfAttention()(None, None, None), "query"),
    "integers": (lambda: SparseSelfAttention()(*QKV.long()), "query"),
    "a shape": (lambda: SparseSelfAttention()(*QKV[:, 0]), "query"),
    "another key": (lambda: SparseSelfAttention()(QKV[0], QKV[1].mT, QKV[2]), "k"),
    "a mask of integers": (lambda: SparseSelfAttention()(*QKV, None, torch.ones(1, 16).long()), "key_padding_mask"),
    "a long mask": (lambda: SparseSelfAttention()(*QKV, attn_mask=torch.ones(16, 17)), "attn_mask"),
    "no mask": (lambda: SparseSelfAttention()(*QKV, attn_mask=3), "attn_mask"),
    "an rpe": (lambda: SparseSelfAttention()(*QKV, rpe=torch.ones(16, 17)), "bias"),
    "a config": (lambda: BertSparseSelfAttention(SimpleNamespace(hidden_size=10, num_attention_heads=3)), "config"),
    "no config": (lambda: BertSparseSelfAttention(None), "config"),
    "no attention": (lambda: BertSparseSelfAttention.of(nn.Linear(2, 2)), "attention"),
    "no states": (lambda: BertSparseSelfAttention(CONFIG)(None), "hidden_states"),
    "narrow states": (lambda: BertSparseSelfAttention(CONFIG)(torch.zeros(1, 16, 3)), "hidden_states"),
    "a ring": (lambda: sparse_attention(*QKV, fixed(2, 1), method="ring"), "sparse_attention"),
    "a method": (lambda: sparse_attention(*QKV, fixed(2, 1), method="rings"), "attention"),
    "an array": (lambda: sparse_attention(*QKV, torch.ones(2, 1, 1)), "layout"),
    "a flag": (lambda: sparse_attention(*QKV, fixed(2, 1), causal=1), "causal"),
    "a block": (lambda: pad_to_block(0, torch.zeros(2, 3)), "block_size"),
    "a pad id": (lambda: pad_to_block(4, torch.zeros(2, 3), pad_token_id=-1), "pad_token_id"),
    "nothing": (lambda: pad_to_block(4), "input_ids, inputs_embeds"),
    "ids of a row": (lambda: pad_to_block(4, torch.zeros(3)), "input_ids, inputs_embeds"),
    "positions": (lambda: pad_to_block(4, torch.zeros(2, 3), position_ids=torch.zeros(2, 4)), "position_ids"),
    "no function": (lambda: pad_to_block(4, inputs_embeds=torch.zeros(2, 3, 4)), "model_embeddings"),
    "another function": (
        lambda: pad_to_block(4, inputs_embeds=torch.zeros(2, 3, 4), model_embeddings=nn.Embedding(3, 5)),
        "model_embeddings",
    ),
    "no embeddings": (
        lambda: pad_to_block(4, inputs_embeds=torch.zeros(2, 3, 4), model_embeddings=len), "model_embeddings",
    ),
    "too much": (lambda: unpad(4, torch.zeros(2, 3)), "pad_len"),
    "no output": (lambda: unpad(1, None), "sequence_output"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case):
    call, where = REFUSED[case]
    with pytest.raises((KernelError, AttentionLayoutError)) as error:
        call()
    assert error.value.where == where


def test_what_ranks_cannot_compute_is_refused():
    def over_tokens(parts="contiguous", p=0.0, heads=4):
        axis = fds.mesh(sp=2)["sp"]
        loss = lambda params, x: sparse_attention(
            *[x.view(2, 8, heads, -1).transpose(1, 2) * params["w"]] * 3, LayoutByLength(local_sliding_window),
            axis=axis, p=p, seed=1,
        ).sum()  # fmt: skip
        step = fds.compose(fds.context_parallel(axis, layout=parts), fds.sgd(0.1))(loss)
        step(step.init({"w": torch.ones(())}), torch.ones(2, 8, 12))

    cases = [({"parts": "zigzag"}, "contiguous"), ({"p": 0.1}, "dropout")]
    for options, words in [*cases, ({"heads": 3}, "heads"), ({"heads": 1}, "heads")]:
        with pytest.raises(KernelError, match=words) as error:
            fds.simulate(lambda options=options: over_tokens(**options), 2)
        assert "ring" not in error.value.hint
