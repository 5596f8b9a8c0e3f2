"""Compute in bfloat16, keep float32 masters.

A bfloat16 number has eight bits of mantissa: an update smaller than 1/256 of a parameter is lost in it. So
`precision` casts a copy for the loss, and the optimizer updates the float32 original. Norms stay in float32 by name.
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


def moved(new, old):
    """Return the fraction of elements that an update has changed."""
    changed = sum(int((new[name] != old[name]).sum()) for name in old)
    return changed / sum(x.numel() for x in old.values())


low = {name: x.to(torch.bfloat16) for name, x in params.items()}
optimizer = fds.sgd(lr=1e-3, momentum=0.9)
naive = fds.compose(fds.accumulate(4), optimizer)(loss_fn)
step = fds.compose(fds.precision(torch.bfloat16, keep_float32="norm.*"), fds.accumulate(4), optimizer)(loss_fn)

first, naive_first = step.init(params, key=0), naive.init(low, key=0)
state, metrics = step(first, batch(0))
naive_state, _ = naive(naive_first, batch(0))
print(f"parameters in bfloat16: {moved(naive_state.params, naive_first.params):6.1%} moved by one update")
print(f"float32 masters:        {moved(state.params, first.params):6.1%}")
assert moved(naive_state.params, naive_first.params) < 0.5 * moved(state.params, first.params)
assert {x.dtype for x in state.params.values()} == {torch.float32}

for i in range(1, 100):
    state, metrics = step(state, batch(i))
    naive_state, naive_metrics = naive(naive_state, batch(i))
print(f"after 100 updates: loss {metrics['loss']:.3f} with masters, {naive_metrics['loss']:.3f} without")
print(step.describe(state, batch(0)))
assert metrics["loss"] < naive_metrics["loss"]
