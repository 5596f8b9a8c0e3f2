"""Show a run while it goes, stop it at any step, and go on with it later.

`fds.display.Progress` is a panel in a terminal, lines in a log and an output that is replaced in a notebook. It reads
the metrics only when it shows them, so it does not wait for a GPU at every step, and it changes no number. Ctrl-C ends
the loop after the step that runs: there is time to save.
"""

import os
import signal
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fds

torch.set_num_threads(1)  # a model this small is fastest on one
torch.manual_seed(0)
apply, params, _ = fds.functional(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)))
folder = Path(tempfile.mkdtemp())
STEPS, ROWS = 300, 64


def batch(i):  # is a point inside the circle?
    points = torch.rand(ROWS, 2, generator=torch.Generator().manual_seed(i)) * 2 - 1
    return points, (points.norm(dim=1) < 0.8).float()


def loss_fn(params, batch):
    points, inside = batch
    return F.binary_cross_entropy_with_logits(apply(params, points).squeeze(1), inside)


step = fds.compose(fds.clip_by_global_norm(1.0), fds.adamw(lr=0.01), fds.donate())(loss_fn)


def train(state, stop_at=None):
    """Train until the last step, or until somebody presses Ctrl-C."""
    log, start = folder / "log.jsonl", int(state.calls)
    with fds.display.Progress(STEPS, start=start, title="a circle", log=log) as progress:
        for i in progress:
            state, metrics = step(state, batch(i))
            if i == stop_at:
                os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C does
            progress(metrics, samples=ROWS)
            if progress.done % 100 == 0:
                with progress.paused():  # its time does not count as training
                    progress.note({"held_out": step.evaluate(state, batch(10_000))["loss"]})
    fds.save(folder / "save", state, step)
    return state, progress


state, progress = train(step.init(params, key=0), stop_at=123)
assert progress.interrupted and progress.done == 124

state, _ = fds.load(folder / "save", step, params)
state, progress = train(state)
assert not progress.interrupted and progress.done == STEPS

# The log has every step once, with all its metrics, and the notes.
lines = fds.display.read_log(folder / "log.jsonl")
losses = [line["loss"] for line in lines if "loss" in line]
assert len(losses) == STEPS and losses[-1] < losses[0] / 3
assert [line["step"] for line in lines if "held_out" in line] == [100, 200, 300]

# The numbers are those of a loop that shows nothing.
plain = step.init(params, key=0)
for i in range(STEPS):
    plain, _ = step(plain, batch(i))
assert all(torch.equal(a, b) for a, b in zip(fds.tree.leaves(plain), fds.tree.leaves(state), strict=True))
