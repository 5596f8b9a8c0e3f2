"""Families of transformers, divided by what `plan="auto"` finds, against one rank: dropout on, in float64."""

import functools

import pytest
import torch
import torch.nn.functional as F

import fds
from fds.errors import ComposeError, LossError

pytestmark = pytest.mark.peers

SMALL = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 30}
LLAMA = {**SMALL, "vocab_size": 37, "max_position_embeddings": 32, "num_key_value_heads": 2, "attention_dropout": 0.2}
BERT = {**SMALL, "vocab_size": 37, "max_position_embeddings": 32}
T5 = {"vocab_size": 37, "d_model": 16, "d_kv": 6, "d_ff": 30, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.2}
GPT2 = {"vocab_size": 37, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 4}
P2 = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
PB = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}

FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, **P2}),
    "gpt2-upcast": (
        "GPT2LMHeadModel", "GPT2Config", {**GPT2, **P2, "reorder_and_upcast_attn": True, "attn_implementation": "eager"}
    ),
    "gpt2-classes": ("GPT2ForTokenClassification", "GPT2Config", {**GPT2, **P2, "num_labels": 37}),
    "bert": ("BertForMaskedLM", "BertConfig", {**BERT, **PB}),
    "bert-chunks": ("BertLMHeadModel", "BertConfig", {**BERT, **PB, "is_decoder": True, "tie_word_embeddings": False}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**BERT, **PB, "attn_implementation": "eager"}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama-eager": ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "attn_implementation": "eager", "attention_bias": True,
                    "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 6}),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "t5-gated": ("T5ForConditionalGeneration", "T5Config", {**T5, "feed_forward_proj": "gated-gelu",
                 "tie_word_embeddings": False}),
}  # fmt: skip


def model(name, **changes):
    import transformers

    kind, config, options = FAMILIES[name]
    options = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **options, **changes}
    implementation = options.pop("attn_implementation", "sdpa")
    made = getattr(transformers, config)(**options)
    made._attn_implementation = implementation
    torch.manual_seed(0)
    module = getattr(transformers, kind)(made).train()
    module = module if name == "gpt2-upcast" else module.double()  # which insists on float32
    with torch.no_grad():
        for p in module.parameters():  # norms and biases too
            p.add_(torch.randn_like(p) * 0.05)
    return module


def inputs(name):
    ids = torch.randint(3, 37, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    more = {"decoder_input_ids": ids[:, :7].flip(1)} if name.startswith("t5") else {}
    return {"input_ids": ids, "attention_mask": mask, **more}


def train(name, size, *, plan="auto", sequence=False, prepare=lambda module: None, **changes):
    """Return losses of three steps and an evaluation, the parameters after them, and what the step says of itself."""
    module = model(name, **changes)
    prepare(module)
    apply, params, _ = fds.functional(module)

    def loss(params, batch):
        logits = apply(params, **batch).logits
        targets = batch.get("decoder_input_ids", batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    axis = fds.mesh(tp=size)["tp"]
    step = fds.compose(
        fds.tensor_parallel(axis, plan, sequence=sequence), fds.clip_by_global_norm(1e9), fds.sgd(0.3, momentum=0.9)
    )(loss)
    state, losses = step.init(params, key=5), []
    for _ in range(3):
        state, metrics = step(state, inputs(name))
        losses += [metrics["loss"], metrics["grad_norm"]]
    losses.append(step.evaluate(state, inputs(name))["loss"])
    return torch.stack(losses), step.params(state), str(step.describe())


@functools.cache
def alone(name, **changes):
    return train(name, 1, **changes)


def assert_close(got, want, tolerance):
    torch.testing.assert_close(got[0], want[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got[1], want[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("size", "sequence"), [(2, False), (2, True), (4, True)])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_on_several_ranks_is_the_family_on_one(name, size, sequence):
    changes = {"num_key_value_heads": 4} if size == 4 and "num_key_value_heads" in FAMILIES[name][2] else {}
    want = alone(name, **changes)
    # Their root-mean-square norms and some softmaxes round to float32, whatever they are given
    tolerance = 1e-12 if name in ("gpt2", "gpt2-classes", "bert", "bert-chunks", "roberta") else 1e-5
    for got in fds.simulate(lambda: train(name, size, sequence=sequence, **changes), size):
        assert_close(got, want, tolerance)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_layers_that_a_model_recomputes_draw_what_they_drew(name, reentrant, sequence):
    def prepare(module):
        module.activation_checkpointing_enable({"use_reentrant": reentrant})

    want = alone(name)
    for got in fds.simulate(lambda: train(name, 2, sequence=sequence, prepare=prepare), 2):
        assert_close(got, want, 1e-12 if name == "gpt2" else 1e-5)


def test_a_plan_is_shown_and_may_be_written_out():
    module = model("llama")
    plan = fds.nn.auto_plan(module)
    assert str(plan["model.layers.0.self_attn.k_proj"]) == "column(unit=4)"
    assert str(plan["model.layers.1"]) == "sequence(enters=False)"
    assert str(plan["lm_head"]) == str(plan["model.embed_tokens"]) == "vocab"
    _, _, described = fds.simulate(lambda: train("llama", 2), 2)[0]
    assert "2 x model.layers.*.mlp.down_proj: row" in described


def refusal(module, size=2, **options):
    apply, _, _ = fds.functional(module)

    def compose():
        transform = fds.tensor_parallel(fds.mesh(tp=size)["tp"], **options)
        fds.compose(transform, fds.sgd(0.1))(lambda params, batch: apply(params, **batch).loss)

    with pytest.raises(ComposeError) as error:
        fds.simulate(compose, size)
    return str(error.value)


def test_what_is_not_known_is_refused_by_name():
    import transformers

    class Own(transformers.models.llama.modeling_llama.LlamaAttention):
        pass

    with torch.device("meta"):
        opt = transformers.OPTForCausalLM(
            transformers.OPTConfig(vocab_size=37, hidden_size=16, num_attention_heads=4, num_hidden_layers=1, ffn_dim=8)
        )
    assert "OPTForCausalLM" in refusal(opt)
    module = model("llama")
    module.model.layers[1].self_attn.__class__ = Own
    assert "model.layers.1.self_attn" in refusal(module)
    assert "a multiple of 4 heads" in refusal(model("llama"), 4)
    module = model("llama")
    module.config._attn_implementation_internal = "flash_attention_2"  # which is not installed
    assert "attn_implementation" in refusal(module)


@pytest.mark.parametrize(("name", "sequence"), [("output_attentions", False), ("output_hidden_states", True)])
def test_pieces_are_not_taken_for_whole_outputs(name, sequence):
    def run():
        apply, params, _ = fds.functional(model("llama", attn_implementation="eager"))
        loss = lambda params, batch: apply(params, **batch, labels=batch["input_ids"], **{name: True}).loss
        step = fds.compose(fds.tensor_parallel(fds.mesh(tp=2)["tp"], sequence=sequence), fds.sgd(0.1))(loss)
        step(step.init(params), inputs("llama"))

    with pytest.raises(LossError, match=f"{name}=True"):
        fds.simulate(run, 2)


SPLIT_EXPERTS = {"gate_up_proj": (1, 2), "down_proj": 2}
OWN_FORWARDS = {
    "falcon": ("FalconForCausalLM", "FalconConfig", {**SMALL, "vocab_size": 37, "bias": True, "num_kv_heads": 2,
               "new_decoder_architecture": True, "hidden_dropout": 0.2, "ffn_hidden_size": 30}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**LLAMA, "head_dim": 4}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2,
                "experts_implementation": "eager"}),
}  # fmt: skip
OWN_PLANS = {
    "falcon": {
        "transformer.word_embeddings": "vocab", "lm_head": "vocab",
        "*.self_attention": fds.nn.heads("num_heads", "num_kv_heads"),
        "*.query_key_value": fds.nn.column(unit=16), "*.dense": "row",
        "*.dense_h_to_4h": "column", "*.dense_4h_to_h": "row",
    },
    "gemma": {"model.embed_tokens": "vocab", "lm_head": "vocab", "*.mlp.gate_proj": "column", "*.mlp.up_proj": "column",
              "*.mlp.down_proj": "row"},
    "mixtral": {"*.mlp.experts": fds.nn.split(SPLIT_EXPERTS)},
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_FORWARDS)
def test_a_model_whose_layers_have_forwards_of_their_own_is_divided(name, monkeypatch):
    monkeypatch.setitem(FAMILIES, name, OWN_FORWARDS[name])
    want = train(name, 1, plan=OWN_PLANS[name])
    for got in fds.simulate(lambda: train(name, 2, plan=OWN_PLANS[name]), 2):
        assert_close(got, want, 1e-5)
