"""The files of DeepSpeedExamples that compress BERT and GPT-2, on the models of transformers that they are for."""

import pytest
import torch

import fds
from fds.config import TrainingConfig
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
