"""Collectives are functions: new tensors out, and gradients that are collectives themselves.

Two layers are shared among ranks: of the first weight a rank has some columns, of the second the rows that meet them.
Nothing here knows of training; these are what `shard_optimizer` stands on, and what layers of your own can.
"""

import torch

import fds
from fds.collectives import all_gather, all_reduce, counted, reduce_scatter

torch.manual_seed(0)
x, first, second = torch.randn(8, 16), torch.randn(16, 12), torch.randn(12, 4)


def loss_fn(weights):
    return (torch.tanh(x @ weights[0]) @ weights[1]).square().mean()


value, grads = fds.autodiff.value_and_grad(loss_fn)((first, second))  # on one rank


def shared():
    tp = fds.mesh(tp=-1)["tp"]
    mine = first.chunk(tp.size, dim=1)[tp.index], second.chunk(tp.size, dim=0)[tp.index]

    def loss_fn(weights):
        out = all_reduce(torch.tanh(x @ weights[0]) @ weights[1], tp)
        return out.square().mean() / tp.size  # the sum over ranks is differentiated

    with counted() as traffic:
        value, (a, b) = fds.autodiff.value_and_grad(loss_fn)(mine)
    return value * tp.size, (all_gather(a, tp, dim=1), all_gather(b, tp, dim=0)), traffic


results = fds.simulate(shared, 4)
for result in results:
    torch.testing.assert_close(result[:2], (value, grads))
count = results[0][2]["all_reduce", "tp"]
print(f"all_reduce: {count.calls} calls, {count.bytes_sent} bytes from each rank")
assert count.calls == 2  # the second one is the gradient of the first


# On one rank a collective returns its input, so the same code runs there.
torch.testing.assert_close(shared()[1], grads)


# reduce_scatter after all_gather multiplies by the number of ranks: each is the other's transpose.
def there_and_back():
    dp = fds.mesh(dp=-1)["dp"]
    part = torch.arange(3.0) + dp.index
    assert torch.equal(reduce_scatter(all_gather(part, dp), dp), part * dp.size)


fds.simulate(there_and_back, 3)


# Ranks that do not start the same collectives would hang. `simulate` reports what each rank waits for.
def forgets():
    dp = fds.mesh(dp=-1)["dp"]
    if dp.index == 0:
        all_reduce(torch.ones(2), dp)
    all_gather(torch.ones(5), dp)


def leaves_early():
    dp = fds.mesh(dp=-1)["dp"]
    if dp.index == 0:
        all_reduce(torch.ones(2), dp)


for faulty in (forgets, leaves_early):
    try:
        fds.simulate(faulty, 2)
    except fds.errors.RankError as error:
        print(error)
    else:
        raise AssertionError
