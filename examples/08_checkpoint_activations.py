"""Checkpoint activations: save only the inputs of layers, and recompute the rest in backward.

Memory is measured: the peak that the profiler sees allocated during one step.
"""

import inspect
import os
import textwrap

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fds

os.environ["KINETO_LOG_LEVEL"] = "99"  # else the profiler logs its start and stop
torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 9, 1)  # eight bytes, and the one that follows them


def batch(i, rows=64):
    at = torch.randint(len(windows), (rows,), generator=torch.Generator().manual_seed(i))
    return windows[at, :8], windows[at, 8]


def hidden():
    return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(256))


loss_fn = fds.Layers(
    [
        fds.LayerSpec(nn.Embedding, 256, 32),
        fds.LayerSpec(nn.Flatten),
        *[fds.LayerSpec(hidden) for _ in range(8)],
        fds.LayerSpec(nn.Linear, 256, 256),
    ],
    criterion=F.cross_entropy,
)


def peak_bytes(step, state, batch):
    """Return the new state, and the peak bytes allocated by the step in addition to those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        state, _ = step(state, batch)
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return state, most


peaks, results = {}, {}
for name, transforms in {
    "nothing": [],
    "every layer": [fds.checkpoint_activations()],
    "every 4 layers": [fds.checkpoint_activations(every=4)],
    "but matmuls": [fds.checkpoint_activations(policy="matmuls")],
}.items():
    step = fds.compose(*transforms, fds.sgd(lr=0.1))(loss_fn)
    state, _ = step(step.init(loss_fn.init, key=0), batch(0, rows=1024))  # builds the layers
    results[name], peaks[name] = peak_bytes(step, state, batch(1, rows=512))
    print(f"recompute {name:<15} peak {peaks[name]:>11,} bytes")

assert peaks["every layer"] < 0.5 * peaks["nothing"]
assert peaks["every layer"] < peaks["but matmuls"] < peaks["nothing"]
for name in peaks:  # the results are equal, including dropout
    pairs = zip(results[name].params.values(), results["nothing"].params.values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
print("parameters are equal bit for bit, dropout included")
