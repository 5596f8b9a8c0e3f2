"""At stages 2 and 3 every rank may use other parameters, in another order, as often as it likes: nobody hangs."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.checkpoint import checkpoint

import fds
from fds import transports
from tests.bits import assert_rounding, assert_same_bits
from tests.traffic import counted_for

LAYERS = 5
PATHS = st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=6)
PARAMS = {
    str(i): {
        "w": torch.randn(6, 6, generator=torch.Generator().manual_seed(i), dtype=torch.float64) / 4,
        "b": torch.zeros(6, dtype=torch.float64),
    }
    for i in range(LAYERS)
}


def loss_fn(params, batch):
    """Send each row through the layers that its path names, some of them recomputed in backward."""
    x, path = batch["x"], [int(i) for i in batch["path"].flatten() if i >= 0]
    for n, i in enumerate(path):
        layer = lambda x, i=i: x + torch.tanh(x @ params[str(i)]["w"] + params[str(i)]["b"])
        x = checkpoint(layer, x, use_reentrant=False) if n % 3 == 2 else layer(x)
    return (x**2).mean()


def rounds_of(call):
    """Return what a call returns, and in how many rounds ranks asked each other for an event."""
    with counted_for("step") as traffic:
        result = call()
    return result, traffic["all_gather", "dp"].calls


def rows(paths):
    """Return a batch with one row for each path, padded with -1."""
    x = torch.randn(len(paths), 6, generator=torch.Generator().manual_seed(len(paths)), dtype=torch.float64)
    return {"x": x, "path": torch.tensor([p + [-1] * (6 - len(p)) for p in paths])}


@given(
    st.integers(2, 3).flatmap(
        lambda ranks: st.lists(st.lists(PATHS, min_size=2 * ranks, max_size=2 * ranks), min_size=1, max_size=4)
    ),
    st.sampled_from([0, 1, 2]),
    st.sampled_from([None, 1]),
)
def test_ranks_may_take_any_paths_through_the_parameters(steps, prefetch, room):
    ranks = len(steps[0]) // 2
    size = 2560
    bound = None if room is None else (1 + prefetch) * size

    def run():
        axis = fds.mesh(dp=-1)["dp"]
        sharding = fds.shard_optimizer(axis, stage=3, bucket_bytes=800, prefetch=prefetch, max_live_bytes=bound)
        step = fds.compose(fds.accumulate(2), sharding, fds.sgd(0.1))(loss_fn)
        state, losses = step.init(PARAMS), []
        for paths in steps:
            mine = rows(paths)
            mine = {k: v[2 * axis.index : 2 * axis.index + 2] for k, v in mine.items()}
            state, metrics = step(state, mine)
            losses.append(metrics["loss"])
            losses.append(step.evaluate(state, {k: v[:1] for k, v in mine.items()})["loss"])
        return step.params(state), losses

    results = fds.simulate(run, ranks)
    for other in results[1:]:
        assert_same_bits(other, results[0])
    plain = fds.compose(fds.accumulate(2 * ranks), fds.sgd(0.1))(loss_fn)
    state = plain.init(PARAMS)
    for paths in steps:
        state, _ = plain(state, rows(paths))
    assert_rounding(results[0][0], state.params, additions=20_000, scale=4.0)


@pytest.mark.parametrize("stage", [2, 3])
def test_second_messages_keep_the_order_of_ranks_that_wait_at_times_of_their_own(stage):
    """What is sent once a first message has arrived: rows after their number, sums between nodes after those inside."""
    tables = {str(i): torch.randn(64, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)}
    tables["w"] = torch.eye(4)
    paths = torch.tensor([[[0, 1], [1, 1], [2, 0], [1, 2]], [[2, 2], [0, 1], [0, 0], [0, 2]]])  # by call and rank

    def lookups(params, ids):
        return sum((params[str(int(i))][row] @ params["w"]).tanh().square().sum() for i, row in ids)

    def run(ways):
        mesh = fds.mesh(node=2, local=2)
        data = mesh["node", "local"]
        shard = fds.shard_optimizer(data, stage=stage, bucket_bytes=1024, **ways)
        step = fds.compose(shard, fds.accumulate(2), fds.sgd(0.1))(lookups)
        state = step.init(tables)
        for path in paths:
            mine = path[data.index]
            state, _ = step(state, torch.stack([mine, mine * 7 + data.index], 1))
        return step.params(state)

    of = lambda **ways: fds.simulate(lambda: run(ways), 4)
    for got, want in zip(of(gradients=transports.rows()), of(gradients=transports.rows(most=10**6)), strict=True):
        assert_same_bits(got, want)
    exact = transports.hierarchical(transports.cast(torch.float32))
    ways = {"gradients": exact} | ({"weights": exact} if stage == 3 else {})
    for got, want in zip(of(**ways), of(), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("first", "then"), [([0, 1, 2, 3], [4, 2, 0]), ([0, 1], [0, 1, 2, 3])])
def test_the_order_is_learned_in_one_step_and_again_when_it_changes(first, then):
    """A step that follows the plan asks nobody: there is but one round, the last."""

    def run():
        axis = fds.mesh(dp=-1)["dp"]
        step = fds.compose(fds.shard_optimizer(axis, stage=3, bucket_bytes=800), fds.sgd(0.1))(loss_fn)
        state, asked = step.init(PARAMS), []
        for path in [first] * 3 + [then] * 3:
            (state, _), rounds = rounds_of(lambda state=state, path=path: step(state, rows([path])))
            asked.append(rounds)
        return asked

    for asked in fds.simulate(run, 2):
        learns, follows = asked[0], asked[1]
        assert follows == asked[2] == 1 < learns
        assert asked[3] > 1 and 1 in asked[4:]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_a_step_like_the_one_before_asks_nobody_however_far_it_looks_ahead(prefetch):
    def run():
        axis = fds.mesh(dp=-1)["dp"]
        sharding = fds.shard_optimizer(axis, stage=3, bucket_bytes=800, prefetch=prefetch)
        step = fds.compose(sharding, fds.sgd(0.1))(loss_fn)
        state, told = step.init(PARAMS), []
        for _ in range(5):
            with fds.collectives.counted() as traffic:
                (state, _), rounds = rounds_of(lambda state=state: step(state, rows([[0, 1, 2, 3, 4]])))
            told.append((rounds, traffic["all_gather", "dp"].calls))
        return told[1:]

    for told in fds.simulate(run, 2):
        assert {asked for asked, _ in told} == {1}
        assert len({gathered for _, gathered in told}) == 1


ALL = list(range(LAYERS))
STEPS = st.lists(st.lists(PATHS, min_size=4, max_size=4), max_size=3)


@given(STEPS, st.sampled_from([300, 800]), st.booleans())
def test_at_stage_2_nobody_asks_for_anything_after_a_call_in_which_all_parameters_were_used(later, size, reentrant):
    """Whatever the paths are then: some ranks skip what others use, or use it in another order.

    Not so behind a reentrant checkpoint, where a gradient may come in several parts.
    """
    steps = [[ALL] * 4, *later, [[1, 0]] * 4]

    def loss(params, batch):
        if not reentrant:
            return loss_fn(params, batch)
        layer = lambda x: x + torch.tanh(x @ params["0"]["w"] + params["0"]["b"])
        x = checkpoint(layer, batch["x"].detach().requires_grad_(), use_reentrant=True)
        return loss_fn(params, {**batch, "x": x})

    def run():
        axis = fds.mesh(dp=-1)["dp"]
        step = fds.compose(
            fds.accumulate(2),
            fds.shard_optimizer(axis, stage=2, bucket_bytes=size),
            fds.clip_by_global_norm(1.0),
            fds.sgd(0.1),
        )(loss)
        state, asked = step.init(PARAMS), []
        for paths in steps:
            mine = {k: v[2 * axis.index : 2 * axis.index + 2] for k, v in rows(paths).items()}
            (state, _), rounds = rounds_of(lambda state=state, mine=mine: step(state, mine))
            asked.append(rounds)
        return step.params(state), asked

    (params, asked), (others, same) = fds.simulate(run, 2)
    assert_same_bits(params, others)
    assert asked == same and asked[0] > 1
    assert all(asked[1:]) if reentrant else not any(asked[1:])
    plain = fds.compose(fds.accumulate(4), fds.clip_by_global_norm(1.0), fds.sgd(0.1))(loss)
    state = plain.init(PARAMS)
    for paths in steps:
        state, _ = plain(state, rows(paths))
    assert_rounding(params, state.params, additions=20_000, scale=4.0)


@pytest.mark.parametrize("first", [(ALL[:4], ALL[:4]), (ALL[1:], ALL), (ALL, ALL)])
def test_at_stage_2_buckets_that_nobody_uses_are_not_sent_and_may_be_asked_for_in_one_message_a_call(first):
    def run():
        axis = fds.mesh(dp=-1)["dp"]
        step = fds.compose(fds.shard_optimizer(axis, stage=2, bucket_bytes=300), fds.sgd(0.1))(loss_fn)
        state, asked, sent = step.init(PARAMS), [], []
        for path in [first[axis.index]] * 2 + [ALL if axis.index else first[0]]:
            with fds.collectives.counted() as traffic:
                (state, _), rounds = rounds_of(lambda state=state, path=path: step(state, rows([path])))
            asked.append(rounds)
            sent.append(traffic["reduce_scatter", "dp"].calls)
        return asked[1:], sent[1]

    for asked, sent in fds.simulate(run, 2):
        assert sent == 2 * len(first[1])
        assert asked == [0, 0] if first[0] == ALL else asked[0] == 1 <= asked[1]


def test_at_stage_2_a_gradient_that_comes_after_its_bucket_was_reduced_is_an_error_and_not_another_number():
    """Of a backward inside a backward, which the first call could not know of."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.w = w
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                torch.autograd.backward([ctx.w.sum()], inputs=[ctx.w])
            return grad, None

    def run():
        calls = iter([False, True])

        def loss(p, x):
            x = x.detach().requires_grad_()
            y = Twice.apply(x, p["1"]["w"]) if next(calls) else x
            return (y @ p["0"]["w"] @ p["1"]["w"]).sum()

        params = {i: {"w": PARAMS[i]["w"]} for i in "01"}
        axis = fds.mesh(dp=-1)["dp"]
        step = fds.compose(fds.shard_optimizer(axis, stage=2, bucket_bytes=300), fds.sgd(0.1))(loss)
        state, _ = step(step.init(params), torch.ones(1, 6, dtype=torch.float64))
        step(state, torch.ones(1, 6, dtype=torch.float64))

    with pytest.raises(fds.errors.LossError, match="came twice in one backward"):
        fds.simulate(run, 2)


@pytest.mark.parametrize("alone", [False, True])
def test_at_stage_2_a_parameter_that_a_microbatch_does_not_use_comes_in_its_turn(alone):
    def loss(params, batch):  # whose buckets are full in no order of their numbers
        x, uses = batch
        y = torch.tanh(x @ params["b"]) @ params["a"]["w"]
        return (y + params["a"]["z"] if bool(uses.any()) else y).square().mean()

    def batch_of(rank, call):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * call + rank), dtype=torch.float64)
        missing = call == 2 and (rank == 1 or not alone)
        return x, torch.tensor([not missing] * 2 + [True] * 2)

    params = {"a": {"w": torch.full((4, 4), 0.1), "z": torch.full((4,), 0.2)}, "b": torch.full((4, 4), 0.3)}
    params = fds.tree.map(lambda x: x.double(), params)

    def alike():
        step = fds.compose(fds.accumulate(4), fds.sgd(0.1))(loss)
        state = step.init(params)
        for call in range(4):
            batches = [batch_of(rank, call) for rank in range(2)]
            state, _ = step(state, tuple(map(torch.cat, zip(*batches, strict=True))))
        return step.params(state)

    def sharded():
        step = fds.compose(
            fds.accumulate(2), fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=2, bucket_bytes=64), fds.sgd(0.1)
        )(loss)
        state = step.init(params)
        for call in range(4):
            state, _ = step(state, batch_of(fds.mesh(dp=-1)["dp"].index, call))
        return step.params(state)

    assert_rounding(fds.simulate(sharded, 2)[0], alike(), additions=64)


def test_ranks_that_meet_on_a_sequence_axis_too_never_hold_a_bucket_for_its_turn():
    def run():
        mesh = fds.mesh(dp=1, sp=2)
        sp = mesh["sp"]

        def loss(params, batch):
            x, kind = batch
            for name in "abc":
                q = (x @ params[name]).unsqueeze(1)
                x = fds.nn.attention(q, q, q, axis=sp, causal=False, method="ring").squeeze(1)
            if bool(kind.any()):  # an image is in this rank's part of the tokens
                x = x + kind.unsqueeze(-1) * params["d"].sum(0)
            return x.square().mean()

        sharding = fds.shard_optimizer(mesh["dp", "sp"], stage=2, bucket_bytes=64)
        step = fds.compose(sharding, fds.context_parallel(sp), fds.sgd(0.1))(loss)
        state = step.init({name: torch.eye(8) / 2 for name in "abcd"})
        for call in range(4):
            x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(call))[:, sp.index * 4 : sp.index * 4 + 4]
            kind = torch.full((2, 4), float(call != 2 or sp.index == 0))
            state, metrics = step(state, (x, kind))
        return float(metrics["loss"])

    first, second = fds.simulate(run, 2)
    assert first == second


def test_ranks_that_meet_in_the_loss_too_never_hold_a_bucket_for_its_turn():
    """One rank uses a parameter less in a later call; at stages 0 and 1 that is a deadlock, which is named."""

    def run(stage):
        axis, calls = fds.mesh(dp=-1)["dp"], iter(range(4))

        def loss(params, x):
            uses = next(calls) != 2 or axis.index == 1
            for name in "abc":
                x = fds.collectives.all_reduce(torch.tanh(x @ params[name]), axis)
            return (x @ params["d"] if uses else x).square().mean()

        step = fds.compose(fds.shard_optimizer(axis, stage=stage, bucket_bytes=64), fds.sgd(0.1))(loss)
        state, asked = step.init({name: torch.eye(8) / 2 for name in "abcd"}), []
        for _ in range(4):
            (state, _), rounds = rounds_of(lambda state=state: step(state, torch.ones(4, 8)))
            asked.append(rounds)
        return step.params(state), asked

    for (two, asked), (three, _) in zip(*(fds.simulate(lambda s=s: run(s), 2) for s in (2, 3)), strict=True):
        assert_same_bits(two, three)
        assert all(asked)


def test_two_models_of_one_step_have_an_order_each():
    def run():
        axis = fds.mesh(dp=-1)["dp"]
        step = fds.compose(fds.shard_optimizer(axis, stage=3, bucket_bytes=800), fds.sgd(0.1))(loss_fn)
        large, small = step.init(PARAMS), step.init({i: PARAMS[i] for i in "01"})
        for _ in range(3):
            large, _ = step(large, rows([[4, 0, 3]]))
            small, _ = step(small, rows([[1, 0]]))
        return step.params(large), step.params(small)

    first, second = fds.simulate(run, 2)
    assert_same_bits(first, second)


def test_collectives_of_the_loss_do_not_get_between_those_of_the_step():
    """All gather features of each other; at stages 0 and 1, where the order is fixed, one rank may skip a layer too."""

    def run(stage):
        axis = fds.mesh(dp=-1)["dp"]

        def loss(p, b):
            x = fds.collectives.all_gather(b["x"] @ p["0"]["w"], axis)
            return (x if stage < 2 and not axis.index else x @ p["1"]["w"]).square().mean()

        step = fds.compose(fds.shard_optimizer(axis, stage=stage, bucket_bytes=800), fds.sgd(0.1))(loss)
        state = step.init(PARAMS)
        for _ in range(3):
            state, _ = step(state, rows([[0]]))
        return step.params(state)

    for stage in range(4):
        first, second = fds.simulate(lambda stage=stage: run(stage), 2)
        assert_same_bits(first, second)
