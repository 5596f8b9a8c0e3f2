"""Law 4: sharding over N ranks is accumulation over N times as many microbatches, at every stage."""

import torch
from hypothesis import given, strategies as st

import fds
from fds import tree
from fds.layout import Sharded
from tests.bits import assert_rounding, assert_same_bits
from tests.laws.problems import OPTIMIZERS, TRANSFORMS, compositions, make, problems

STAGES = st.integers(0, 3)
SIZES = st.sampled_from([64, 300, 2**20])  # bytes per bucket: less than a parameter, than a layer, more than all
NORMS = ("clip_norm", "accumulate")  # a norm is summed in another order over slices


def batch_of(problem, rows: int):
    """Return the problem's batch with so many rows, its own again and again."""
    pick = torch.arange(rows) % 12
    return tree.map(lambda x: x[pick] if isinstance(x, torch.Tensor) and x.dim() else x, problem.batch)


def share(batch, index: int, ranks: int):
    return tree.map(lambda x: x.chunk(ranks)[index] if isinstance(x, torch.Tensor) and x.dim() else x, batch)


def shard(stage, bucket_bytes, **more):
    return fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage, bucket_bytes=bucket_bytes, **more)


def train(problem, optimizer, names, ranks, n, stage, size, batches, *more, **knobs):
    """Return from every rank what it ends with: whole parameters, the last metrics, the state and the step."""

    def run():
        sharding = shard(stage, size, **knobs)
        step = make(names, OPTIMIZERS[optimizer](), problem, fds.accumulate(n), sharding, *more)
        state, metrics = step.init(problem.params, key=5), {}
        for batch in batches:
            state, metrics = step(state, share(batch, fds.mesh(dp=-1)["dp"].index, ranks))
        return step.params(state), metrics, state, step

    return fds.simulate(run, ranks)


@given(
    problems(torch.float64),
    compositions(without=("accumulate", "precision", "half", "autocast")),
    st.integers(2, 5),
    st.integers(1, 2),
    STAGES,
    SIZES,
)
def test_ranks_with_accumulation_are_accumulation_of_the_concatenated_batch(problem, names, ranks, n, stage, size):
    plain = make(names, fds.sgd(0.5), problem, fds.accumulate(ranks * n))
    batch = batch_of(problem, 2 * ranks * n)
    want, metrics = plain(plain.init(problem.params, key=5), batch)

    got, told, state, _ = train(problem, "half_sgd", names, ranks, n, stage, size, [batch])[0]
    scale = max(1.0, *(float(x.abs().max()) for x in tree.leaves(want.params)))
    assert_rounding(got, want.params, additions=4 * problem.additions, scale=scale)
    for name in metrics:
        assert_rounding(told[name], metrics[name], additions=4 * problem.additions, scale=scale)
    assert int(state.step) == int(want.step)


@given(
    problems(),
    st.sampled_from(sorted(OPTIMIZERS.keys() - {"lamb"})),
    compositions(without=NORMS),
    st.integers(2, 4),
    STAGES,
    STAGES,
    SIZES,
    SIZES,
)
def test_stages_are_equal_bit_for_bit(problem, optimizer, names, ranks, one, other, size, another):
    """With one microbatch a rank: more are summed over ranks last at stages 0 and 1, first at 2 and 3."""
    batches = [batch_of(problem, 2 * ranks), batch_of(problem, 3 * ranks)]
    a, metrics_a, *_ = train(problem, optimizer, names, ranks, 1, one, size, batches)[0]
    b, metrics_b, *_ = train(problem, optimizer, names, ranks, 1, other, another, batches)[-1]
    exact = {name: x for name, x in metrics_a.items() if name != "grad_norm"}
    assert_same_bits((a, exact), (b, {name: metrics_b[name] for name in exact}))


@given(problems(), st.integers(2, 3), st.sampled_from([(0, 1), (2, 3)]), SIZES)
def test_stages_that_sum_in_one_order_are_equal_under_accumulation(problem, ranks, stages, size):
    batches = [batch_of(problem, 4 * ranks)] * 2
    (a, *_), (b, *_) = (train(problem, "adamw", [], ranks, 2, stage, size, batches)[0] for stage in stages)
    assert_same_bits(a, b)


@given(problems(), st.sampled_from([0, 1, 3]), SIZES, st.sampled_from([None, 1.5]), st.integers(0, 40))
def test_how_parameters_are_gathered_changes_nothing(problem, prefetch, size, room, persist_below):
    batches = [batch_of(problem, 6)] * 3
    want, *_ = train(problem, "adamw", ["ema"], 2, 1, 2, size, batches)[0]
    largest = max(x.numel() for x in tree.leaves(problem.params)) * 4 + 2 * 128 + size
    bound = None if room is None else int(room * (1 + prefetch) * largest)
    got, *_ = train(
        problem,
        "adamw",
        ["ema"],
        2,
        1,
        3,
        size,
        batches,
        max_live_bytes=bound,
        prefetch=prefetch,
        persist_below=persist_below,
    )[0]
    assert_same_bits(got, want)


@given(problems(), st.sampled_from(sorted(OPTIMIZERS)), compositions(), st.integers(1, 4), STAGES, SIZES)
def test_a_rank_holds_the_bytes_of_the_formula(problem, optimizer, names, ranks, stage, size):
    if "accumulate" in names:
        names = [n for n in names if n != "accumulate"]
    _, _, state, step = train(problem, optimizer, names, ranks, 1, stage, size, [])[0]
    assert isinstance(state.params, Sharded) == (stage > 0 and ranks > 1)
    held = sum(x.numel() for x in tree.leaves(problem.params))
    mine = sum(x.numel() for x in tree.leaves(state.params))
    layout = step.structure_of(state.params)[0].layout
    padding = 0 if layout is None or stage == 0 else sum(b.numel for b in layout.buckets) - held
    assert mine * (ranks if stage else 1) == held + padding
    assert padding <= (len(tree.leaves(problem.params)) + ranks) * 32 * (1 if layout is None else len(layout.buckets))
    slots = len(state.opt)
    trained = [x for x in tree.leaves(state.params) if x.is_floating_point()]
    if optimizer in ("adam", "adamw"):
        assert tree.num_bytes(state.opt) == slots * sum(x.numel() * 4 for x in trained)


@given(problems(dropout=False), st.sampled_from(sorted(TRANSFORMS)), STAGES)
def test_one_rank_is_the_plain_step(problem, name, stage):
    names = [name] if name != "accumulate" else []
    plain = make(names, fds.adamw(0.01), problem)
    want, metrics = plain(plain.init(problem.params), problem.batch)
    sharded = make(names, fds.adamw(0.01), problem, shard(stage, 64))
    assert_same_bits(sharded(sharded.init(problem.params), problem.batch), (want, metrics))
