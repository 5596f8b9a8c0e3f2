"""Train in float16: scale the loss, and skip the steps that overflow.

float16 ranges from 6e-8 to 65504. The scale keeps small gradients from underflow; if it is too large, gradients
overflow, the step is skipped and the scale is halved. A skipped step is not counted: `state.step`, and so the learning
rate, stay the same; only `state.calls` increases.
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


step = fds.compose(
    fds.precision(torch.float16, keep_float32="norm.*"),
    fds.loss_scale(initial=2.0**24, hysteresis=1, window=50),  # far too high, to see it fall
    fds.accumulate(4),
    fds.clip_by_global_norm(1.0),
    fds.adamw(lr=fds.schedules.warmup(3e-3, warmup_steps=20)),
)(loss_fn)
state = step.init(params, key=0)

for i in range(100):
    old = state
    state, metrics = step(state, batch(i))
    if metrics["skipped"]:
        scale = f"2**{metrics['loss_scale'].log2():.0f}"
        print(f"call {int(state.calls):3}: skipped at scale {scale}, lr {metrics['lr']:.5f}")
        assert all(torch.equal(state.params[name], old.params[name]) for name in params)
        assert int(state.step) == int(old.step)

skipped = int(state.calls - state.step)
print(f"{int(state.calls)} calls, {int(state.step)} updates, {skipped} skipped, loss {metrics['loss']:.3f}")
assert 0 < skipped < 50
assert metrics["lr"] == 3e-3 and metrics["loss"] < 3.5
