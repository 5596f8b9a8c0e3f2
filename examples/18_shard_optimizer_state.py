"""ZeRO stage 1: a rank keeps one slice of the parameters and of the optimizer state, and updates only that.

Parameters are concatenated into flat buckets, and each bucket is cut into one slice per rank. A step gathers whole
parameters at its start, sums gradients once at its end and updates its slice: bit-equal to stage 0, with a fraction of
the memory between steps and the same traffic.
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


torch.manual_seed(0)
apply, params, _ = fds.functional(Model())


def loss_fn(params, batch):
    context, following = batch
    return F.cross_entropy(apply(params, context), following)


def train(stage):
    dp = fds.mesh(dp=-1)["dp"]
    step = fds.compose(fds.accumulate(2), fds.shard_optimizer(dp, stage=stage), fds.adamw(lr=3e-3))(loss_fn)
    state = step.init(params, key=0)
    for i in range(10):
        rows = [x.chunk(dp.size)[dp.index] for x in batch(i)]
        state, _ = step(state, rows)
    held = {name: tuple(x.shape) for name, x in fds.tree.paths(state).items()}
    return step.params(state), step.describe(state), held  # whole parameters: a collective


def apart(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in params)


everywhere, full, _ = fds.simulate(lambda: train(stage=0), 4)[0]
results = fds.simulate(lambda: train(stage=1), 4)
sliced, part, held = results[0]
print(part)
print("a rank's state:", ", ".join(f"{name} {shape}" for name, shape in held.items() if shape))

# Slices cover everything once, except for the padding of buckets.
P = sum(x.numel() for x in params.values())
for name in ("params", "opt"):
    print(f"{name:<6} {full.num_bytes[name]:>9,} bytes at stage 0, {part.num_bytes[name]:>9,} at stage 1")
    assert part.num_bytes[name] * 4 <= full.num_bytes[name] * 1.01
assert full.num_bytes["params"] == 4 * P and full.num_bytes["opt"] == 2 * 4 * P  # float32, Adam's two averages
assert part.num_bytes["whole"] == part.num_bytes["gradients"] == 4 * P  # only within a step

# The same sums in the same order give the same bits on every rank.
assert all(apart(everywhere, other) == 0 for other, _, _ in results)
assert sum(part.sent.values()) == sum(full.sent.values())
print(f"equal bit for bit; a rank sends {sum(part.sent.values()):,} bytes a step at either stage")
