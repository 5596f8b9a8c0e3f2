"""Short sequences first: lengths that grow by a schedule, learning rates that follow tokens, the same run resumed.

The length of a call follows from `state.calls` alone. So a run that is stopped in the middle of the curriculum goes on
where it was, bit for bit, and nothing beside the state is saved.
"""

import inspect
import tempfile
import textwrap

import torch
import torch.nn.functional as F
from torch import nn

import fds

torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 65, 1)  # 64 bytes, and for each of them the one that follows


def batch(i, rows=16):
    at = torch.randint(len(windows), (rows,), generator=torch.Generator().manual_seed(i))
    return windows[at, :-1], windows[at, 1:]


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Embedding(64, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.hidden = nn.Linear(width, 4 * width)
        self.head = nn.Linear(4 * width, 256)

    def forward(self, x):
        x = self.embed(x) + self.place(torch.arange(x.shape[1]))
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(F.gelu(self.hidden(x)))


apply, _, _ = fds.functional(Model())


def loss_fn(params, batch):
    x, following = batch
    total = F.cross_entropy(apply(params, x).flatten(0, 1), following.flatten(), reduction="sum")
    return fds.Mean(total, following.numel())  # over tokens, of which calls have other numbers


lengths = fds.schedules.fixed_linear(8, 64, 60, difficulty_step=8)
rate = fds.schedules.warmup_cosine(1e-2, warmup_steps=8, total_steps=60)  # in calls of full length

step = fds.compose(
    fds.curriculum("seqlen", lengths), fds.accumulate(2), fds.adamw(lr=fds.schedules.by_tokens(rate, lengths, 64))
)(loss_fn)
whole = fds.compose(fds.accumulate(2), fds.adamw(lr=rate))(loss_fn)


def train(step, state, tokens):
    """Train until these tokens of a row are consumed; every call of a step draws its rows by `calls`."""
    shown = []
    while tokens > 0:
        state, metrics = step(state, batch(int(state.calls)))
        length = lengths(int(state.calls)) if step is not whole else 64
        tokens -= length
        shown.append((length, float(metrics["lr"])))
    return state, shown


TOKENS = 60 * 64
state, shown = train(step, step.init(fds.recipe(Model), key=0), TOKENS)
for call in range(0, len(shown), 20):
    print(f"call {call + 1:>3}   length {shown[call][0]:>2}   lr {shown[call][1]:.5f}")

# The same tokens in whole rows, and both held against the same text.
other, calls = train(whole, whole.init(fds.recipe(Model), key=0), TOKENS)
held_out = batch(10_000, rows=256)
for name, one in (("short first", state), ("whole rows", other)):
    loss = float(step.evaluate(one, held_out)["loss"])  # evaluations have whole rows
    print(f"{name:<11} {int(one.calls):>3} calls, loss {loss:.3f}")
    assert loss < 3
assert int(state.calls) > int(other.calls)

# Stopped in the middle, saved, and gone on with.
stopped, _ = train(step, step.init(fds.recipe(Model), key=0), TOKENS // 3)
with tempfile.TemporaryDirectory() as directory:
    fds.save(directory, stopped, step)
    again, _ = fds.load(directory, step, fds.recipe(Model))
consumed = sum(length for length, _ in shown[: int(again.calls)])
again, _ = train(step, again, TOKENS - consumed)
assert all(torch.equal(again.params[name], x) for name, x in state.params.items())
print(f"stopped in call {int(stopped.calls)}, at length {lengths(int(stopped.calls))}: the same parameters")
