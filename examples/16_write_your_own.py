"""Write a transform of your own: a function that fills a station.

Gradient centralization (Yong et al. 2020, arXiv:2004.01461) subtracts its mean from the gradient of
each row of a weight. It maps gradients to gradients, so its station is `condition`, and it composes with everything
else. It needs whole rows, not slices of gradients: where ranks have slices, composing raises an error.
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


@fds.step.transform
def centralize():
    """Take the mean over all dims but the first from every gradient of two or more dims."""

    def condition(grads, call):  # gradients are leaves / scale; a linear map can ignore the scale
        for g in grads.leaves:
            if g.dim() > 1:
                g.sub_(g.mean(dim=tuple(range(1, g.dim())), keepdim=True))
        return fds.step.Gradients(grads.leaves, grads.scale)  # new, since a norm measured before is out of date

    return lambda step: fds.step.fill(step, condition=condition)


step = fds.compose(
    fds.accumulate(4),
    centralize(),
    fds.clip_by_global_norm(0.5),  # also a condition: gradient maps run in the order in which they are written
    fds.sgd(lr=0.5, momentum=0.9),
)(loss_fn)
state = first = step.init(params, key=0)
print(step.describe())
for i in range(100):
    state, metrics = step(state, batch(i))
print(f"loss {metrics['loss']:.3f}")

# A centralized update does not change the mean of any row.
for name in ("embed.weight", "hidden.weight", "head.weight"):
    moved = state.params[name] - first.params[name]
    most, mean = float(moved.abs().max()), float(moved.mean(dim=1).abs().max())
    print(f"{name:<14} elements moved by up to {most:.3f}, means of rows by {mean:.0e}")
    assert mean < 1e-4 < most
assert metrics["loss"] < 3
