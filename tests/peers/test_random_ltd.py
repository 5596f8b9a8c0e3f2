"""Blocks of transformers that keep some of the tokens: BERT, GPT-2, Llama and ViT against forwards written by hand."""

import pytest
import torch

import fds
from tests import subsets

pytestmark = pytest.mark.peers
ROWS, TOKENS, KEPT, WIDTH = 3, 10, 4, 16
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}


def model(kind):
    import transformers as t

    torch.manual_seed(0)
    if kind == "bert":
        sizes = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        made = t.BertForMaskedLM(t.BertConfig(vocab_size=37, **sizes))
    elif kind == "gpt2":
        made = t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=37, n_embd=WIDTH, n_layer=3, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        )
    elif kind == "llama":
        made = t.LlamaForCausalLM(t.LlamaConfig(vocab_size=37, num_key_value_heads=1, **SIZES))
    else:
        sizes = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        made = t.ViTForImageClassification(t.ViTConfig(image_size=12, patch_size=4, num_labels=5, **sizes))
    return made.double().train()


def batch(kind, *, padded):
    g = torch.Generator().manual_seed(1)
    if kind == "vit":
        return {
            "pixel_values": torch.randn(ROWS, 3, 12, 12, generator=g, dtype=torch.float64),
            "labels": torch.arange(3),
        }
    ids = torch.randint(37, (ROWS, TOKENS), generator=g)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 7:] = 0
    return {"input_ids": ids, "labels": ids, **({"attention_mask": mask} if padded else {})}


def loss_of(kind, out, rows):
    """Return the loss in float64, which transformers computes in float32."""
    out, labels = (out[:, :-1], rows["labels"][:, 1:]) if kind in ("gpt2", "llama") else (out, rows["labels"])
    return torch.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), labels.flatten())


def by_hand(kind, made, rows, indices):
    """Return the loss of a forward whose middle block computes the tokens of `indices` (B, k)."""
    places = torch.arange(TOKENS).expand(ROWS, -1)
    padding = rows.get("attention_mask", torch.ones(ROWS, TOKENS)).bool()
    if kind == "bert":
        x, blocks, causal = made.bert.embeddings(rows["input_ids"]), made.bert.encoder.layer, False
    elif kind == "gpt2":
        x = made.transformer.wte(rows["input_ids"]) + made.transformer.wpe(places)
        blocks, causal = made.transformer.h, True
    elif kind == "llama":
        x, blocks, causal = made.model.embed_tokens(rows["input_ids"]), made.model.layers, True
    else:
        x, blocks, causal = made.vit.embeddings(rows["pixel_values"]), made.vit.layers, False
        padding = torch.ones(x.shape[:2]).bool()
    for i, block in enumerate(blocks):
        at = indices if i == 1 else torch.arange(x.shape[1]).expand(len(x), -1)
        pick = torch.arange(len(x))[:, None]
        sees = padding[pick, at][:, None, None, :].expand(-1, 1, at.shape[1], -1)
        if causal:
            sees = sees & (at[:, None, :, None] >= at[:, None, None, :])
        mask = torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -torch.inf)
        more = {"position_embeddings": made.model.rotary_emb(x, position_ids=at)} if kind == "llama" else {}
        y = block(x[pick, at], attention_mask=mask, **more)
        x = x.clone()
        x[pick, at] = y
    if kind == "vit":
        return loss_of(kind, made.classifier(made.vit.layernorm(x)[:, 0]), rows)
    if kind == "bert":
        return loss_of(kind, made.cls(x), rows)
    return loss_of(kind, made.lm_head((made.transformer.ln_f if kind == "gpt2" else made.model.norm)(x)), rows)


@pytest.fixture
def drawn(monkeypatch):
    return subsets.noted(monkeypatch)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("recomputes", ["", "inside", "outside"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "vit"])
def test_a_middle_block_that_keeps_tokens_is_the_forward_by_hand(kind, recomputes, padded, attention, drawn):
    if kind == "vit" and padded:
        return
    made, rows = model(kind), batch(kind, padded=padded)
    made.set_attn_implementation(attention)
    if recomputes == "inside":
        made.activation_checkpointing_enable()
        made.config.use_cache = False
    apply, params, _ = fds.functional(made)
    loss = lambda params, rows: loss_of(kind, apply(params, **rows).logits, rows)
    more = [fds.checkpoint_activations()] if recomputes == "outside" else []
    step = fds.compose(fds.random_ltd([1], lambda t: KEPT), *more, fds.sgd(1.0))(loss)
    state = step.init(params)
    new, metrics = step(state, rows)
    made = model(kind)  # it draws as the one before
    made.set_attn_implementation(attention)
    want = by_hand(kind, made, rows, drawn[0])
    want.backward()
    torch.testing.assert_close(metrics["loss"], want.detach(), rtol=0, atol=1e-12)
    for name, p in made.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(state.params[name] - new.params[name], grad, rtol=0, atol=1e-12)
    assert len(drawn) == (2 if recomputes == "outside" else 1) and all(torch.equal(drawn[0], index) for index in drawn)
    evaluated = step.evaluate(state, rows)["loss"]
    torch.testing.assert_close(evaluated, loss_of(kind, made.eval()(**rows).logits, rows).detach(), rtol=0, atol=1e-12)


def test_kept_tokens_are_those_of_deepspeeds_scheduler(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler

    g = torch.Generator().manual_seed(0)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=g))
    for _ in range(50):
        multiple = draw(1, 17)
        least, steps = multiple * draw(1, 9), draw(1, 60)
        greatest = least + multiple * draw(0, 20)
        layers, total = draw(1, 5), draw(5, 12)
        asked = RandomLTDScheduler(
            {
                "total_layer_num": total,
                "random_ltd_layer_num": layers,
                "global_batch_size": 1,
                "random_ltd_schedule": {
                    "min_value": least,
                    "max_value": greatest,
                    "schedule_type": "fixed_linear",
                    "schedule_config": {"require_steps": steps, "seq_per_step": multiple},
                },
                "layer_token_lr_schedule": {"enabled": False},
            }
        )
        kept = fds.schedules.fixed_linear(least, greatest, steps, difficulty_step=multiple)
        followed = fds.schedules.by_layer_tokens(lambda t: t, kept, greatest, layers=layers, total=total)
        for t in range(80):
            assert followed(t) * greatest * total == pytest.approx(asked.state["consumed_layer_tokens"], rel=1e-12)
            asked.update_seq(t)
            assert kept(t) == asked.get_current_seq()
