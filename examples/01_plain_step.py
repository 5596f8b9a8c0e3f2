"""Train with a step that is a pure function: (state, batch) -> (state, metrics).

The model guesses the next byte of a Python file from the eight before it. Its parameters leave it once, through
`fds.functional`; from there on everything about the run is in `state`, and a step does not change its arguments.
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


step = fds.compose(fds.adamw(lr=3e-3))(loss_fn)
state = first = step.init(params, key=0)

for i in range(200):
    state, metrics = step(state, batch(i))
    if i % 50 == 0:
        print(f"update {int(metrics['step']):3}: loss {metrics['loss']:.3f}")
print(f"update {int(metrics['step']):3}: loss {metrics['loss']:.3f}")
assert metrics["loss"] < 3

# The first state is still there, and stepping from it again gives the same bits.
before = torch.get_rng_state()
one, _ = step(first, batch(0))
two, _ = step(first, batch(0))
assert int(first.step) == 0 and int(one.step) == 1
assert all(torch.equal(a, b) for a, b in zip(fds.tree.leaves(first.params), params.values(), strict=True))
assert all(torch.equal(a, b) for a, b in zip(fds.tree.leaves(one), fds.tree.leaves(two), strict=True))
assert torch.equal(before, torch.get_rng_state())
print(f"the first state is as it was: step {int(first.step)}, and two steps from it are equal bit for bit")
