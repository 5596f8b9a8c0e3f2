"""Profile a step: flops by module, bytes predicted and measured, and how the loss curves. None of it changes the run.

`fds.profile` counts a call, `fds.profile_memory` follows its tensors to the peak, `fds.estimate_memory` needs nothing
but shapes, and `fds.curvature` differentiates the loss twice.
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
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 256)

    def forward(self, context):
        x = self.embed(context).flatten(1)
        return self.head(self.norm(F.gelu(self.hidden(x))))


torch.manual_seed(0)
apply, params, _ = fds.functional(Model())


def loss_fn(params, batch):
    context, following = batch
    return F.cross_entropy(apply(params, context), following)


step = fds.compose(fds.accumulate(2), fds.adamw(lr=3e-3))(loss_fn)
state = step.init(params, key=0)
for i in range(20):
    state, metrics = step(state, batch(i))

profile = fds.profile(step, state, batch(20), depth=1)
print(profile)
# A linear layer of m inputs and n outputs takes 2mn flops a row, and its backward as many for each of two gradients.
hidden, rows = profile.modules["hidden"], 64
assert hidden.work["forward"].flops == 2 * rows * 256 * 128
assert hidden.work["backward"].flops == 2 * hidden.work["forward"].flops

memory = fds.profile_memory(step, state, batch(20))
print(memory)
assert abs(memory.predicted.peak / (memory.peak - memory.activations) - 1) < 0.05

# Before anything is built: the same step on one of eight ranks, of which none runs.
rank = fds.estimate_memory(
    lambda mesh: fds.compose(fds.shard_optimizer(mesh["dp"], stage=2), fds.adamw(lr=3e-3)), params, mesh={"dp": 8}
)
print(f"between steps {memory.predicted.between:,} bytes, of eight ranks each {rank.between:,}")
assert rank.between < memory.predicted.between / 7

blocks = fds.curvature.top_eigenvalue(loss_fn, step.params(state), batch(20), blocks=["hidden.*", "head.*"])
for name, found in blocks.items():
    print(f"{name:<9} curves by {found.value:.3f} at most, after {found.iterations} products with the Hessian")
assert all(found.normalized <= 1 for found in blocks.values())
