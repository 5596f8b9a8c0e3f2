"""Law 12 for optimizers that let ranks take steps of their own: state is agreed on, and a resumed run is the run."""

import pytest
import torch

import fds
from fds import tree
from fds.errors import ComposeError
from tests.bits import assert_same_bits, snapshot
from tests.laws.test_law_12_transports import composed
from tests.storage.topologies import Stages, Topology, roll

PLACES = [Topology(4, 0, 300, replicas=2), Stages(2, fds.plans.one_f_one_b, 2, 0)]
NAMES = ["2 replicas of 2 ranks", "a pipeline of 2 stages on 2 ranks each"]
OWN = ("worker_error", "server_error", "local_momentum", "local_update")
SMALL = {"w": torch.ones(7, 5), "b": torch.ones(3)}
# calls 1 and 2 sum gradients, 3 sends signs; 4 begins local steps and agrees, as 5; then every 4th call, first 8
ARGUMENTS = {"var_freeze_step": 3, "var_update_scaler": 2, "local_step_scaler": 1, "local_step_clipper": 4}
CALLS = [1, 2, 3, 4, 6, 8]
PHASES = ["at first", "signs next", "local steps next", "alone next", "alone", "agreed"]


def by_signs(lr=0.01, **more):
    return fds.zero_one_adam(lr, **ARGUMENTS, **more)


def small(*more, optimizer=None, seen=None):
    """Return a step whose gradients follow parameters and batch, and its first state."""

    def loss(p, g):
        if seen is not None:
            seen.append({name: x.detach().clone() for name, x in p.items()})
        return sum((p[name].sin() * x[0]).sum() for name, x in g.items())

    shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=0)
    step = fds.compose(shard, *more, optimizer or by_signs())(loss)
    return step, step.init(SMALL)


def batch_of(t, rank):
    draw = torch.Generator().manual_seed(100 * t + rank)
    return {name: torch.randn(1, *x.shape, generator=draw) for name, x in SMALL.items()}


def after(calls, step, state):
    for t in range(int(state.calls), calls):
        state, _ = step(state, batch_of(t, 0 if step.shard is None else step.shard.data.index))
    return state


def test_state_is_agreed_on_while_each_rank_sees_what_it_has_moved():
    def run():
        seen = []
        step, state = small(seen=seen)
        for calls in range(10):
            before, state = state, after(calls + 1, step, state)
            own = before.slots["local_update"]
            assert_same_bits(seen[-1], {name: x + 2 * own[name] for name, x in before.params.items()})
            if calls in (5, 6, 8, 9):
                assert_same_bits(state.params, before.params)
        fds.check_ranks(state, step)
        value = step.evaluate(state, batch_of(0, 0))
        assert_same_bits(seen[-1], step.params(state))
        return seen[7], state.params, state.opt, value

    (mine, *first), (theirs, *second) = fds.simulate(run, 2)
    assert_same_bits(first, second)
    assert all((mine[name] != theirs[name]).any() for name in SMALL)


def test_each_kind_of_call_sends_what_is_told():
    def run():
        step, state = small()
        told, found = step.describe(state).sent, []
        for calls in range(8):
            buckets = sum(bool(one.buckets) for one in step.describe(state).messages)
            with fds.collectives.counted() as traffic:
                state = after(calls + 1, step, state)
            sent = {op: one.bytes_sent for (op, _), one in traffic.counts.items()}
            signs = sent.get("all_to_all", 0)
            gathered = sent.get("all_gather", 0)
            found.append((signs + gathered) if signs else 0)
            dense = sent.get("reduce_scatter", 0) + (0 if signs else gathered)
            assert (dense == told["reduce"]) == bool(buckets) == (calls in (0, 1)) and bool(dense) == bool(buckets)
        assert found == [told["optimizer"] * (calls in (2, 3, 7)) for calls in range(8)], found

    fds.simulate(run, 2)


@pytest.mark.parametrize("calls", CALLS, ids=PHASES)
def test_a_resumed_run_is_the_run_that_was_never_stopped(calls, tmp_path):
    def run():
        step, state = small(fds.skip_nonfinite())
        state = after(calls, step, state)
        fds.save(tmp_path, state, step)
        again, _ = fds.load(tmp_path, step, SMALL)
        return after(calls + 5, step, state), after(calls + 5, step, again)

    for state, again in fds.simulate(run, 2):
        assert_same_bits(again, state)


@pytest.mark.parametrize("place", PLACES, ids=NAMES)
def test_a_run_that_is_resumed_between_agreements_is_the_run_wherever_it_is_shared(place, tmp_path):
    def run():
        step, state, batch = composed(place, optimizer=by_signs())
        mine = tree.map(lambda x: roll(x, step.shard.data.index), batch)
        for _ in range(6):
            state, _ = step(state, mine)
        assert all(any(x.any() for x in state.slots[slot].values()) for slot in OWN)
        fds.save(tmp_path, state, step)
        again, _ = fds.load(tmp_path, step, step.params(state))
        for _ in range(3):
            state, again = step(state, mine)[0], step(again, mine)[0]
        return state, again

    for state, again in place.run(run):
        assert_same_bits(again, state)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_other_ranks_the_means_of_updates_and_of_momenta_are_preserved(ranks, tmp_path):
    def of_all(step, state):
        total = lambda x: x if step.shard is None else step.shard.data.all_reduce(x.double()).float()
        return {slot: tree.map(total, state.slots[slot]) for slot in OWN[2:]}, state.params, state.slots["local_lr"]

    def save():
        step, state = small()
        state = after(7, step, state)
        fds.save(tmp_path, state, step)
        return of_all(step, state)

    def load():
        step, _ = small()
        state, _ = fds.load(tmp_path, step, SMALL)
        found = of_all(step, state)
        return found, after(8, step, state)

    kept, *_ = fds.simulate(save, 3)
    for found, state in (every := fds.simulate(load, ranks)):
        torch.testing.assert_close(found, kept, rtol=0, atol=2**-22)
        assert_same_bits(state.params, every[0][1].params)
        assert not any(x.any() for slot in OWN[2:] for x in state.slots[slot].values())


@pytest.mark.parametrize("calls", [2, 3, 5, 7], ids=["signs", "local steps begin", "alone", "agreeing"])
def test_a_call_that_one_rank_would_skip_keeps_every_bit_on_all_and_its_kind_is_lost(calls):
    def run():
        step, state = small(fds.skip_nonfinite())
        state = after(calls, step, state)
        before = snapshot((state.params, state.opt))
        slots = snapshot(state.slots)
        bad = torch.nan if step.shard.data.index == 1 else 1.0
        state, metrics = step(state, tree.map(lambda x: x * bad, batch_of(calls, 0)))
        assert metrics["skipped"] and "grad_norm" not in metrics
        assert_same_bits((state.params, state.opt), before)
        if calls == 3:  # what messages of gradients had lost
            assert not any(x.any() for slot in OWN for x in state.slots[slot].values())
        else:
            assert_same_bits(state.slots, slots)
        return after(calls + 6, step, state)

    first, second = fds.simulate(run, 2)
    assert_same_bits((first.params, first.opt, first.step), (second.params, second.opt, second.step))
    assert all(x.isfinite().all() for x in tree.leaves((first.params, first.opt, first.slots)))


def test_a_state_that_is_given_up_and_one_that_is_kept_are_followed_by_the_same():
    def run(*more):
        def body():
            step, state = small(*more)
            state = after(7, step, state)
            before = snapshot(state) if not more else None
            found = after(8, step, state)
            if not more:
                assert_same_bits(state, before)
            return found

        return fds.simulate(body, 2)

    for got, want in zip(run(fds.donate()), run(), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("scale", [2.0**-4, 2.0**10])
def test_a_loss_scale_is_invisible(scale):
    def run(*more):
        def body():
            step, state = small(*more)
            return after(9, step, state)

        return fds.simulate(body, 2)

    for got, want in zip(run(fds.static_loss_scale(scale)), run(), strict=True):
        assert_same_bits((got.params, got.opt, got.slots), (want.params, want.opt, want.slots))


def test_groups_have_learning_rates_of_their_own():
    def run(optimizer):
        def body():
            step, state = small(optimizer=optimizer)
            return after(8, step, state)

        return fds.simulate(body, 2)[0]

    both = run(fds.by_name({"w": by_signs(0.01), "*": by_signs(0.03)}))
    for name, lr in (("w", 0.01), ("b", 0.03)):
        assert_same_bits(both.params[name], run(by_signs(lr)).params[name])


def test_where_the_learning_rate_was_0_the_momentum_begins_anew():
    def run():
        step, state = small(optimizer=by_signs(lambda t: torch.where(t < 4, 0.01, 0.0)))
        state = after(8, step, state)
        return state.params, state.opt

    (params, opt), other = fds.simulate(run, 2)
    assert_same_bits((params, opt), other)
    assert not any(x.any() for x in opt["exp_avg"].values()) and all(x.isfinite().all() for x in params.values())


def test_low_precision_parameters_are_updated_alike():
    def run():
        step, state = small()
        state = step.init({name: x.bfloat16() for name, x in SMALL.items()})
        for t in range(9):
            state, _ = step(state, {k: x.bfloat16() for k, x in batch_of(t, step.shard.data.index).items()})
        return state.params, state.opt, {x.dtype for slot in OWN for x in state.slots[slot].values()}

    first, second = fds.simulate(run, 2)
    assert_same_bits(first[:2], second[:2])
    assert first[2] == {torch.float32}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_slices_are_refused(stage):
    def run():
        shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=stage)
        with pytest.raises(ComposeError, match="slices"):
            fds.compose(shard, by_signs())(lambda p, batch: p["w"].sum())

    fds.simulate(run, 2)


@pytest.mark.parametrize("more", [fds.clip_by_value(1.0), fds.offload(moments="host")], ids=str)
def test_what_needs_whole_gradients_is_refused(more):
    def run():
        with pytest.raises(ComposeError, match="zero_one_adam"):
            small(more)

    fds.simulate(run, 2)
