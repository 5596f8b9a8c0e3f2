"""torch.nn's transformers, divided by what `plan="auto"` finds, against one rank: dropout on, in float64."""

import functools

import pytest
import torch
from torch import nn

import fds
from fds.errors import ComposeError

torch_layers = {
    "post-norm": {"batch_first": True},
    "pre-norm": {"batch_first": True, "norm_first": True, "activation": "gelu"},
    "sequence-first": {"bias": False},
}


class Translator(nn.Module):
    def __init__(self, **options):
        super().__init__()
        same = {"dim_feedforward": 18, "dropout": 0.2, **options}
        self.batch_first = options.get("batch_first", False)
        nested = self.batch_first and not options.get("norm_first", False)  # torch warns of others
        self.embedding = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 4, **same), 2, enable_nested_tensor=nested)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 4, **same), 2)
        for p in self.parameters():
            nn.init.normal_(p, std=0.4)

    def forward(self, source, target):
        padding = source == 0
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.float64)
        x, y = self.embedding(source), self.embedding(target)
        if not self.batch_first:
            x, y = x.transpose(0, 1), y.transpose(0, 1)
        memory = self.encoder(x, src_key_padding_mask=padding)
        y = self.decoder(y, memory, tgt_mask=mask, memory_key_padding_mask=padding, tgt_is_causal=True)
        return y if self.batch_first else y.transpose(0, 1)


def train(name, size, *, sequence=False):
    torch.manual_seed(0)
    apply, params, _ = fds.functional(Translator(**torch_layers[name]).double())
    draws = torch.Generator().manual_seed(1)
    source, target = torch.randint(1, 11, (2, 7), generator=draws), torch.randint(1, 11, (2, 5), generator=draws)
    source[1, 5:] = 0
    weights = torch.randn(2, 5, 8, generator=draws, dtype=torch.float64)
    transform = fds.tensor_parallel(fds.mesh(tp=size)["tp"], sequence=sequence)
    loss = lambda params, batch: (apply(params, *batch) * weights).mean()
    step = fds.compose(transform, fds.clip_by_global_norm(1e9), fds.sgd(0.5))(loss)
    state, losses = step.init(params, key=3), []
    for _ in range(2):
        state, metrics = step(state, (source, target))
        losses += [metrics["loss"], metrics["grad_norm"]]
    losses.append(step.evaluate(state, (source, target))["loss"])
    return torch.stack(losses), step.params(state)


@functools.cache
def alone(name):
    return train(name, 1)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # evaluation on one rank takes it
@pytest.mark.parametrize(("size", "sequence"), [(2, False), (2, True), (4, True)])
@pytest.mark.parametrize("name", torch_layers)
def test_torch_transformers_on_several_ranks_are_those_on_one(name, size, sequence):
    for got in fds.simulate(lambda: train(name, size, sequence=sequence), size):
        torch.testing.assert_close(got, alone(name), rtol=1e-12, atol=1e-12)


def test_a_plan_names_what_it_divides():
    plan = {path: str(part) for path, part in fds.nn.auto_plan(Translator()).items()}
    assert plan["encoder.layers.0.self_attn"] == "heads"
    assert plan["decoder.layers.1.multihead_attn"] == "heads(cross=True)"
    assert plan["encoder.layers.0"] == plan["decoder.layers.0"] == "sequence(leaves=False)"
    assert plan["decoder.layers.1.linear2"] == "row"
    assert "embedding" not in plan


def test_outputs_that_stay_together_are_counted():
    apply, _, _ = fds.functional(nn.Sequential(nn.Linear(4, 12)))

    def compose():
        plan = {"0": fds.nn.column(unit=4)}
        fds.compose(fds.tensor_parallel(fds.mesh(tp=2)["tp"], plan), fds.sgd(0.1))(lambda p, x: apply(p, x).mean())

    with pytest.raises(ComposeError, match="a multiple of 2 heads"):
        fds.simulate(compose, 2)
