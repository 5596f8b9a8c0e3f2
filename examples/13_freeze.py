"""Freeze parameters by name: no gradient, no gradient bytes, no optimizer state.

A model is trained, then only its head is initialized again and trained: the cost is that of the trained part.
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


def run(step, state, updates):
    for i in range(updates):
        state, metrics = step(state, batch(i))
    print(f"  loss {metrics['loss']:.3f}")
    return state


full = fds.compose(fds.clip_by_global_norm(0.5), fds.adamw(lr=3e-3))(loss_fn)
state = full.init(params, key=0)
print(full.describe(state))
trained = run(full, state, 100)

step = fds.compose(fds.freeze("embed.*", "hidden.*", "norm.*"), fds.clip_by_global_norm(0.5), fds.adamw(lr=3e-3))(
    loss_fn
)
state = step.init({**full.params(trained), "head.weight": params["head.weight"]}, key=1)
print(step.describe(state))
tuned = run(step, state, 100)

small, large = step.describe(state).num_bytes, full.describe(trained).num_bytes
assert small["gradients"] < 0.5 * large["gradients"] and small["opt"] == 2 * small["gradients"]
assert set(tuned.opt["exp_avg"]) == {"head.weight", "head.bias"}
for name, x in tuned.params.items():
    assert torch.equal(x, trained.params[name]) == (not name.startswith("head."))
print("what was frozen is equal bit for bit")
