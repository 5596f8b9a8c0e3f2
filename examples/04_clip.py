"""Clip by the global norm, and read it in the metrics.

The norm is that of the mean gradient over the whole batch, however it is accumulated; `metrics["grad_norm"]` is the
norm before clipping. With plain SGD at lr=1 the update is the clipped gradient, so its length can be measured.
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


def length(new, old):
    return float(torch.sqrt(sum((new[name] - old[name]).square().sum() for name in old)))


step = fds.compose(fds.accumulate(4), fds.clip_by_global_norm(0.5), fds.sgd(lr=1.0))(loss_fn)
state = step.init(params, key=0)

clipped = 0
for i in range(60):
    old = state
    state, metrics = step(state, batch(i))
    norm, moved = float(metrics["grad_norm"]), length(state.params, old.params)
    clipped += norm > 0.5
    if i % 20 == 0:
        print(f"update {i + 1:2}: gradient {norm:.4f} long, clipped {moved:.4f}")
    assert abs(moved - min(norm, 0.5)) < 1e-3
print(f"{clipped} of 60 updates were clipped, loss {metrics['loss']:.3f}")
assert clipped > 0
