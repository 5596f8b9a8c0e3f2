"""Flops, MACs and parameters beside those of DeepSpeed's `get_model_profile`, equal but for what it counts wrongly."""

import pytest
import torch

import fds

pytestmark = pytest.mark.peers

ROWS, TOKENS = 2, 16


def ids():
    return {"input_ids": torch.zeros(ROWS, TOKENS, dtype=torch.long)}


def bert():
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(attn_implementation="sdpa")), ids()


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa")), ids()


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config), ids()


def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig()), {"pixel_values": torch.zeros(ROWS, 3, 64, 64)}


# Beside two flops a multiplication DeepSpeed adds so many for an element of what it wraps. It does not see what is
# bound before it wraps it, as transformers binds gelu, nor `a + b`, tanh and RMS norms; it has no flops for the bias of
# a linear layer, and for that of `addmm` those of the vector, not of every row.
@pytest.mark.parametrize(
    ("make", "of_an_element", "biases"),
    [
        (bert, {"aten.native_layer_norm": 5}, 0),
        (gpt2, {"aten.native_layer_norm": 5}, 12 * (3 + 1 + 4 + 1) * 768),
        (llama, {"aten.silu": 1}, 0),
        (
            resnet,
            {
                "aten._native_batch_norm_legit_no_training": 2,
                "aten.relu": 1,
                "aten.max_pool2d_with_indices": 1,
                "aten.mean": 1,  # adaptive average pooling to one pixel
            },
            0,
        ),
    ],
)
def test_a_forward_is_what_deepspeed_counts_but_for_what_it_misses(make, of_an_element, biases):
    from deepspeed.profiling.flops_profiler import get_model_profile

    model, example = make()
    flops, macs, num_parameters = get_model_profile(model, kwargs=example, print_profile=False, as_string=False)
    ours = fds.profile_model(model, example)
    others = sum(n * ours.operators[name]["forward"].elements for name, n in of_an_element.items())
    forward = ours.phases["forward"]
    assert (forward.macs, ours.num_parameters) == (macs, num_parameters)
    assert forward.flops + others + biases == flops
