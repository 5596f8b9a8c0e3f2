import math

import attrs
import pytest
import torch

from fds.errors import KernelError
from fds.nn import TransformerConfig, TransformerLayer

BERT_LARGE = {"hidden_size": 1024, "heads": 16, "num_hidden_layers": 24}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0),
        ("hidden_size", 1.5),
        ("hidden_size", None),
        ("hidden_size", True),
        ("heads", -1),
        ("heads", 3),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", None),
        ("intermediate_size", 0),
        ("batch_size", 0),
        ("batch_size", -1),
        ("attn_dropout_ratio", 1.0),
        ("hidden_dropout_ratio", -0.1),
        ("attn_dropout_ratio", math.nan),
        ("initializer_range", -1),
        ("initializer_range", math.inf),
        ("layer_norm_eps", "small"),
        ("activation", "relu"),
        ("pre_layer_norm", 1),
        ("causal", None),
        ("normalize_invertible", "yes"),
        ("gelu_checkpoint", 0),
        ("attn_dropout_checkpoint", 2),
        ("stochastic_mode", "on"),
        ("adjust_init_range", 0),
        ("return_tuple", 1),
        ("training", "no"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(field, value):
    with pytest.raises(KernelError) as caught:
        TransformerConfig(**BERT_LARGE | {field: value})
    assert caught.value.where == ("hidden_size" if (field, value) == ("heads", 3) else field)


def test_a_setting_that_does_nothing_is_not_taken():
    for name in ("local_rank", "seed", "fp16", "max_seq_length", "huggingface"):
        with pytest.raises(TypeError, match=name):
            TransformerConfig(**BERT_LARGE, **{name: 1})
        assert name in (TransformerConfig.__doc__ or "")  # what replaces it


def test_every_field_has_a_row():
    for field in attrs.fields(TransformerConfig):
        assert f"\n    {field.name}  " in (TransformerConfig.__doc__ or ""), field.name


def test_a_config_is_a_frozen_value():
    config = TransformerConfig(**BERT_LARGE)
    assert config == TransformerConfig(**BERT_LARGE) and hash(config) == hash(TransformerConfig(**BERT_LARGE))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.heads = 8  # pyright: ignore
    assert attrs.evolve(config, heads=8).heads == 8


def test_the_feed_forward_part_is_four_times_as_wide_unless_told():
    assert TransformerConfig(**BERT_LARGE).intermediate_size == 4096
    assert TransformerConfig(**BERT_LARGE, intermediate_size=5).intermediate_size == 5


@pytest.mark.parametrize("adjust", [True, False])
def test_initial_weights_have_the_range_that_was_asked_for(adjust):
    config = TransformerConfig(
        hidden_size=96, heads=4, num_hidden_layers=8, initializer_range=0.05, adjust_init_range=adjust
    )
    torch.manual_seed(0)
    layer = TransformerLayer(config)
    for name, p in layer.requires_grad_(False).named_parameters():
        if p.dim() == 1:
            assert (p == (1.0 if name in ("attn_nw", "norm_w") else 0.0)).all(), name
            continue
        want = 0.05 / 4 if adjust and name in ("attn_ow", "output_w") else 0.05
        five_sigma = 5 / math.sqrt(2 * p.numel())  # the relative deviation of a standard deviation of this many
        assert abs(float(p.std()) / want - 1) < five_sigma, name
        assert abs(float(p.mean())) < 5 * want / math.sqrt(p.numel()), name


def test_every_layer_is_adjusted_whoever_builds_it():
    config = TransformerConfig(hidden_size=8, heads=2, num_hidden_layers=2)
    assert config.output_range == 0.01
    assert attrs.evolve(config, adjust_init_range=False).output_range == 0.02
    assert TransformerConfig(hidden_size=8, heads=2, adjust_init_range=False).output_range == 0.02


DEEPSPEED = {
    "batch_size": -1,
    "hidden_size": 64,
    "intermediate_size": -1,
    "heads": 4,
    "attn_dropout_ratio": 0.1,
    "hidden_dropout_ratio": 0.0,
    "num_hidden_layers": 2,
    "initializer_range": -1,
    "layer_norm_eps": 1e-12,
    "local_rank": -1,
    "seed": -1,
    "fp16": False,
    "pre_layer_norm": True,
    "normalize_invertible": True,
    "gelu_checkpoint": False,
    "adjust_init_range": True,
    "attn_dropout_checkpoint": False,
    "stochastic_mode": False,
    "huggingface": True,
    "training": True,
}


def test_a_config_of_deepspeed_moves_over():
    want = TransformerConfig(
        hidden_size=64,
        heads=4,
        num_hidden_layers=2,
        attn_dropout_ratio=0.1,
        hidden_dropout_ratio=0.0,
        normalize_invertible=True,
        return_tuple=True,
    )
    assert TransformerConfig.from_deepspeed(DEEPSPEED) == want


@pytest.mark.parametrize(
    ("settings", "where", "hint"),
    [
        ({"hiden_size": 3}, "hiden_size", "hidden_size"),
        ({"attn_dropout_ratio": -1}, "attn_dropout_ratio", ""),
        ({"hidden_size": -1}, "hidden_size", ""),
    ],
)
def test_what_deepspeed_does_not_say_is_asked_for(settings, where, hint):
    with pytest.raises(KernelError) as error:
        TransformerConfig.from_deepspeed({**DEEPSPEED, **settings})
    assert error.value.where == where and hint in error.value.hint
