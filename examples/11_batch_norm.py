"""Thread the buffers of a module: batch norm's running statistics are part of the state.

A loss made by `fds.with_buffers` takes the buffers and returns the new ones. Microbatches pass them on in order, a
skipped step keeps the old ones, evaluation reads them.
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
        self.norm = nn.BatchNorm1d(128)
        self.head = nn.Linear(128, 256)

    def forward(self, context):
        x = self.embed(context).flatten(1)
        return self.head(self.norm(F.gelu(self.hidden(x))))


torch.manual_seed(0)
apply, params, buffers = fds.functional(Model())


def loss_fn(params, batch, buffers):
    context, following = batch
    logits, buffers = apply.with_buffers(params, buffers, context)
    return F.cross_entropy(logits, following), {}, buffers


step = fds.compose(fds.accumulate(4), fds.adamw(lr=3e-3))(fds.with_buffers(loss_fn, buffers))
first = state = step.init(params, key=0)
for i in range(100):
    state, metrics = step(state, batch(i))

seen = int(state.buffers["norm.num_batches_tracked"])
print(f"{int(state.step)} updates of 4 microbatches: batch norm has seen {seen} batches")
print(f"running mean {first.buffers['norm.running_mean'][:3].tolist()} -> {state.buffers['norm.running_mean'][:3]}")
assert seen == 4 * 100
assert int(first.buffers["norm.num_batches_tracked"]) == 0

# Evaluation normalizes by the running statistics: rows are independent of each other, and nothing is updated.
context, following = batch(1000)
together = step.evaluate(state, (context, following))["loss"]
alone = sum(step.evaluate(state, (context[i : i + 1], following[i : i + 1]))["loss"] for i in range(64)) / 64
print(f"loss of 64 rows together {together:.5f}, one by one {alone:.5f}")
assert abs(together - alone) < 1e-4
assert int(state.buffers["norm.num_batches_tracked"]) == seen
