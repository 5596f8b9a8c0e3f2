"""Law 12 of what messages lose: it is kept in units of the mean gradient, whatever a batch weighs, scales or ranks.

The oracle is what was applied: with `sgd(1.0)` the parameters are minus the sum of what the optimizer was given.
"""

import tempfile

import pytest
import torch
from hypothesis import given, strategies as st

import fds
from fds import transports
from tests.bits import assert_same_bits

ROWS, WIDTH = 12, 9
WAYS = [
    transports.topk(0.2),
    transports.onebit(group=32),
    transports.quantized(4, group=32, feedback=True),
    transports.cast(torch.bfloat16, feedback=True),
    {"v": transports.topk(0.2), "*": transports.rows()},
    transports.hierarchical(transports.onebit(group=32)),
]
WEIGHTS = st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0, 500.0]), min_size=ROWS, max_size=ROWS).filter(any)


@st.composite
def runs(draw):
    """Draw the parts of a run, each on some ranks: whether the loss is a `Mean`, and weights of the rows by call."""
    way = draw(st.sampled_from(WAYS))
    nodes = isinstance(way, transports._hierarchical.Hierarchical)

    def part():
        ranks, copies = draw(st.sampled_from([(4, 1)] if nodes else [(2, 1), (3, 1), (4, 1), (4, 2)]))
        n = draw(st.sampled_from([n for n in (1, 2, 3) if ROWS // ranks % n == 0]))
        scale = draw(st.sampled_from([[], [fds.static_loss_scale(64.0)]]))
        weights = draw(st.lists(WEIGHTS, min_size=1, max_size=3))
        return ranks, copies, n, draw(st.sampled_from([0, 1, 2, 3])), scale, weights

    return way, draw(st.booleans()), [part() for _ in range(draw(st.integers(1, 2)))], draw(st.integers(0, 99))


def loss(mean):
    """Return a loss whose gradients do not depend on the parameters: of `u` only rows of odd weight have one."""

    def of(params, batch):
        x, weight, used = batch
        each = x @ params["v"]
        if bool(used.any()):  # some microbatches, on some ranks
            each = each + used * (x @ params["u"])
        return fds.Mean((each * weight).sum(), weight.sum()) if mean else each.mean()

    return of


def step_of(way, ranks, copies, n, stage, more, mean):
    nodes = isinstance(way, transports._hierarchical.Hierarchical)
    mesh = fds.mesh(copies=copies, **({"node": 2} if nodes else {}), dp=-1)
    shard = fds.shard_optimizer(
        mesh["node", "dp"] if nodes else mesh["dp"],
        stage=stage,
        replicate=mesh["copies"] if copies > 1 else None,
        bucket_bytes=64,
        gradients=way,
    )
    return fds.compose(*more, *([fds.accumulate(n)] if n > 1 else []), shard, fds.sgd(1.0))(loss(mean))


def share(step, batch):
    """Return the rows of this rank."""
    index, size = step.shard.data.index, step.shard.data.size
    return tuple(x.chunk(size)[index] for x in batch)


@given(runs())
def test_what_was_applied_and_what_is_kept_is_the_sum_of_mean_gradients(run):
    way, mean, parts, seed = run
    draw = torch.Generator().manual_seed(seed)
    make = lambda w: (torch.randn(ROWS, WIDTH, generator=draw), torch.tensor(w), torch.rand(ROWS, generator=draw) < 0.2)
    batches = [[make(w) for w in one] for *_, one in parts]
    want = {name: torch.zeros(WIDTH, dtype=torch.float64) for name in "vu"}
    size, calls = 0.0, sum(map(len, batches))
    for x, weight, used in (one for each in batches for one in each):
        share_of = (weight if mean else torch.ones(ROWS)).double()[:, None] * x / (weight.sum() if mean else ROWS)
        want["v"] += share_of.sum(0)
        want["u"] += (share_of * used[:, None]).sum(0)
        size += float(x.abs().max())
    with tempfile.TemporaryDirectory() as dir:
        found = []
        for k, (ranks, copies, n, stage, scale, _) in enumerate(parts):

            def body(k=k, args=(ranks, copies, n, stage), scale=scale):
                step, fresh = step_of(way, *args, scale, mean), {name: torch.zeros(WIDTH) for name in "vu"}
                state = fds.load(dir, step, fresh)[0] if k else step.init(fresh)
                for batch in batches[k]:
                    state, _ = step(state, share(step, batch))
                fds.save(dir, state, step)
                return step.params(state), state.slots["kept"]

            found = fds.simulate(body, ranks)
    for params, _ in found:
        assert_same_bits(params, found[0][0])
    for name, x in want.items():
        kept = sum(kept[name].double() for _, kept in found)
        rounding = 2**-24 * calls * (ROWS + 2 * 4 + 4) * (calls * size)  # additions: rows, messages, what is kept
        torch.testing.assert_close(found[0][0][name].double() - kept, -x, rtol=0, atol=rounding)


@pytest.mark.sweep
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mean", [False, True])
def test_a_power_of_two_is_invisible_to_what_is_kept(stage, mean):
    """The first microbatch weighs less than the others, and each call something else."""
    draw = torch.Generator().manual_seed(stage)
    weights = torch.rand(3, ROWS, generator=draw) * torch.tensor([[1.0], [100.0], [0.125]])
    batches = [(torch.randn(ROWS, WIDTH, generator=draw), w, torch.ones(ROWS, dtype=torch.bool)) for w in weights]

    def body(*scale):
        step = step_of(transports.topk(0.2), 2, 1, 3, stage, scale, mean)
        state = step.init({name: torch.zeros(WIDTH) for name in "vu"})
        for batch in batches:
            state, _ = step(state, share(step, batch))
        return step.params(state), state.slots["kept"]

    plain, scaled = (fds.simulate(lambda scale=scale: body(*scale), 2) for scale in ([], [fds.static_loss_scale(64.0)]))
    assert_same_bits(scaled, plain)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("weights", [(1000.0, 1.0), (1.0, 1000.0)], ids=str)
def test_an_error_comes_back_as_large_as_it_was(stage, weights):
    """The largest of nine numbers is sent in a call: after nine calls, eight without a gradient, all have come."""

    def body():
        step = step_of(transports.topk(0.2), 2, 1, 2, stage, [], True)
        state = step.init({name: torch.zeros(WIDTH) for name in "vu"})
        x = torch.arange(1.0, WIDTH + 1).expand(ROWS, WIDTH)
        for call in range(WIDTH):
            batch = x * (not call), torch.full((ROWS,), weights[call > 0]), torch.ones(ROWS, dtype=torch.bool)
            state, _ = step(state, share(step, batch))
            lost = sum(x.abs() for x in state.slots["kept"].values())
            assert (lost <= 2 * x[0]).all()
        return step.params(state), state.slots["kept"]

    for params, kept in fds.simulate(body, 2):
        for name in "vu":
            torch.testing.assert_close(params[name], -torch.arange(1.0, WIDTH + 1), rtol=1e-6, atol=0)
            assert not kept[name].any()
