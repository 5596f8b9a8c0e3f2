"""Modules and batches of Hugging Face's transformers, with random weights: tied weights, encodings, eval mode."""

import warnings

import pytest
import torch

import fds
from fds.errors import LossWarning
from tests.bits import assert_same_bits

pytestmark = pytest.mark.peers


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=31, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    config._attn_implementation = "eager"
    return GPT2LMHeadModel(config)


def encoding(**extra):
    from transformers import BatchEncoding

    tokens = torch.randint(0, 31, (4, 6), generator=torch.Generator().manual_seed(0))
    return BatchEncoding({"input_ids": tokens, "labels": tokens, **extra})


ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
CONFIG = {"train_batch_size": 4, "gradient_accumulation_steps": 2, **ADAMW}


@pytest.mark.parametrize("stage", [0, 3])
def test_gpt2_trains_on_encodings_and_goes_back_into_its_module(stage):
    torch.manual_seed(0)
    start = gpt2().train().state_dict()

    def run():
        module = gpt2().train()
        module.load_state_dict(start)
        config = {**CONFIG, "train_batch_size": 8, "zero_optimization": {"stage": stage}} if stage else CONFIG
        step, state, _, _ = fds.initialize(module, config=config)
        state, metrics = step(state, encoding())
        assert metrics["loss"].isfinite()
        other = step.into(gpt2(), state)
        assert other.lm_head.weight is other.transformer.wte.weight
        assert_same_bits(dict(other.named_parameters()), step.params(state))
        want = step.evaluate(state, encoding())["loss"]
        with torch.no_grad():
            assert_same_bits(other.eval()(**encoding()).loss, want)
        return float(metrics["loss"])

    assert len(set(fds.simulate(run, 2 if stage else 1))) == 1


def test_float_inputs_of_an_encoding_are_cast():
    batch, seen = encoding(values=torch.ones(4, 3)), []
    loss = lambda p, b: seen.append((type(b), b["values"].dtype, b["input_ids"].dtype)) or (b["values"] @ p["w"]).mean()
    step = fds.compose(fds.precision(torch.bfloat16), fds.accumulate(2), fds.sgd(0.1))(loss)
    step(step.init({"w": torch.ones(3)}), batch)
    assert seen == [(type(batch), torch.bfloat16, torch.int64)] * 2


def test_the_eval_mode_of_from_pretrained_is_told(tmp_path):
    gpt2().save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = gpt2().from_pretrained(tmp_path)
    step, state, _, _ = fds.initialize(module, config=CONFIG)
    with pytest.warns(LossWarning, match="from_pretrained"):
        step(state, encoding())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # which Dynamo reads
def test_gpt2_is_one_graph_and_its_blocks_share_one():
    torch.manual_seed(0)
    module, graphs = gpt2().train(), []
    module.loss_type = "ForCausalLM"  # else it logs a warning, which no graph can hold
    blocks = [Blocks(block) for block in module.transformer.h]

    def counted(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    apply, params, _ = fds.functional(module)
    whole = lambda p, batch: apply(p, **batch).loss
    layers = fds.Layers([*blocks, *blocks], torch.nn.MSELoss())
    states = torch.randn(4, 6, 8), torch.zeros(4, 6, 8)
    for loss, start, batch, count in ((whole, params, dict(encoding()), 1), (layers, layers.init, states, 3)):
        compiled, plain = (fds.compose(*more, fds.sgd(0.1))(loss) for more in ([fds.compile(backend=counted)], []))
        got, want = (step(step.init(start, key=1), batch) for step in (compiled, plain))
        torch.testing.assert_close(fds.tree.leaves(got), fds.tree.leaves(want))
        assert len(graphs) == count
        graphs.clear()


class Blocks(torch.nn.Module):
    """A block that returns the hidden states alone."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        out = self.block(x)
        return out[0] if isinstance(out, tuple) else out
