"""Train factors of low rank beside frozen weights, those in 4 bits, and write the adapter as peft has it.

A model that was trained on one file learns another one through 2% of its parameters.
"""

import argparse
import inspect
import tempfile
import textwrap

import torch
import torch.nn.functional as F
from torch import nn

import fds

torch.set_num_threads(1)  # a model this small is fastest on one


def windows(module):
    return torch.tensor(list(inspect.getsource(module).encode())).unfold(0, 9, 1)  # eight bytes, and the next


def batch(rows, i, number=64):
    at = torch.randint(len(rows), (number,), generator=torch.Generator().manual_seed(i))
    return rows[at, :8], rows[at, 8]


torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(256, 32),
    nn.Flatten(),
    nn.Linear(256, 256),
    nn.GELU(),
    nn.Linear(256, 256),
    nn.GELU(),
    nn.Linear(256, 256),
)
apply, params, _ = fds.functional(model)


def loss_fn(params, batch):
    context, following = batch
    return F.cross_entropy(apply(params, context), following)


def run(step, state, rows, updates):
    for i in range(updates):
        state, metrics = step(state, batch(rows, i))
    print(f"  loss {metrics['loss']:.3f}")
    return state


old, new = windows(textwrap), windows(argparse)
full = fds.compose(fds.adamw(3e-3))(loss_fn)
base = full.params(run(full, full.init(params), old, 150))

adapter = fds.lora("(2|4).weight", rank=4, alpha=8)
step = fds.compose(fds.quantize_frozen(bits=4), adapter, fds.adamw(1e-2))(loss_fn)
state = step.init(base, key=1)
print(step.describe(state))
before = step.evaluate(state, batch(new, 1000, 2048))["loss"]
state = run(step, state, new, 150)
after = step.evaluate(state, batch(new, 1000, 2048))["loss"]
print(f"the other file: {before:.3f} before, {after:.3f} with the adapter")
assert after < before

small, large = (one.describe(one.init(base)).num_bytes for one in (step, full))
assert small["params"] < 0.25 * large["params"] and small["opt"] < 0.03 * large["opt"]

with tempfile.TemporaryDirectory() as folder:
    fds.adapters.save(folder, step, state)
    read = fds.adapters.read(folder)
again = fds.compose(fds.quantize_frozen(bits=4), *read.transforms, fds.adamw(1e-2))(loss_fn)
there = again.evaluate(again.init(read.beside(base)), batch(new, 1000, 2048))["loss"]
assert torch.equal(there, after)
baked = fds.bake(step, state).module
assert torch.isclose(F.cross_entropy(baked(batch(new, 1000, 2048)[0]), batch(new, 1000, 2048)[1]), after)
print("read again it is equal bit for bit, and merged to rounding")
