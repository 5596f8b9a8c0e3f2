"""Law 8: ranks agree after any batch, NaN on one of them included."""

import pytest
import torch
from hypothesis import given, strategies as st

import fds
from fds import tree
from tests.bits import assert_same_bits, snapshot
from tests.laws.problems import OPTIMIZERS, compositions, make, problems
from tests.laws.test_law_4_sharding import SIZES, STAGES, batch_of, shard, share

SKIPS = ("accumulate", "loss_scale", "static_loss_scale", "skip_nonfinite")


def poisoned(batch, rank: int, index: int, bad: float):
    """Return the batch, on one rank with a row that is not finite."""
    if rank != index:
        return batch
    first = lambda x: torch.arange(len(x)).view(-1, *[1] * (x.dim() - 1)) == 0
    return tree.map(
        lambda x: (
            x.masked_fill(first(x), bad) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() > 0 else x
        ),
        batch,
    )


@given(
    problems(),
    st.sampled_from(sorted(OPTIMIZERS)),
    compositions(without=SKIPS),
    st.integers(2, 4),
    STAGES,
    SIZES,
    st.sampled_from([float("nan"), float("inf")]),
    st.data(),
)
def test_all_ranks_skip_together_what_one_of_them_cannot_use(problem, optimizer, names, ranks, stage, size, bad, data):
    index = data.draw(st.integers(0, ranks - 1))
    batch = batch_of(problem, 2 * ranks)
    if not any(isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() for x in tree.leaves(batch)):
        return

    def run():
        axis = fds.mesh(dp=-1)["dp"]
        step = make(names, OPTIMIZERS[optimizer](), problem, shard(stage, size), fds.loss_scale(2.0**6, hysteresis=1))
        before, _ = step(step.init(problem.params), share(batch, axis.index, ranks))
        kept = snapshot(before)
        after, metrics = step(before, poisoned(share(batch, axis.index, ranks), axis.index, index, bad))
        again, good = step(after, share(batch, axis.index, ranks))
        return kept, after, metrics, step.params(again), good

    results = fds.simulate(run, ranks)
    for kept, after, metrics, *_ in results:
        assert bool(metrics["skipped"])
        assert_same_bits(
            (after.params, after.opt, after.buffers, after.step), (kept.params, kept.opt, kept.buffers, kept.step)
        )
        assert float(after.slots["loss_scale"].scale) == 2.0**5
    for _, _, metrics, params, good in results[1:]:
        assert_same_bits((metrics, params, good), (results[0][2], *results[0][3:]))


@given(problems(), st.sampled_from(sorted(OPTIMIZERS)), compositions(), st.integers(2, 4), STAGES, SIZES)
def test_replicas_agree_to_the_bit(problem, optimizer, names, ranks, stage, size):
    batch = batch_of(problem, 6 * ranks)

    def run():
        step = make(names, OPTIMIZERS[optimizer](), problem, shard(stage, size))
        state, mine = step.init(problem.params), share(batch, fds.mesh(dp=-1)["dp"].index, ranks)
        for _ in range(2):
            state, metrics = step(state, mine)
        return step.params(state), metrics, state.buffers, state.key, step.evaluate(state, mine)

    first, *others = fds.simulate(run, ranks)
    for other in others:
        assert_same_bits(other, first)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicated_slices_agree_and_equal_those_of_one_axis(stage):
    """Hybrid sharding: gathers inside a group, gradients summed over the groups too."""
    torch.manual_seed(0)
    params = {"a": torch.randn(64, 32), "b": torch.randn(1024)}
    batch = torch.randn(8, 32)

    def loss_fn(params, x):
        return ((x @ params["a"].T) ** 2).mean() + (params["b"] * x.mean()).sum()

    def run(hybrid):
        mesh = fds.mesh(replicate=2, shard=2)
        data = mesh["replicate", "shard"]
        sharding = (
            fds.shard_optimizer(mesh["shard"], replicate=mesh["replicate"], stage=stage, bucket_bytes=4096)
            if hybrid
            else fds.shard_optimizer(data, stage=stage, bucket_bytes=4096)
        )
        step = fds.compose(sharding, fds.clip_by_global_norm(0.1), fds.adamw(0.1))(loss_fn)
        state = step.init(params)
        for _ in range(3):
            state, metrics = step(state, batch.chunk(4)[data.index])
        return step.params(state), metrics, state

    hybrid, flat = (fds.simulate(lambda kind=kind: run(kind), 4) for kind in (True, False))
    for got, metrics, state in hybrid:
        assert_same_bits((got, metrics), hybrid[0][:2])
        for name, x in got.items():
            torch.testing.assert_close(x, flat[0][0][name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(metrics, flat[0][1], rtol=1e-5, atol=1e-6)
        assert tree.num_bytes(state.params) == (2 if stage else 1) * tree.num_bytes(flat[0][2].params) or not stage
