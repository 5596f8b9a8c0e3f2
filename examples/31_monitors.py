"""Write the metrics of a run, and the time of its parts, to files, TensorBoard, a service, an object of one's own.

`fds.monitor` is given the state and the metrics after each step. It waits for no GPU and changes no number. Where an
event belongs follows from the state, so a run that was killed and goes on from its last save has every step once.
`fds.timed` times forward, backward and the rest of a step, in every so many calls. `fds.report` makes a page of it all.
"""

import csv
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.monitors import CSV, JSONL, Console

torch.set_num_threads(1)  # a model this small is fastest on one
torch.manual_seed(0)
apply, params, _ = fds.functional(nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)))
folder = Path(tempfile.mkdtemp())
ROWS = 64


def batch(i):  # is a point inside the circle?
    points = torch.rand(ROWS, 2, generator=torch.Generator().manual_seed(i)) * 2 - 1
    return points, (points.norm(dim=1) < 0.8).float()


def loss_fn(params, batch):
    points, inside = batch
    logits = apply(params, points).squeeze(1)
    right = ((logits > 0) == inside.bool()).float().mean()
    return F.binary_cross_entropy_with_logits(logits, inside), {"accuracy": right}  # a metric of one's own


class Worst:
    """A sink of one's own is any object with this method."""

    value = 0.0

    def write(self, events):
        self.value = max([self.value, *(event.value for event in events if event.tag.endswith("/grad_norm"))])


step = fds.compose(fds.clip_by_global_norm(1.0), fds.adamw(lr=0.01), fds.donate())(loss_fn)
worst = Worst()
timed = fds.timed(every=10, samples=ROWS)


def train(state, until):
    """Train, and have it written; with `fds.monitors.TensorBoard(folder)`, `WandB()` or `Comet()` there as well."""
    fds.record_run(folder, step, state, config={"lr": 0.01, "rows": ROWS})  # what the metrics do not say
    sinks = CSV(folder), JSONL(folder / "log.jsonl", every=10), Console(every=100), worst
    with fds.monitor(*sinks, batch_size=ROWS) as monitor:  # x counts samples, as DeepSpeed's does
        while int(state.calls) < until:
            with timed(state):
                state, metrics = step(state, batch(int(state.calls)))
            monitor(state, {**metrics, **timed.metrics()})
            if int(state.calls) % 100 == 0:
                fds.save(folder / "save", state, step)
                monitor.note(state, {"eval_loss": step.evaluate(state, batch(10_000))["loss"]})
    return state


train(step.init(params, key=0), until=250)  # it ends here, 50 steps behind its save
state, _ = fds.load(folder / "save", step, params)
assert int(state.calls) == 200
train(state, until=300)

# Every step is there once, and so is what those 50 steps had written.
with open(folder / "Train_Samples_train_loss.csv", newline="") as file:
    head, *rows = csv.reader(file)
assert head == ["step", "train_loss"] and [int(x) for x, _ in rows] == [ROWS * i for i in range(1, 301)]
lines = fds.display.read_log(folder / "log.jsonl")
assert [line["step"] for line in lines if "Train/Samples/lr" in line] == [ROWS * i for i in range(10, 301, 10)]
assert [line["step"] for line in lines if "Train/Samples/eval_loss" in line] == [6400, 12800, 19200]
assert timed.last is not None and lines[0]["Train/Samples/elapsed_time_ms_backward"] > 0
print(timed.last)
assert float(rows[-1][1]) < float(rows[0][1]) / 3 and worst.value > 0

# All that lies in the folder, as one file for a browser: curves, times, the step in words, the machine.
page = fds.report(folder).read_text()  # `fds report FOLDER`
assert "went on" in page and "ClipNorm(max_norm=1.0)" in page
print(f"{len(page):,} characters in {folder / 'report.html'}")
