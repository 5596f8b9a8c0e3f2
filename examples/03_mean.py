"""Return a `Mean`, and accumulation is exact if microbatches have different weights.

The loss counts only bytes that are not spaces, so microbatches have different weights. The mean of their means is
wrong; `Mean(total, weight)` keeps numerator and denominator apart until the whole batch is summed.
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


def token_losses(params, batch):
    context, following = batch
    losses = F.cross_entropy(apply(params, context), following, reduction="none")
    counted = following != ord(" ")
    return (losses * counted).sum(), counted.sum()


def mean_of_means(params, batch):
    total, weight = token_losses(params, batch)
    return total / weight


def loss_fn(params, batch):
    total, weight = token_losses(params, batch)
    return fds.Mean(total, weight)


def train(loss_fn, *transforms, updates=20):
    step = fds.compose(*transforms, fds.sgd(lr=0.1))(loss_fn)
    state = step.init(params, key=0)
    for i in range(updates):
        state, metrics = step(state, batch(i))
    return state.params, float(metrics["loss"])


def distance(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


whole, loss = train(loss_fn)
exact, exact_loss = train(loss_fn, fds.accumulate(8))
wrong, wrong_loss = train(mean_of_means, fds.accumulate(8))
print(f"in one piece:         loss {loss:.6f}")
print(f"Mean, accumulated:    loss {exact_loss:.6f}, parameters {distance(whole, exact):.1e} away")
print(f"means, accumulated:   loss {wrong_loss:.6f}, parameters {distance(whole, wrong):.1e} away")
assert distance(whole, exact) < 1e-5 < 1e-3 < distance(whole, wrong)
