"""Law 12 for optimizers that add up over ranks by themselves: nothing is lost, and a resumed run is the run."""

import pytest
import torch

import fds
from fds import tree
from tests.bits import assert_same_bits, snapshot
from tests.laws.test_law_12_transports import composed
from tests.storage.topologies import Stages, Topology, roll

PLACES = [Topology(3, 0), Topology(4, 0, 300, replicas=2), Stages(2, fds.plans.one_f_one_b, 2, 0)]
NAMES = ["3 ranks", "2 replicas of 2 ranks", "a pipeline of 2 stages on 2 ranks each"]
every_place = pytest.mark.parametrize("place", PLACES, ids=NAMES)
ERRORS = ("worker_error", "server_error")


def begun(place, *more, freeze_step=2):
    """Return a step, a state in which warm-up is over and messages have lost something, and this rank's batch."""
    step, state, batch = composed(place, *more, optimizer=fds.onebit_adam(0.01, freeze_step=freeze_step))
    mine = tree.map(lambda x: roll(x, step.shard.data.index), batch)
    for _ in range(freeze_step + 2):
        state, _ = step(state, mine)
    return step, state, mine


def of_all(step, slots):
    """Return the sums of errors over the ranks that hold a parameter."""
    both = {name: x.double() + slots["server_error"][name] for name, x in slots["worker_error"].items()}
    return {name: step.shard.data.all_reduce(x) for name, x in both.items()}


SMALL = {"w": torch.ones(7, 5), "b": torch.ones(3)}


def small():
    """Return a step whose gradients are the batch, and its first state."""
    loss = lambda p, g: sum((p[name] * x[0]).sum() for name, x in g.items())
    shard = fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=0)
    step = fds.compose(shard, fds.onebit_adam(0.01, freeze_step=2, betas=(0.0, 0.999)))(loss)
    return step, step.init(SMALL)


@every_place
def test_what_is_sent_is_what_is_told_and_all_ranks_agree(place):
    def run():
        step, state, batch = begun(place)
        assert not any(one.buckets for one in step.describe(state).messages)
        with fds.collectives.counted() as traffic:
            state, _ = step(state, batch)
        sent = {key: one.bytes_sent for key, one in traffic.counts.items()}
        own = sum(n for (op, axis), n in sent.items() if op in ("all_to_all", "all_gather") and "pp" not in axis)
        assert own == step.describe(state).sent["optimizer"] and not any(op == "reduce_scatter" for op, _ in sent)
        return step.params(state), state.opt, step.shard.data.index

    found = place.run(run)
    for params, _, _ in found:
        assert_same_bits(params, found[0][0])


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("place", "kind"),
    [*((place, fds.onebit_adam) for place in PLACES), (PLACES[2], fds.onebit_lamb)],
    ids=[*NAMES, "1-bit LAMB in a pipeline"],
)
@pytest.mark.parametrize("calls", [1, 5], ids=["in warm-up", "after it"])
def test_a_resumed_run_is_the_run_that_was_never_stopped(place, kind, calls, tmp_path):
    def run():
        step, state, batch = composed(place, optimizer=kind(0.01, freeze_step=2))
        mine = tree.map(lambda x: roll(x, step.shard.data.index), batch)
        for _ in range(calls):
            state, _ = step(state, mine)
        fds.save(tmp_path, state, step)
        again, _ = fds.load(tmp_path, step, step.params(state))
        for _ in range(2):
            state, again = step(state, mine)[0], step(again, mine)[0]
        assert all(any(x.any() for x in state.slots[slot].values()) for slot in ERRORS)
        return state, again

    for state, again in place.run(run):
        assert_same_bits(again, state)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_on_other_ranks_the_sums_of_errors_are_preserved_and_a_rank_alone_sends_them(ranks, tmp_path):
    def save():
        step, state = small()
        for t in range(4):
            draw = torch.Generator().manual_seed(3 * t + step.shard.data.index)
            state, _ = step(state, {name: torch.randn(1, *x.shape, generator=draw) for name, x in SMALL.items()})
        fds.save(tmp_path, state, step)
        return of_all(step, state.slots)

    kept, *_ = fds.simulate(save, 3)

    def load():
        step, _ = small()
        state, _ = fds.load(tmp_path, step, SMALL)
        total = of_all(step, state.slots) if ranks > 1 else None
        after, _ = step(state, {name: torch.zeros(1, *x.shape) for name, x in SMALL.items()})
        return total, state.slots, after

    for total, slots, after in fds.simulate(load, ranks):
        if ranks > 1:
            for name, x in kept.items():
                torch.testing.assert_close(total[name], x, rtol=0, atol=2**-20)
            continue
        for name, x in kept.items():
            torch.testing.assert_close(slots["worker_error"][name] + slots["server_error"][name], x.float())
            torch.testing.assert_close(after.opt["exp_avg"][name], x.float())  # beta1 is 0
            assert not after.slots["worker_error"][name].any() and not after.slots["server_error"][name].any()


@pytest.mark.parametrize("place", PLACES[:2], ids=NAMES[:2])  # the pipeline's batch has no floats
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all_and_keeps_every_bit(place):
    def run():
        step, state, batch = begun(place, fds.skip_nonfinite())
        before = snapshot((state.params, state.opt, state.slots))
        bad = torch.nan if step.shard.data.index == 1 else 1.0
        after, metrics = step(state, tree.map(lambda x: x * bad if x.is_floating_point() else x, batch))
        assert_same_bits((after.params, after.opt, after.slots), before)
        assert int(after.calls) == int(state.calls) + 1 and "grad_norm" not in metrics
        return bool(metrics["skipped"])

    assert all(place.run(run))


@every_place
def test_a_state_that_is_given_up_and_one_that_is_kept_are_followed_by_the_same(place):
    def run(*more):
        def body():
            step, state, batch = begun(place, *more)
            before = snapshot(state) if not more else None
            after, _ = step(state, batch)
            if not more:
                assert_same_bits(state, before)
            return after

        return place.run(body)

    for got, want in zip(run(fds.donate()), run(), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_a_loss_scale_is_invisible(scale):
    found = PLACES[0].run(lambda: begun(PLACES[0], fds.static_loss_scale(scale))[1])
    want = PLACES[0].run(lambda: begun(PLACES[0], fds.static_loss_scale(1.0))[1])
    for got, one in zip(found, want, strict=True):
        assert_same_bits((got.params, got.opt, got.slots), (one.params, one.opt, one.slots))
