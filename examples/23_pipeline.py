"""Cut the layers into stages on several ranks: a schedule says what each rank does in which order, as data.

A schedule is a function of the numbers of ranks and microbatches. Its plan prints, can be drawn, checked and simulated
before anything runs, and `fds.pipeline` runs it: forwards (F), backwards (BW), or backwards in two halves, of which
only the first (B) is what the stage before waits for. Whatever the plan, the step is that of `accumulate`.

    python examples/23_pipeline.py
    torchrun --nproc-per-node 2 examples/23_pipeline.py
"""

import inspect
import textwrap

import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds import plans

torch.set_num_threads(1)  # a model this small is fastest on one
text = torch.tensor(list(inspect.getsource(textwrap).encode()))
windows = text.unfold(0, 9, 1)  # eight bytes, and the one that follows them


def batch(i, rows=64):
    at = torch.randint(len(windows), (rows,), generator=torch.Generator().manual_seed(i))
    return windows[at, :8], windows[at, 8]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + F.gelu(self.linear(self.norm(x)))


def project(embedding, x):
    return x @ embedding.weight.T


loss_fn = fds.Layers(
    [
        fds.TiedLayerSpec("bytes", nn.Embedding, 256, 32),  # on the first stage
        fds.LayerSpec(nn.Flatten),
        fds.LayerSpec(nn.Linear, 8 * 32, 128),
        *[fds.LayerSpec(Block, 128) for _ in range(6)],
        fds.LayerSpec(nn.Linear, 128, 32),
        fds.TiedLayerSpec("bytes", nn.Embedding, 256, 32, forward_fn=project),  # on the last: their gradients are added
    ],
    criterion=F.cross_entropy,
)


def train(transform):
    step = fds.compose(transform, fds.clip_by_global_norm(0.5), fds.adamw(lr=3e-3))(loss_fn)
    state = step.init(loss_fn.init, key=0)  # a rank builds the layers of its own stages
    for i in range(4):
        state, metrics = step(state, batch(i))  # ranks along a pipeline pass the same batch
    return step.params(state), metrics, sorted(fds.tree.paths(state.params)), step.describe()


def pipelined(schedule):
    pp = fds.mesh(pp=-1)["pp"]
    return train(fds.pipeline(schedule, pp, num_microbatches=8))


def apart(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


fds.init_distributed()
world = fds.mesh(pp=-1)


def on_ranks(schedule, num_ranks=2):
    return [pipelined(schedule)] if world.size > 1 else fds.simulate(lambda: pipelined(schedule), num_ranks)


# Plans are values. These are drawn from costs: a forward, B and W take one unit each.
for schedule in (plans.one_f_one_b, plans.zb_h1):
    plan = schedule(2, 4)
    line = plans.simulate(plan)
    if world.rank == 0:
        print(f"{schedule.__name__}: bubble {line.bubble_fraction:.0%}, live microbatches {line.peak_live}\n{plan}")
        print(plans.draw_text(line, color=False))
assert plans.simulate(plans.zb_h1(2, 8)).makespan < plans.simulate(plans.one_f_one_b(2, 8)).makespan

# Run on ranks, each with its own layers: equal to one process that accumulates.
expected, plain_metrics, names, _ = train(fds.accumulate(8))
results = on_ranks(plans.one_f_one_b)
for after, metrics, _held, _ in results:
    assert apart(after, expected) < 1e-3
    assert abs(metrics["loss"] - plain_metrics["loss"]) < 1e-5
if world.rank == 0:
    print(results[0][3])
    print(f"1F1B: loss {metrics['loss']:.6f}; accumulated in one process: {plain_metrics['loss']:.6f}")
if len(results) == 2:
    assert {*results[0][2], *results[1][2]} == set(names)
    assert {*results[0][2]} & {*results[1][2]} == {"bytes.weight"}  # the tied table is on both

# ZB-H1 sums in the same order as 1F1B, so its bits are the same.
for after, metrics, _, _ in on_ranks(plans.zb_h1):
    assert apart(after, results[0][0]) == 0
    assert metrics["grad_norm"] == results[0][1]["grad_norm"]


# Your own schedule is a function that returns rows: here each microbatch is finished before the next one starts.
def one_by_one(num_ranks, num_microbatches):
    return [[f"{r}{op}{i}" for i in range(num_microbatches) for op in ("F", "BW")] for r in range(num_ranks)]


own = plans.simulate(one_by_one(2, 8))
(after, *_), *_ = on_ranks(one_by_one)
assert apart(after, results[0][0]) == 0 and own.peak_live == (1, 1) and own.bubble_fraction > 0.4


# With a number instead of an axis this process runs all ranks, which helps to debug a pipeline.
after, *_ = train(fds.pipeline(plans.gpipe, 4, num_microbatches=8))
assert apart(after, expected) < 1e-3


# A plan that cannot run is an error that marks the fault.
def wrong(num_ranks, num_microbatches):
    return [["0F0", "0F1", "0BW0", "0BW1"], ["1F0", "1BW0", "1BW1", "1F1"]]


try:
    fds.pipeline(wrong, 2, num_microbatches=2)
except fds.errors.PlanError as error:
    if world.rank == 0:
        print(error)
else:
    raise AssertionError
