"""Donate the state: the step overwrites it, and the new state uses its memory.

The pure step keeps the old state readable, so two copies exist while both are held. A training loop that writes
`state, metrics = step(state, batch)` does not need the old one; `fds.donate()` lets the step reuse it.
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


def addresses(state):
    return {x.data_ptr() for x in fds.tree.leaves((state.params, state.opt))}


pure = fds.compose(fds.adamw(lr=3e-3))(loss_fn)
step = fds.compose(fds.adamw(lr=3e-3), fds.donate())(loss_fn)

kept = state = pure.init(params, key=0)
given = step.init(params, key=0)
where = addresses(given)
for i in range(50):
    state, _ = pure(state, batch(i))
    given, metrics = step(given, batch(i))
assert addresses(given) == where and not addresses(state) & addresses(kept)
assert all(torch.equal(state.params[name], given.params[name]) for name in params)
size = fds.tree.num_bytes((given.params, given.opt))
print(f"50 updates within the same {size:,} bytes, equal bit for bit to the pure step, loss {metrics['loss']:.3f}")

# Every function of fds raises an error for a donated state.
after, _ = step(given, batch(50))
try:
    step.evaluate(given, batch(51))
except fds.errors.DonatedStateError as error:
    print(error)
else:
    raise AssertionError
assert int(after.step) == 51
