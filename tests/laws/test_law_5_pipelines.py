"""Law 5: a pipeline is accumulation over its microbatches; plans that sum in one order are equal bit for bit."""

import random

import numpy
import torch
from hypothesis import given, strategies as st

import fds
from fds import tree
from tests.bits import assert_rounding, assert_same_bits, snapshot
from tests.laws.problems import OPTIMIZERS, TRANSFORMS, compositions, make, stacks
from tests.laws.test_law_4_sharding import SIZES, STAGES, batch_of, share
from tests.laws.test_law_8_replicas import poisoned
from tests.pipeline import partitions, pipelined, schedules, train, twins

STEPS = 2
LOW = ("accumulate", "precision", "half", "autocast")  # rounding of another kind, or not beside a pipeline


@st.composite
def cases(draw, max_ranks: int, dtype=torch.float64, *, in_order: bool = False, microbatches=(1, 2, 3, 4, 6), **pins):
    """Draw layers, a schedule that has no more stages than there are layers, and a partition."""
    problem = draw(stacks(dtype, **pins))
    drawn = draw(schedules(max_ranks, min(6, len(problem.loss)), in_order=in_order, microbatches=microbatches))
    return problem, drawn, draw(partitions(len(problem.loss), drawn.plan.num_stages))


def rounds_like(got, want, problem, microbatches: int) -> None:
    scale = max([1.0, *(float(x.abs().max()) for x in tree.leaves(want) if x.is_floating_point())])
    assert_rounding(got, want, additions=STEPS * microbatches * problem.additions, scale=scale)


@given(cases(6))
def test_a_plan_in_one_process_is_accumulation(case):
    problem, drawn, partition = case
    m = drawn.plan.num_microbatches
    plain = fds.compose(fds.accumulate(m), fds.sgd(0.1))(problem.loss)
    piped = fds.compose(pipelined(drawn, None, partition), fds.sgd(0.1))(problem.loss)
    want, last = train(plain, problem.params, [problem.batch] * STEPS)
    got, state = train(piped, problem.params, [problem.batch] * STEPS)
    rounds_like(got, want, problem, m)
    rounds_like(state.buffers, last.buffers, problem, m)
    assert int(state.step) == int(last.step)


@given(cases(4))
def test_a_plan_on_ranks_is_accumulation(case):
    problem, drawn, partition = case
    m = drawn.plan.num_microbatches
    plain = fds.compose(fds.accumulate(m), fds.sgd(0.1))(problem.loss)
    want, last = train(plain, problem.params, [problem.batch] * STEPS)

    def run():
        axis = fds.mesh(pp=-1)["pp"]
        step = fds.compose(pipelined(drawn, axis, partition), fds.sgd(0.1))(problem.loss)
        return train(step, problem.params, [problem.batch] * STEPS)

    seen = set()
    for got, state in fds.simulate(run, drawn.plan.num_ranks):
        rounds_like(got, want, problem, m)
        rounds_like(state.buffers, {name: last.buffers[name] for name in state.buffers}, problem, m)
        seen |= state.buffers.keys()
    assert seen == last.buffers.keys()


@given(
    cases(4, torch.float32, in_order=True, tied=False, branching=False), st.sampled_from(sorted(OPTIMIZERS)), st.data()
)
def test_plans_that_sum_in_one_order_are_equal_bit_for_bit(case, optimizer, data):
    """The whole state too; what is added up from three layers, or for a tied parameter, is so in another order."""
    problem, drawn, partition = case
    other, ranks = data.draw(twins(drawn)), drawn.plan.num_ranks
    on_ranks = data.draw(st.booleans()) if ranks > 1 else False

    def run(one):
        axis = fds.mesh(pp=-1)["pp"] if on_ranks else None
        step = fds.compose(pipelined(one, axis, partition), OPTIMIZERS[optimizer]())(problem.loss)
        return train(step, problem.params, [problem.batch] * STEPS)

    a, b = ([run(one)] if not on_ranks else fds.simulate(lambda one=one: run(one), ranks) for one in (drawn, other))
    assert_same_bits(b, a)


@given(cases(4, torch.float32, tied=False), st.sampled_from(sorted(OPTIMIZERS)))
def test_one_process_and_ranks_are_equal_bit_for_bit(case, optimizer):
    problem, drawn, partition = case

    def run(axis):
        step = fds.compose(pipelined(drawn, axis, partition), OPTIMIZERS[optimizer]())(problem.loss)
        return train(step, problem.params, [problem.batch] * STEPS)

    want, whole = run(None)
    for got, state in fds.simulate(lambda: run(fds.mesh(pp=-1)["pp"]), drawn.plan.num_ranks):
        assert_same_bits(got, want)
        names = state.buffers.keys()
        assert_same_bits(state.buffers, {name: whole.buffers[name] for name in names})


def grid(replicate: int, shards: int):
    """Return pipeline axis, data coordinate, and how the optimizer is sharded, of a mesh of two ranks a pipeline."""
    if replicate == 1:
        mesh = fds.mesh(pp=-1, dp=shards)
        return mesh["pp"], mesh["dp"].index, lambda **more: fds.shard_optimizer(mesh["dp"], **more)
    mesh = fds.mesh(pp=-1, replicate=replicate, dp=shards)
    sharded = lambda **more: fds.shard_optimizer(mesh["dp"], replicate=mesh["replicate"], **more)
    return mesh["pp"], mesh["replicate", "dp"].index, sharded


GRIDS = st.sampled_from([(1, 2), (1, 2), (2, 2)])  # beside two ranks of a pipeline


def train_grid(case, shape, stage, size, names, optimizer, batches, *more):
    """Return from every rank what comes of it, its state and its step."""
    problem, drawn, partition = case
    count = shape[0] * shape[1]

    def run():
        axis, index, sharded = grid(*shape)
        transforms = [pipelined(drawn, axis, partition), sharded(stage=stage, bucket_bytes=size), *more]
        step = make(names, optimizer(), problem, *transforms)
        mine = [share(batch, index, count) for batch in batches]
        got, state = train(step, problem.params, mine)
        return got, state, step, index

    return fds.simulate(run, drawn.plan.num_ranks * count)


@given(cases(2, microbatches=(1, 2, 3)), GRIDS, STAGES, SIZES, compositions(without=LOW), st.data())
def test_pipelines_beside_data_ranks_are_accumulation_of_the_concatenated_batch(case, shape, stage, size, names, data):
    """Whatever else is composed, with patterns that exist on some stages only."""
    problem, drawn, _ = case
    m, count, params = drawn.plan.num_microbatches, shape[0] * shape[1], sorted(problem.params)
    one = data.draw(st.sampled_from(params))
    more = [fds.freeze(one)] if len(params) > 1 and data.draw(st.booleans()) else []
    more += [fds.donate()] if data.draw(st.booleans()) else []
    by_name = {data.draw(st.sampled_from(params)): fds.sgd(0.05, momentum=0.9), "*": fds.sgd(0.1)}
    frozen = bool(more) and more[0].name == "freeze"
    optimizer = lambda: fds.sgd(0.1) if frozen else fds.by_name(by_name)
    batch = batch_of(problem, 2 * m * count)

    plain = make(names, optimizer(), problem, fds.accumulate(m * count), *more)
    want, last = train(plain, problem.params, [batch] * STEPS)
    for got, state, _, index in train_grid(case, shape, stage, size, names, optimizer, [batch] * STEPS, *more):
        shown, expected = got.pop("evaluated"), dict(want)
        whole = expected.pop("evaluated")
        rounds_like(got, expected, problem, m * count)
        assert int(state.step) == int(last.step)
        if not problem.coupled:  # else every data rank has the running mean of its own rows
            outputs = whole.pop("outputs")
            rounds_like(shown.pop("outputs"), outputs.chunk(count)[index], problem, m * count)
            rounds_like(shown, whole, problem, m * count)
            whole["outputs"] = outputs


@given(
    cases(2, torch.float32, in_order=True, microbatches=(1, 2, 3), tied=False, branching=False),
    STAGES,
    SIZES,
    st.sampled_from(["precision", "half", "autocast"]),
)
def test_low_precision_beside_data_ranks_is_that_of_one_process(case, stage, size, name):
    """After one step: what differs is the order in which float32 gradients of microbatches are added."""
    problem, drawn, _ = case
    count = 2 * drawn.plan.num_microbatches
    batch = batch_of(problem, 2 * count)
    plain = fds.compose(fds.accumulate(count), TRANSFORMS[name].make(), fds.sgd(1.0))(problem.loss)
    before = plain.init(problem.params, key=5)
    want, told = plain(before, batch)
    largest = max(1.0, *(float((a - before.params[k]).abs().max()) for k, a in want.params.items()))

    def run():
        axis, index, sharded = grid(1, 2)
        transforms = [pipelined(drawn, axis, case[2]), sharded(stage=stage, bucket_bytes=size)]
        step = make([name], fds.sgd(1.0), problem, *transforms)
        state, metrics = step(step.init(problem.params, key=5), share(batch, index, 2))
        return step.params(state), metrics

    for got, metrics in fds.simulate(run, 2 * drawn.plan.num_ranks):
        assert_rounding(got, want.params, additions=2 * count, scale=count * largest)
        assert_rounding(metrics, told, additions=2 * count, scale=count * float(told["loss"].abs().clamp(min=1)))


@given(
    cases(2, torch.float32, microbatches=(1, 2, 3)),
    GRIDS,
    STAGES,
    SIZES,
    st.sampled_from(sorted(OPTIMIZERS)),
    st.sampled_from([float("nan"), float("inf")]),
    st.data(),
)
def test_all_stages_of_all_replicas_skip_together_what_one_cannot_use(case, shape, stage, size, optimizer, bad, data):
    problem, drawn, partition = case
    count = shape[0] * shape[1]
    spoiled = data.draw(st.integers(0, count - 1))
    if not problem.batch[0].is_floating_point():
        return
    batch = batch_of(problem, 2 * drawn.plan.num_microbatches * count)

    def run():
        axis, index, sharded = grid(*shape)
        transforms = [pipelined(drawn, axis, partition), sharded(stage=stage, bucket_bytes=size)]
        scaled = fds.loss_scale(2.0**6, hysteresis=1)
        step = make(["ema"], OPTIMIZERS[optimizer](), problem, *transforms, scaled)
        mine = share(batch, index, count)
        before, _ = step(step.init(problem.params), mine)
        kept = snapshot(before)
        after, metrics = step(before, poisoned(mine, spoiled, index, bad))
        again, good = step(after, mine)
        return kept, after, metrics, step.params(again), good

    results = fds.simulate(run, drawn.plan.num_ranks * count)
    for kept, after, metrics, *_ in results:
        assert bool(metrics["skipped"])
        held = lambda state: (state.params, state.opt, state.buffers, state.step)
        assert_same_bits(held(after), held(kept))
        assert float(after.slots["loss_scale"].scale) == 2.0**5
    for _, _, metrics, params, good in results[1:]:
        assert_same_bits((metrics, params, good), (results[0][2], *results[0][3:]))


@given(
    cases(2, torch.float32, microbatches=(1, 2, 3), tied=True),
    GRIDS,
    STAGES,
    SIZES,
    st.sampled_from(sorted(OPTIMIZERS)),
    compositions(without=("accumulate",)),
)
def test_replicas_and_tied_copies_agree_to_the_bit(case, shape, stage, size, optimizer, names):
    problem, drawn, _ = case
    count = shape[0] * shape[1]
    batch = batch_of(problem, 2 * drawn.plan.num_microbatches * count)
    results = train_grid(case, shape, stage, size, names, OPTIMIZERS[optimizer], [batch] * STEPS)
    copies = {}
    for got, state, step, index in results:
        for one in (got["evaluated"], results[0][0]["evaluated"]):
            one.pop("outputs", None)  # of this rank's own rows
        assert_same_bits(got, results[0][0])
        structure, parts = step.structure_of(state.params)
        for segments, x in zip(structure.segments, parts, strict=True):
            slice_of = index % shape[1] if stage else 0
            assert_same_bits(copies.setdefault((slice_of, str(segments)), x), x)


@given(
    cases(4, torch.float32), st.sampled_from(sorted(OPTIMIZERS)), compositions(without=("accumulate",)), st.booleans()
)
def test_a_pipeline_is_a_function_and_touches_nothing(case, optimizer, names, on_ranks):
    problem, drawn, partition = case

    def run():
        axis = fds.mesh(pp=-1)["pp"] if on_ranks else None
        step = make(names, OPTIMIZERS[optimizer](), problem, pipelined(drawn, axis, partition))
        state, batch = step.init(problem.params), snapshot(problem.batch)
        given = snapshot((state, batch))
        first, second = step(state, batch), step(state, batch)
        assert_same_bits(second, first)
        held = snapshot(first)
        shown = [step.evaluate(state, batch, outputs=True) for _ in range(2)]
        assert_same_bits(shown[1], shown[0])
        step(first[0], batch)
        assert_same_bits(first, held)
        assert_same_bits((state, batch), given)
        donating = make(names, OPTIMIZERS[optimizer](), problem, pipelined(drawn, axis, partition), fds.donate())
        assert_same_bits(donating(donating.init(problem.params), batch), first)

    before = (torch.get_rng_state(), random.getstate(), repr(numpy.random.get_state()))
    if on_ranks:
        fds.simulate(run, drawn.plan.num_ranks)
    else:
        run()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), repr(numpy.random.get_state())) == before[1:]
