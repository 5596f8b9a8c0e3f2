"""The files of DeepSpeedExamples that compress BERT and GPT-2, on the models of transformers that they are for."""

import pytest
import torch

import fds
from fds.config import TrainingConfig
from fds.errors import ComposeError
from tests.bits import assert_same_bits
from tests.config.test_compressed_training import FILES, TRAINED
from tests.golden.compressed_modules import HEADS

pytestmark = pytest.mark.peers
WIDTH, WORDS = 24, 24
TOKENS = torch.arange(10).view(2, 5) * 7 % WORDS


def model(kind, layers=3):
    import transformers as t

    torch.manual_seed(0)
    if kind == "GPT2":
        return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=WORDS, n_embd=WIDTH, n_layer=layers, n_head=HEADS)).train()
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": HEADS}
    config = t.BertConfig(vocab_size=WORDS, num_hidden_layers=layers, num_labels=3, **sizes)
    return t.BertForSequenceClassification(config).train()


@pytest.mark.parametrize("name", [name for name, (kind, _) in FILES.items() if kind != "ResNet"])
def test_a_file_composes_and_trains_on_the_model_that_it_is_for(name):
    kind, section = FILES[name]
    fp16 = {"fp16": {"enabled": name.endswith("fp16"), "initial_scale_power": 4}}
    config = TrainingConfig.of(TRAINED | {"compression_training": section} | fp16)
    module = model(kind)
    if "layer_reduction" in section:
        student = model(kind, layers=2)
        teacher, own = dict(module.named_parameters()), dict(student.named_parameters())
        student.load_state_dict(config.reduce_layers(teacher, own), strict=False)
        assert torch.equal(
            student.bert.encoder.layer[1].output.dense.weight, module.bert.encoder.layer[2].output.dense.weight
        )
        module = student
    labels = torch.tensor([0, 2]) if kind == "Bert" else TOKENS
    step, state, _, _ = fds.initialize(
        module, lambda model, batch: model(input_ids=batch[0], labels=batch[1]).loss, config=config
    )
    for _ in range(8):
        state, metrics = step(state, (TOKENS, labels))
    assert metrics["loss"].isfinite() and not metrics.get("skipped", torch.tensor(False))
    if "weight_quantization" in section:
        assert "quantize_weights" in str(step.composition)


LAYER = "bert.encoder.layer.*"
ROUNDED = fds.quantize_weights("*.layer.*.dense.weight", "*.self.*.weight", bits=4, groups="rows")
PRUNED = [
    fds.prune_heads(
        f"{LAYER}.attention.output.dense.weight",
        num_heads=HEADS,
        density=0.5,
        offset=2,
        related=[f"{LAYER}.attention.self.{name}.weight" for name in ("query", "key", "value")],
    ),
    fds.prune_rows(f"{LAYER}.intermediate.dense.weight", density=0.5, offset=3, related=f"{LAYER}.output.dense.weight"),
]
INPUTS = [
    fds.quantize_activations(
        ["*.self.query", "*.self.key", "*.self.value", "*.intermediate.dense", "*.?.output.dense"]
    ),
    fds.quantize_activations(
        "*.attention.output.dense", range="static"
    ),  # heads that are cut off were in a dynamic one
]
ORDERS = {"rounded, pruned": [ROUNDED, *PRUNED], "pruned, rounded": [*PRUNED, ROUNDED], "rounded": [ROUNDED]}


@pytest.mark.parametrize("order", ["rounded, pruned", "pruned, rounded"])
def test_a_bert_of_fewer_heads_rows_and_bits_is_baked_written_and_read(order, tmp_path):
    labels = torch.tensor([0, 2])

    def baked_after(transforms):
        apply, params, _ = fds.functional(model("Bert").double())
        loss_fn = lambda params, batch: apply(params, input_ids=batch[0], labels=batch[1]).loss
        step = fds.compose(*transforms, *INPUTS, fds.adamw(1e-3))(loss_fn)
        state = step.init(params)
        for _ in range(6):
            state, _ = step(state, (TOKENS, labels))
        return fds.bake(step, state), step.evaluate(state, (TOKENS, labels))["loss"]

    baked, loss = baked_after(ORDERS[order])
    call = lambda module: module(input_ids=TOKENS, labels=labels).to_tuple()
    assert_same_bits(call(baked.uncut)[0], loss)
    torch.testing.assert_close(call(baked.module)[0], loss, rtol=0, atol=1e-12)  # sums of fewer numbers
    smaller = fds.compression.shrink(baked.uncut, baked.cuts)  # in float
    assert_same_bits(call(baked.module), call(smaller))
    layers = {entry.name: entry for entry in baked.entries if ".layer." in entry.name and len(entry.shape) == 2}
    assert {entry.bits for entry in layers.values()} == {4} and len(layers) == 18
    assert layers["bert.encoder.layer.1.attention.output.dense.weight"].baked_shape == (WIDTH, WIDTH // 2)
    whole = {entry.name: entry.bytes_after for entry in baked_after(ORDERS["rounded"])[0].entries}
    assert sum(entry.bytes_after for entry in layers.values()) < 0.65 * sum(whole[name] for name in layers)
    lines = baked.report().splitlines()
    assert lines[0].endswith("after  not integers, as")
    assert lines[1].endswith("no view rounds it") and lines[-1].endswith("the range of those that are left")

    baked.save(tmp_path)
    fresh = fds.compression.read_baked(tmp_path, model("Bert").double())
    assert_same_bits(call(fresh), call(baked.module))
    assert fresh.bert.encoder.layer[0].attention.self.num_attention_heads == HEADS // 2
    assert sum(x.nbytes for x in fresh.state_dict().values()) < 1.01 * baked.num_bytes + 2048


def test_weights_of_conv1d_have_their_outputs_in_columns():
    module = model("GPT2")
    apply, _, _ = fds.functional(module)
    heads = fds.prune_heads("*.attn.c_proj.weight", num_heads=HEADS, density=0.5)
    rows = fds.prune_rows("*.c_fc.weight", density=0.5, related="*.mlp.c_proj.weight")
    for prune in (heads, rows):
        with pytest.raises(ComposeError, match="Conv1D"):
            fds.compose(prune, fds.adamw(1e-3))(lambda params, batch: apply(params, batch).logits.sum())
    layers = fds.Layers([module.transformer.h[0].mlp.c_fc], lambda out, y: (out - y).square().mean())
    with pytest.raises(ComposeError, match="Conv1D") as error:
        fds.compose(fds.prune_rows("*", density=0.5), fds.adamw(1e-3))(layers)
    assert error.value.where == "0.weight"
