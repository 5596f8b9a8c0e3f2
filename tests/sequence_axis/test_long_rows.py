"""The recipe of long rows on layers of one's own: ranks, tiles, slices, a medium for activations, a head in chunks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.media import Host

WORDS, WIDTH, HEADS, LENGTH, LR = 19, 8, 2, 16, 0.5
DTYPE = torch.float64


class Block(nn.Module):
    def __init__(self, axis):
        super().__init__()
        self.axis = axis
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.axis is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = fds.nn.attention(q, k, v, axis=self.axis, causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Head(nn.Module):
    """Hands its weight on to the loss, which never has all logits."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WORDS, WIDTH))

    def forward(self, x):
        return x, self.weight


def made(axis):
    torch.manual_seed(0)
    layers = [nn.Embedding(WORDS, WIDTH), Block(axis), Block(axis), Head()]
    for p in (p for layer in layers for p in layer.parameters()):
        nn.init.normal_(p, std=0.4)
    return [layer.to(DTYPE) for layer in layers]


def rows():
    tokens = torch.randint(WORDS, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def by_hand():
    """Return the loss of whole rows, and parameters after a step, in plain torch."""
    module = nn.Sequential(*made(None))
    x, targets = rows()
    hidden, weight = module(x)
    loss = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.detach(), {name: (p - LR * p.grad).detach() for name, p in module.named_parameters()}


def criterion(out, targets):
    hidden, weight = out
    total = fds.kernels.linear_cross_entropy(hidden, weight, targets, reduction="sum", chunk_tokens=3)
    return fds.Mean(total, torch.tensor(float(targets.numel())))


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_of_it_at_once_is_the_loop_by_hand(ranks):
    loss, params = by_hand()

    def body():
        axis = fds.mesh(sp=-1)["sp"]
        layers = fds.Layers(made(axis), criterion)
        step = fds.compose(
            fds.shard_optimizer(axis, stage=3),
            fds.context_parallel(axis),
            fds.checkpoint_activations(store=Host(cached=True)),
            fds.tile("*.mlp", tokens=5),
            fds.clip_by_global_norm(1e9),
            fds.sgd(LR),
        )(layers)
        state = step.init(layers.init)
        state, metrics = step(state, [x.chunk(axis.size, 1)[axis.index] for x in rows()])
        return metrics["loss"], step.params(state)

    for got_loss, got in fds.simulate(body, ranks):
        torch.testing.assert_close(got_loss, loss, rtol=1e-12, atol=0)
        for name, x in params.items():
            torch.testing.assert_close(got[name], x, rtol=1e-11, atol=1e-12)
