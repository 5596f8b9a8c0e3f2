"""Sparse models of transformers, beside the dense ones with the layout as a mask in float64, and in steps."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F

import fds
from fds.attention_layouts import bigbird, bslongformer, dense
from fds.errors import AttentionLayoutError, ComposeError, KernelError, LossError
from tests.peers.test_tensor_parallel import model as made

pytestmark = pytest.mark.peers

TOKENS, BLOCK, HEADS = 21, 4, 4  # the last block is partly empty
PER_HEAD = functools.partial(bigbird, block=BLOCK, key=3, different_layout_per_head=True)
FAMILIES = ["bert", "roberta", "gpt2", "llama"]
DRY = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "roberta": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {"attention_dropout": 0.0},
    "bert-chunks": {},
    "t5": {},
}
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}
LLAMA = {"rtol": 1e-5, "atol": 1e-5}  # whose norms round to float32


def model(name, **changes):
    return made(name, **{**DRY[name], "attn_implementation": "sdpa", **changes})


def tolerance(name):
    return LLAMA if name == "llama" else TOLERANCE


def ids(rows=2, tokens=TOKENS):
    return torch.randint(3, 37, (rows, tokens), generator=torch.Generator().manual_seed(1))


def padding(rows=2):
    mask = torch.ones(rows, TOKENS, dtype=torch.int64)
    mask[1, 15:] = 0
    return mask


def expanded(name, layout, key_padding=None):
    """Return what a dense model adds to scores: 0 where the layout lists a key that is seen, else -inf."""
    listed = torch.from_numpy(layout.as_array()).repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    seen = listed[None, :, :TOKENS, :TOKENS].expand(2, HEADS, -1, -1)
    seen = seen.tril() if name in ("gpt2", "llama") else seen
    seen = seen if key_padding is None else seen & key_padding.bool()[:, None, None]
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)


def logits_and_gradients(module, mask):
    """Return logits, and the gradients of all parameters."""
    logits = module(input_ids=ids(), attention_mask=mask, use_cache=False).logits
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    named = dict(module.named_parameters())
    grads = torch.autograd.grad((logits * weights).sum(), list(named.values()), allow_unused=True)
    return logits, dict(zip(named, grads, strict=True))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_sparse_model_is_the_dense_one_with_the_layout_as_a_mask(name, masked):
    whole = model(name)
    key_padding = padding() if masked else None
    layout = PER_HEAD(HEADS, -(-TOKENS // BLOCK))
    sparse = fds.hf.sparsify(whole, PER_HEAD)
    got = logits_and_gradients(sparse, key_padding)
    whole.set_attn_implementation("eager")
    want = logits_and_gradients(whole, expanded(name, layout, key_padding))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance(name))
    assert not torch.allclose(got[0], whole(input_ids=ids(), attention_mask=key_padding).logits)


@pytest.mark.parametrize("name", FAMILIES)
def test_with_all_blocks_it_is_the_model_and_shares_its_weights(name):
    whole = model(name)
    before = copy.deepcopy(whole.config.to_dict())
    sparse = fds.hf.sparsify(whole, dense)
    assert all(x is y for x, y in zip(whole.parameters(), sparse.parameters(), strict=True))
    assert (whole.config.to_dict(), whole.config._attn_implementation) == (before, "sdpa")
    assert fds.hf.is_sparse(sparse) and not fds.hf.is_sparse(whole)
    for mask in (None, padding()):
        got, want = logits_and_gradients(sparse, mask), logits_and_gradients(whole, mask)
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, **tolerance(name))
    assert set(sparse.state_dict()) == set(whole.state_dict())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("as_documents", [True, False])
def test_packed_rows_stay_apart(name, as_documents, monkeypatch):
    whole = model(name)
    positions = torch.tensor([[*range(9), *range(12)], [*range(5), *range(16)]])
    want = whole(input_ids=ids(), position_ids=positions, use_cache=False).logits
    # by numbers of documents, and by a mask of tokens by tokens where transformers no longer shows these
    monkeypatch.setattr(
        "transformers.masking_utils.sdpa_mask" if as_documents else "fds.hf._sparse_models._documents",
        lambda *args, **options: 1 / 0 if as_documents else None,
    )
    got = fds.hf.sparsify(whole, dense)(input_ids=ids(), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, want, **tolerance(name))


def test_a_mask_of_four_dims_is_what_it_is_for_the_dense_model():
    whole = model("llama")
    mask = torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)) > 0.3
    mask |= torch.eye(TOKENS, dtype=torch.bool)
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    sparse = fds.hf.sparsify(whole, dense)
    want = whole(input_ids=ids(), attention_mask=mask).logits
    for given_mask in (mask, added):
        got = sparse(input_ids=ids(), attention_mask=given_mask, use_cache=False).logits
        torch.testing.assert_close(got, want, **LLAMA)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_with_a_cache_is_that_without_one_where_the_layout_is_cropped(name):
    whole = model(name).eval()
    sparse = fds.hf.sparsify(whole, PER_HEAD, max_tokens=32)
    options = {"max_new_tokens": 9, "do_sample": False, "attention_mask": padding(), "pad_token_id": 0}
    options["attention_mask"] = padding().flip(1)  # on the left
    with_cache, without = (sparse.generate(ids(), use_cache=on, **options) for on in (True, False))
    assert torch.equal(with_cache, without)
    cached = sparse(ids()[:, :13], use_cache=True)
    rest = sparse(ids()[:, 13:], past_key_values=cached.past_key_values).logits
    torch.testing.assert_close(rest, sparse(ids()).logits[:, 13:], **tolerance(name))
    by_rule = fds.hf.sparsify(whole, PER_HEAD)
    with pytest.raises(KernelError, match="max_tokens"):
        by_rule.generate(ids(), use_cache=True, **options)
    assert by_rule.generate(ids(), use_cache=False, **options).shape[1] == TOKENS + 9
    mask = torch.ones(2, 1, 8, TOKENS, dtype=torch.bool)
    with pytest.raises(KernelError, match="bias"):
        sparse(
            ids()[:, 13:], past_key_values=sparse(ids()[:, :13], use_cache=True).past_key_values, attention_mask=mask
        )
    with pytest.raises(KernelError, match="DynamicCache"):
        sparse.generate(ids(), cache_implementation="static", **options)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_dropout_of_weights_is_drawn_in_training_and_nowhere_else(name):
    rate = {"attn_pdrop": 0.5} if name == "gpt2" else {"attention_probs_dropout_prob": 0.5}
    sparse = fds.hf.sparsify(model(name, **rate), PER_HEAD)
    torch.manual_seed(0)
    one, other = (sparse(input_ids=ids(), use_cache=False).logits for _ in range(2))
    torch.manual_seed(0)
    torch.testing.assert_close(sparse(input_ids=ids(), use_cache=False).logits, one, rtol=0, atol=0)
    assert not torch.allclose(one, other)
    torch.testing.assert_close(*(sparse.eval()(input_ids=ids()).logits for _ in range(2)), rtol=0, atol=0)


def trained(name, axes, *more, sp=1, dp=1, changes=None):
    """Return the loss and parameters after two steps of a sparse model, of which ranks may have parts."""
    mesh = fds.mesh(**axes)
    axis = mesh["sp"] if sp > 1 else None
    apply, params, _ = fds.functional(fds.hf.sparsify(model(name, **(changes or {})), PER_HEAD, axis=axis))
    rows, targets = ids(4, 24), ids(4, 25)[:, 1:].clone()
    targets[:, :3] = -100
    batch = {"ids": rows, "targets": targets, "positions": torch.arange(24).expand(4, -1) + 2 * (name == "roberta")}
    cut = lambda x: x.chunk(dp)[mesh["dp"].index if dp > 1 else 0].chunk(sp, 1)[axis.index if axis else 0]

    def loss(params, batch):
        logits = apply(params, batch["ids"], position_ids=batch["positions"]).logits
        total = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
        return fds.Mean(total, (batch["targets"] != -100).sum())

    step = fds.compose(*(make(mesh) for make in more), fds.sgd(0.3))(loss)
    state = step.init(params, key=2)
    for _ in range(2):
        state, metrics = step(state, {key: cut(x) for key, x in batch.items()})
    return metrics["loss"], step.params(state)


@functools.cache
def alone(name):
    return trained(name, {"dp": 1})


WAYS = {
    "heads": (2, {"tp": 2}, [lambda mesh: fds.tensor_parallel(mesh["tp"], "auto")], {}),
    "tokens": (2, {"sp": 2}, [lambda mesh: fds.context_parallel(mesh["sp"])], {"sp": 2}),
    "slices and recomputation": (
        2,
        {"dp": 2},
        [lambda mesh: fds.checkpoint_activations(), lambda mesh: fds.shard_optimizer(mesh["dp"], stage=3)],
        {"dp": 2},
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_over_ranks_is_the_step_of_one(name, way):
    ranks, axes, transforms, sizes = WAYS[way]
    want = alone(name)
    for got in fds.simulate(lambda: trained(name, axes, *transforms, **sizes), ranks):
        torch.testing.assert_close(got, want, **tolerance(name))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile itself
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_compiled_step_is_one_graph(name):
    got = trained(name, {"dp": 1}, lambda mesh: fds.compile(backend="aot_eager"))
    torch.testing.assert_close(got, alone(name), **tolerance(name))


class Block(torch.nn.Module):
    """A block that returns the hidden states alone."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        out = self.block(x)
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_blocks_in_stages_are_those_of_one_rank(name):
    def run(*transforms, stages=1):
        sparse = fds.hf.sparsify(model(name), PER_HEAD)
        blocks = sparse.transformer.h if name == "gpt2" else sparse.bert.encoder.layer
        layers = fds.Layers([Block(block) for block in blocks], F.mse_loss)
        plan = fds.pipeline(fds.plans.one_f_one_b, fds.mesh(pp=stages)["pp"], num_microbatches=2)
        step = fds.compose(plan, *transforms, fds.sgd(0.3))(layers)
        state = step.init(layers.init)
        x = torch.randn(4, TOKENS, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        for _ in range(2):
            state, metrics = step(state, (x, x.flip(1)))
        return metrics["loss"], step.params(state)

    want = run()
    for got in fds.simulate(lambda: run(fds.checkpoint_activations(), stages=2), 2):
        torch.testing.assert_close(got, want, **TOLERANCE)


TENSOR = [lambda mesh: fds.tensor_parallel(mesh["tp"], "auto")]
TOKENS_CUT = [lambda mesh: fds.context_parallel(mesh["sp"])]
ZIGZAG = [lambda mesh: fds.context_parallel(mesh["sp"], layout="zigzag")]
DROPS = {"attention_dropout": 0.5}


@pytest.mark.parametrize(
    ("axes", "transforms", "sizes", "changes", "words"),
    [
        ({"tp": 2}, TENSOR, {}, DROPS, "dropout"),
        ({"sp": 2}, TOKENS_CUT, {"sp": 2}, DROPS, "dropout"),
        ({"sp": 2}, ZIGZAG, {"sp": 2}, {}, "contiguous"),
        ({"sp": 2}, TOKENS_CUT, {"sp": 2}, {"num_attention_heads": 1, "num_key_value_heads": 1}, "multiple of 2 heads"),
    ],
)
def test_what_ranks_cannot_compute_is_refused(axes, transforms, sizes, changes, words):
    with pytest.raises((ComposeError, KernelError, LossError), match=words):
        fds.simulate(lambda: trained("llama", axes, *transforms, **sizes, changes=changes), 2)


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2"])
@pytest.mark.parametrize("length", [64, 70])
def test_longer_tables_repeat_and_all_else_is_shared(name, length):
    short = model(name, pad_token_id=1)
    reserved = 2 if name == "roberta" else 0
    table = lambda module: dict(module.named_parameters())[TABLES[name]]
    old, before = table(short).clone(), 32 - reserved
    longer = fds.hf.extend_position_embedding(short, length)
    want = torch.cat([old[:reserved], *[old[reserved:]] * 3])[: length + reserved]
    torch.testing.assert_close(table(longer), want, rtol=0, atol=0)
    assert longer.config.max_position_embeddings == length + reserved and table(short).shape[0] == 32
    shared = {id(p) for p in short.parameters()}
    assert [n for n, p in longer.named_parameters() if id(p) not in shared] == [TABLES[name]]
    tokens = ids(2, length)
    got = fds.hf.sparsify(longer, PER_HEAD)(input_ids=tokens)
    assert got.logits.shape[1] == length
    want = short(input_ids=tokens[:, :before]).logits
    torch.testing.assert_close(longer(input_ids=tokens[:, :before]).logits, want, **TOLERANCE)
    assert longer.train().state_dict().keys() == short.state_dict().keys()


TABLES = {
    "bert": "bert.embeddings.position_embeddings.weight",
    "roberta": "roberta.embeddings.position_embeddings.weight",
    "gpt2": "transformer.wpe.weight",
}


def test_bad_input_is_refused():
    bert, llama = model("bert"), model("llama")
    cross = model("bert-chunks", add_cross_attention=True)
    sparse, eager = fds.hf.sparsify(bert, PER_HEAD), model("bert", attn_implementation="eager")
    eager.config.output_attentions = True
    cases = [
        (lambda: fds.hf.sparsify(eager, PER_HEAD), ComposeError, "model"),
        (lambda: fds.hf.sparsify(torch.nn.Linear(2, 2), PER_HEAD), ComposeError, "model"),
        (lambda: fds.hf.sparsify(bert.bert.embeddings, PER_HEAD), ComposeError, "model"),
        (lambda: fds.hf.sparsify(model("t5"), PER_HEAD), ComposeError, "model"),
        (lambda: fds.hf.sparsify(cross, PER_HEAD), ComposeError, "model"),
        (lambda: fds.hf.sparsify(bert, 3), AttentionLayoutError, "layout"),
        (lambda: fds.hf.sparsify(bert, PER_HEAD, max_tokens=0), AttentionLayoutError, "max_tokens"),
        (lambda: fds.hf.sparsify(bert, PER_HEAD(HEADS, 4), max_tokens=16), AttentionLayoutError, "max_tokens"),
        (lambda: fds.hf.sparsify(bert, PER_HEAD, axis="sp"), ComposeError, "axis"),
        (lambda: fds.hf.sparsify(bert, PER_HEAD(3, 8))(ids()), AttentionLayoutError, "layout"),
        (lambda: fds.hf.sparsify(bert, PER_HEAD(HEADS, 5))(ids()), AttentionLayoutError, "layout"),
        (lambda: sparse(ids(), output_attentions=True), KernelError, "BertSelfAttention"),
        (lambda: model("bert", attn_implementation="fds_sparse")(ids()), KernelError, ""),
        (lambda: fds.hf.extend_position_embedding(llama, 64), ComposeError, "model"),
        (lambda: fds.hf.extend_position_embedding(bert, 32), ComposeError, "max_position"),
        (lambda: fds.hf.extend_position_embedding(bert, "64"), ComposeError, "max_position"),
        (lambda: fds.hf.extend_position_embedding(bert.bert.encoder, 64), ComposeError, "max_position"),
        (lambda: fds.hf.extend_position_embedding(None, 64), ComposeError, "model"),
    ]
    for i, (call, error, where) in enumerate(cases):
        with pytest.raises(error) as refused:
            call()
        assert where in refused.value.where, i


@pytest.mark.parametrize("sp", [1, 2])
def test_a_json_makes_the_model_sparse_and_leaves_the_users_dense(sp):
    section = {"mode": "bslongformer", "block": BLOCK, "num_sliding_window_blocks": 1}
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.3}}, "gradient_clipping": 0}
    config |= {"sparse_attention": section, "sequence_parallel_size": sp}
    tokens = ids(2, 24)

    def loss(model, batch):
        return fds.Mean(model(batch["ids"], position_ids=batch["at"]).logits.square().sum(), batch["ids"].numel() * 37)

    def run():
        whole = model("llama")
        step, state, _, _ = fds.initialize(whole, loss, config=config)
        cut = lambda x: x.chunk(sp, 1)[fds.mesh(sp=sp)["sp"].index]
        state, metrics = step(state, {"ids": cut(tokens), "at": cut(torch.arange(24).expand(2, -1))})
        assert whole.config._attn_implementation == "sdpa"
        return metrics["loss"], step.params(state)

    by_hand = fds.hf.sparsify(model("llama"), functools.partial(bslongformer, block=BLOCK, num_sliding_window_blocks=1))
    logits = by_hand(tokens).logits
    value = logits.square().mean()
    value.backward()
    params = {name: p.detach() - 0.3 * p.grad for name, p in by_hand.named_parameters()}
    for got in fds.simulate(run, sp):
        torch.testing.assert_close(got, (value.detach(), params), **LLAMA)
