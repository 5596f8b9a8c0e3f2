"""Send fewer bytes: gradients and parameters as integers, and by way of nodes (ZeRO++), beside messages without loss.

At stage 3 parameters are gathered in forward and again in backward, and gradients are reduced. A *transport* says how:
in 8 bits, or first inside a node and then, as 4 bits, between nodes. Where a node's ranks keep second slices, backward
gathers from those. `step.describe` knows the bytes beforehand; the losses say what they cost.
"""

import inspect
import textwrap

import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.transports import hierarchical, quantized

torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 17, 1)  # sixteen bytes, and those that follow each of them


def batch(i, rows=32):
    at = torch.randint(len(windows), (rows,), generator=torch.Generator().manual_seed(i))
    return windows[at, :-1], windows[at, 1:]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(16, width)
        self.block, self.norm, self.head = Block(width), nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, tokens):
        return self.head(self.norm(self.block(self.bytes(tokens) + self.places.weight)))


apply, _, _ = fds.functional(GPT())


def loss_fn(params, batch):
    tokens, following = batch
    return F.cross_entropy(apply(params, tokens).flatten(0, 1), following.flatten())


def train(ways, calls=10):
    mesh = fds.mesh(node=2, local=2)  # ranks 0 and 1 are one node, 2 and 3 the other
    data = mesh["node", "local"]
    shard = fds.shard_optimizer(data, stage=3, bucket_bytes=128 * 1024, **ways(mesh))
    step = fds.compose(shard, fds.clip_by_global_norm(1.0), fds.adamw(lr=1e-2))(loss_fn)
    state = step.init(fds.recipe(GPT), key=0)
    for i in range(calls):
        with fds.collectives.counted() as traffic:
            state, _ = step(state, [x.chunk(data.size)[data.index] for x in batch(i)])
    far = sum(count.bytes_sent for (_, axis), count in traffic.counts.items() if "node" in axis)
    return float(step.evaluate(state, batch(1000, rows=256))["loss"]), step.describe(state).sent, far


losses, sent, far = {}, {}, {}
for name, ways in {
    "lossless": lambda mesh: {},
    "8 bits": lambda mesh: {"weights": quantized(8), "gradients": quantized(8)},
    "ZeRO++": lambda mesh: {
        "weights": hierarchical(quantized(8)),
        "gradients": hierarchical(quantized(4)),
        "secondary": mesh["local"],
    },
}.items():
    losses[name], sent[name], far[name] = fds.simulate(lambda ways=ways: train(ways), 4)[0]
    print(
        f"{name:<9} gathers {sent[name]['gather']:>9,} bytes a step, reduces {sent[name]['reduce']:>9,}, "
        f"between nodes {far[name]:>9,}; loss {losses[name]:.3f}"
    )

# 8 bits and the scale of each 256 numbers are a quarter of float32; ZeRO++ sends a twentieth between nodes.
assert sum(sent["8 bits"].values()) < 0.27 * sum(sent["lossless"].values())
assert far["ZeRO++"] < 0.06 * far["lossless"]
assert abs(losses["8 bits"] - losses["lossless"]) < 0.05 and losses["ZeRO++"] < losses["lossless"] + 0.15
