"""What a run reads, and when: easy samples first, a mixture whose proportions change, batches by tokens, packed rows.

Each is a function of a key and of the number of the batch, `state.calls`. So one rank and two read the same rows, and a
run that is stopped goes on with those that it would have read.
"""

import inspect
import tempfile
import textwrap

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import fds
from fds.data import CurriculumSampler, DistributedLoader, RepeatingLoader, batches_by_tokens, mixture, packed

torch.set_num_threads(1)  # a model this small is fastest on one
lines = [torch.tensor(list(line.encode())) for line in inspect.getsource(textwrap).splitlines() if len(line) > 1]
lengths = [len(line) for line in lines]


def padded(rows):
    return pad_sequence(rows, batch_first=True)  # with zeros, which no line has


# Short lines first: all of at most 24 bytes, and from batch 50 on all that there are.
schedule = fds.schedules.fixed_linear(24, max(lengths), 50)
sampler = CurriculumSampler({"length": lengths}, {"length": schedule}, key=0)
loader = DistributedLoader(lines, 16, sampler=sampler, collate=padded)
print(
    "curriculum    longest line of batches 0, 10, ...:",
    [next(iter(loader.starting(i))).shape[1] for i in range(0, 60, 10)],
)

# Ever more of the code, and less of the comments: exactly as many rows as that makes.
comments, code = [x for x in lines if 35 in x], [x for x in lines if 35 not in x]
mixed = mixture({"comments": comments, "code": code}, lambda i: {"comments": 1, "code": i / 10}, key=0)
print(
    "mixture       comments and code before batches 0, 10, ...:",
    [mixed.counts(i, 16).tolist() for i in range(0, 40, 10)],
)

# As many lines in a microbatch as fit into 512 bytes with their padding; a rate that follows their number.
batches = batches_by_tokens(lengths, 512)
parts = next(iter(DistributedLoader(lines, 4, sampler=batches, collate=padded))).parts
print("by tokens     the microbatches of batch 0:", [tuple(part.shape) for part in parts])
rows = packed(lines, 128)
print(f"packed        {len(lines)} lines in {len(rows)} rows of 128 bytes, {rows.packing.fill:.1%} full")


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.hidden = nn.Linear(width, 4 * width)
        self.head = nn.Linear(4 * width, 256)

    def forward(self, x):
        return self.head(F.gelu(self.hidden(self.embed(x))))


apply, _, _ = fds.functional(Model())


def loss_fn(params, batch):
    targets = batch[:, 1:]
    total = F.cross_entropy(
        apply(params, batch[:, :-1]).flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum"
    )
    return fds.Mean(total, (targets != 0).sum())  # over bytes, of which microbatches have other numbers


def train(axis, microbatches, calls, load=None, save=None):
    """Train on batches of four microbatches, those of all ranks together."""
    rate = batches.rate(0.5, 4, base=64, method="sqrt")
    ways = [fds.accumulate(microbatches)] + ([] if axis is None else [fds.shard_optimizer(axis, stage=1)])
    step = fds.compose(*ways, fds.sgd(rate))(loss_fn)
    params = fds.recipe(Model)
    state = step.init(params, key=0) if load is None else fds.load(load, step, params)[0]
    loader = DistributedLoader(lines, 4, axis, sampler=batches, collate=padded)
    stream = RepeatingLoader(loader.starting(state.calls))
    losses = []
    for _ in range(calls):
        state, metrics = step(state, next(stream))
        losses.append(float(metrics["loss"]))
    if save is not None:
        fds.save(save, state, step)
    return losses


# Stopped on one rank, and gone on with on two: the same batches, and their mean over all bytes.
straight = train(None, 4, 60)
with tempfile.TemporaryDirectory() as directory:
    first = train(None, 4, 30, save=directory)
    rest, _ = fds.simulate(lambda: train(fds.mesh(dp=-1)["dp"], 2, 30, load=directory), 2)
difference = max(abs(a - b) for a, b in zip([*first, *rest], straight, strict=True))
print(f"loss {straight[0]:.3f} to {straight[-1]:.3f}; stopped, and gone on with on two ranks: {difference:.0e} away")
assert straight[-1] < straight[0] - 1 and difference < 1e-4
