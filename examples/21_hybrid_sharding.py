"""Hybrid sharding: slices inside a node, and copies of them on every node.

With `replicate=` batches differ over both axes, slices over the first only. Parameters are gathered from ranks that
are near; what travels far is sums of gradients. A rank holds what it would hold if its node were alone.
"""

import inspect
import textwrap

import torch
import torch.nn.functional as F
from torch import nn

import fds

torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 9, 1)  # eight bytes, and the one that follows them


def batch(i, rows=64):
    at = torch.randint(len(windows), (rows,), generator=torch.Generator().manual_seed(i))
    return windows[at, :8], windows[at, 8]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.hidden = nn.Linear(8 * 32, 128)
        self.blocks = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 256)

    def forward(self, context):
        x = F.gelu(self.hidden(self.embed(context).flatten(1)))
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.head(self.norm(x))


apply, _, _ = fds.functional(Model())


def loss_fn(params, batch):
    context, following = batch
    return F.cross_entropy(apply(params, context), following)


def train(hybrid):
    mesh = fds.mesh(node=2, gpu=2)  # the last axis varies fastest: ranks 0 and 1 are one node
    data = mesh["node", "gpu"]  # all four ranks, flattened
    if hybrid:
        shard = fds.shard_optimizer(mesh["gpu"], replicate=mesh["node"], stage=3, bucket_bytes=64 * 1024)
    else:
        shard = fds.shard_optimizer(data, stage=3, bucket_bytes=64 * 1024)
    step = fds.compose(shard, fds.adamw(lr=3e-3))(loss_fn)
    state = step.init(fds.recipe(Model), key=0)
    for i in range(4):
        rows = [x.chunk(data.size)[data.index] for x in batch(i)]
        with fds.collectives.counted() as traffic:
            state, _ = step(state, rows)
    return step.params(state), step.describe(state), traffic


def apart(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


far, told_far, one_axis = fds.simulate(lambda: train(hybrid=False), 4)[0]
near, told_near, two_axes = fds.simulate(lambda: train(hybrid=True), 4)[0]
for name, traffic in (("slices over all", one_axis), ("inside a node", two_axes)):
    for (op, axis), count in traffic.counts.items():
        if count.bytes_sent > 1000:  # the rest are small messages: losses, norms, the order of gathers
            print(f"{name:<16}{op:<15} over {axis:<9} {count.bytes_sent:>9,} bytes")
print(f"a rank holds {told_far.num_bytes['params']:,} and {told_near.num_bytes['params']:,} bytes of parameters")

# A rank holds a half, not a quarter. In return gathers stay inside a node.
assert told_near.num_bytes["params"] == 2 * told_far.num_bytes["params"]
assert {axis for op, axis in two_axes.counts if op == "all_gather"} == {"gpu"}
assert two_axes["all_reduce", "node"].bytes_sent < 0.5 * one_axis.bytes_sent  # traffic between nodes

assert apart(near, far) < 1e-3  # the same training to rounding: ranks of a node are summed first
