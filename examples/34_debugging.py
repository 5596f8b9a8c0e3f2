"""Find what is wrong: a NaN by the module that made it, a rank that differs by its element. The run keeps its bits.

`fds.watch` is called as the step is, and replays the call that went wrong; `fds.check_ranks` compares what ranks hold
alike; `fds.dump_state` shows all of a state.
"""

import torch
from torch import nn

import fds

torch.set_num_threads(1)  # a model this small is fastest on one


class Normalize(nn.Module):
    def forward(self, x):
        return x / x.norm(dim=1, keepdim=True)  # of a row of zeros NaN, and nobody adds an epsilon


def batch(i, rows=32):
    x = torch.rand(rows, 8, generator=torch.Generator().manual_seed(i))
    if i == 11:
        x[21] = 0.0
    return x, x.sum(1, keepdim=True)


torch.manual_seed(0)
apply, params, _ = fds.functional(nn.Sequential(Normalize(), nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))


def loss_fn(params, batch):
    x, y = batch
    return (apply(params, x) - y).square().mean()


step = fds.compose(fds.accumulate(4), fds.skip_nonfinite(), fds.adamw(lr=0.01))(loss_fn)
watched, state = fds.watch(step), step.init(params, key=0)
for i in range(20):
    state, metrics = watched(state, batch(i))  # of call 11 a warning says what `watched.last` has
found = watched.last
print(found)
assert (found.call, found.module, found.operator, found.microbatch) == (11, "0", "aten.div", 2)
assert found.tensors[-1].first == (5, 0)  # row 21 is the sixth of the third microbatch
assert int(state.calls - state.step) == 1

plain = step.init(params, key=0)
for i in range(20):
    plain, _ = step(plain, batch(i))
assert all(torch.equal(x, y) for x, y in zip(fds.tree.leaves(plain), fds.tree.leaves(state), strict=True))


def ranks():
    dp = fds.mesh(dp=-1)["dp"]
    step = fds.compose(fds.shard_optimizer(dp, stage=0), fds.adamw(lr=0.01))(loss_fn)
    state, _ = step(step.init(params, key=0), [x.chunk(dp.size)[dp.index] for x in batch(0)])
    fds.check_ranks(state, step)
    if dp.index == 1:
        state.params["1.weight"][3, 4] += 1e-6
    try:
        fds.check_ranks(state, step)
    except fds.FdsError as error:
        return str(error)


print(fds.simulate(ranks, 4)[0])
print(fds.dump_state(state, step))
