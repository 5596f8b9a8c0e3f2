"""Let the learning rate, or any number of an optimizer, follow a curve.

A schedule is a pure function f(t) of the number of updates applied before this one, so the first update uses f(0). It
is passed instead of the number. Any callable of t will do; `fds.schedules` has the usual ones.
"""

import inspect
import math
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


curve = fds.schedules.warmup_cosine(3e-3, warmup_steps=20, total_steps=100)
cycle = fds.schedules.one_cycle(1e-4, 3e-3, first_steps=40, second_steps=60)
swing = fds.schedules.one_cycle_momentum(0.85, 0.95, first_steps=40, second_steps=60)

for lr, betas in (
    (3e-3, (0.9, 0.99)),
    (curve, (0.9, 0.99)),
    (cycle, (swing, 0.99)),  # one cycle moves Adam's first beta opposite to the learning rate
    (lambda t: 3e-3 * 0.98**t, (0.9, 0.99)),
):
    step = fds.compose(fds.accumulate(4), fds.clip_by_global_norm(0.5), fds.adamw(lr=lr, betas=betas))(loss_fn)
    state = step.init(params, key=0)
    rates = []
    for t in range(100):
        state, metrics = step(state, batch(t))
        rates.append(float(metrics["lr"]))
        assert math.isclose(rates[t], lr(t) if callable(lr) else lr, rel_tol=1e-5)
    shown = " ".join(f"{rates[t]:.5f}" for t in (0, 10, 40, 70, 99))
    print(f"lr {shown}   loss {metrics['loss']:.3f}   {getattr(lr, '__name__', lr)}")

print("momentum " + " ".join(f"{swing(t):.3f}" for t in (0, 10, 40, 70, 99)))
assert curve(0) == 0 and curve(99) < 1e-6  # starts at zero and ends with the last of 100 updates
