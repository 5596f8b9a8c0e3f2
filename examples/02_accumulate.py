"""Accumulate gradients: the same update from a quarter of the activations.

`accumulate(4)` cuts the batch into four views, sums their gradients in one buffer and updates once.
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


def saved_bytes(step, state, batch):
    """Return the new state, and the peak bytes of activations saved for backward."""
    most, held = 0, {}

    def pack(x):
        nonlocal most
        held[x.data_ptr()] = x.nbytes
        most = max(most, sum(held.values()))
        return x

    def unpack(x):
        held.clear()  # backward has begun: the next microbatch starts at zero
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        state, _ = step(state, batch)
    return state, most


plain = fds.compose(fds.adamw(lr=3e-3))(loss_fn)
step = fds.compose(fds.accumulate(4), fds.adamw(lr=3e-3))(loss_fn)

state = step.init(params, key=0)
whole, whole_bytes = saved_bytes(plain, state, batch(0, rows=1024))
parts, parts_bytes = saved_bytes(step, state, batch(0, rows=1024))
apart = max(float((a - b).abs().max()) for a, b in zip(whole.params.values(), parts.params.values(), strict=True))
print(f"in one piece:       {whole_bytes:>9,} bytes saved for backward")
print(f"in 4 microbatches:  {parts_bytes:>9,} bytes; parameters differ by {apart:.1e} at most")
assert int(parts.step) == 1  # one update
assert parts_bytes < 0.5 * whole_bytes
assert apart < 1e-4

# A batch that does not divide raises an error before anything is computed.
try:
    step(state, batch(0, rows=63))
except fds.FdsError as error:
    print(error)
else:
    raise AssertionError
