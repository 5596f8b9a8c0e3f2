"""Attention over a few blocks of long rows: a layout as a value, trained on a CPU, beside attention to all.

A byte sees a window before it and the first block. What the layout does not list is computed nowhere, in forward or in
backward: the values are those of dense attention with a mask, and time follows the listed share. After a few updates
the loss is that of dense attention, since what a model learns first lies near.
"""

import functools
import inspect
import textwrap
import time

import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.attention_layouts import bslongformer
from fds.kernels import sparse_attention

torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
TOKENS, WIDTH, HEADS, CALLS = 4096, 32, 2, 12
windows = text.unfold(0, TOKENS + 1, 1)  # 4096 bytes, and for each of them the one that follows


def batch(i):
    at = torch.randint(len(windows), (1,), generator=torch.Generator().manual_seed(i))
    return windows[at, :-1], windows[at, 1:]


def dense(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


pattern = functools.partial(bslongformer, HEADS, block=32, num_sliding_window_blocks=9)
print(pattern(16).causal())  # of 512 bytes; `#` is computed
layout = pattern(TOKENS // 32).causal()
sparse = functools.partial(sparse_attention, layout=layout, causal=True)

q, k, v = torch.randn(3, 1, HEADS, TOKENS, WIDTH // HEADS)
mask = torch.from_numpy(layout.as_array()).repeat_interleave(32, 1).repeat_interleave(32, 2).tril()
torch.testing.assert_close(sparse(q, k, v), F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out, self.hidden = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU())
        self.last = nn.Linear(64, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.last(self.hidden(x))


class Model(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.embed, self.place = nn.Embedding(256, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.Sequential(*[Block(attention) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, x):
        return self.head(self.blocks(self.embed(x) + self.place.weight))


def train(attention):
    """Return the loss on a row that no step saw, seconds, and the parameters."""
    apply, _, _ = fds.functional(Model(attention))
    loss_fn = lambda params, rows: F.cross_entropy(apply(params, rows[0]).flatten(0, 1), rows[1].flatten())
    step = fds.compose(fds.adamw(1e-2))(loss_fn)
    state, start = step.init(fds.recipe(lambda: Model(attention)), key=0), time.process_time()
    for i in range(CALLS):
        state, _ = step(state, batch(i))
    seconds = time.process_time() - start
    return float(step.evaluate(state, batch(10_000))["loss"]), seconds, step.params(state)


print(f"\n{TOKENS} bytes: {layout.density:.1%} of {layout.blocks} x {layout.blocks} blocks")
results = {name: train(attention) for name, attention in {"dense": dense, "sparse": sparse}.items()}
for name, (loss, seconds, _) in results.items():
    print(f"{name:7} loss {loss:.3f}   {seconds:.1f} s")
(all_loss, _, _), (loss, _, _) = results["dense"], results["sparse"]
assert loss < 3.2 and abs(loss - all_loss) < 0.1
