"""`fds.watch_ranks`: ranks that compute longer than the others, or come late, by real ranks and by numbers."""

import socket
import time
import warnings

import pytest
import torch

import fds
from fds.errors import FdsError
from fds.timing import RankPace
from fds.timing._stragglers import stragglers
from tests import ranks
from tests.bits import assert_same_bits
from tests.unit.step.problem import BATCH, make, make_params

PARTS = ("gather", "forward", "backward", "reduce", "optimizer", "offload", "wait", "other")


def pace(rank: int, between: float = 1.0, **parts: float) -> RankPace:
    times = dict.fromkeys(PARTS, 0.0) | {"forward": 10.0, "backward": 20.0} | parts
    return RankPace(rank, "host", between, times)


def test_the_rank_that_is_busy_longer_than_the_median_of_the_others_is_slow_where_most_of_it_goes():
    [late] = stragglers([pace(0, wait=30.0), pace(1, wait=28.0), pace(2, backward=48.0), pace(3)], 1.25)
    assert (late.rank, late.where, late.ms, late.others_ms, late.extra_ms) == (2, "backward", 58.0, 30.0, 28.0)
    assert late.ratio == pytest.approx(58 / 30)
    assert "rank 2 on host computes 1.93 times as long" in str(late)


def test_a_rank_that_waits_is_not_slow_and_one_of_two_is():
    assert stragglers([pace(0, wait=500.0), pace(1)], 1.25) == ()
    assert [late.rank for late in stragglers([pace(0), pace(1, forward=29.0)], 1.25)] == [1]
    assert stragglers([pace(0, forward=1000.0)], 1.25) == ()  # alone


def test_a_rank_that_comes_late_is_told_from_one_that_computes():
    [late] = stragglers([pace(0), pace(1, between=40.0), pace(2)], 1.25)
    assert (late.rank, late.where, late.ms) == (1, "between", 40.0)
    assert "comes late to each call: 40.0 ms between two calls, the others 1.0" in str(late)


def test_less_than_a_twentieth_of_a_call_is_noise():
    assert stragglers([pace(0), pace(1, between=2.4), pace(2)], 1.25) == ()
    assert "0.0" in str(stragglers([pace(0, between=0.0), pace(1, between=5.0)], 1.25)[0])


def train_with_a_straggler() -> tuple:
    """Train with one rank slow in its loss, then in its loader, then in neither; return what was warned of."""
    dp, slow = fds.mesh(dp=-1)["dp"], [""]

    def loss_fn(params, batch):
        time.sleep(0.2 if slow[0] == "loss" and dp.index == 1 else 0.05)  # longer than other work delays a call
        return (batch @ params["w"]).square().mean()

    step = fds.compose(fds.shard_optimizer(dp, stage=2), fds.adamw(lr=0.01))(loss_fn)
    state, watching, said = step.init({"w": torch.ones(4, 2)}), fds.watch_ranks(every=4, ratio=2.0), []
    for slow[0] in ("loss", "loss", "loader", "", "loss"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                time.sleep(0.2 if slow[0] == "loader" and dp.index == 1 else 0.05)
                with watching(state):
                    state, _ = step(state, torch.ones(2, 4))
        late = [(x.rank, x.host, x.where) for x in watching.stragglers if x.rank == 1]
        said.append((late, [str(warning.message) for warning in caught if "rank 1" in str(warning.message)]))
    return said, [pace.rank for pace in watching.paces]


def test_ranks_are_warned_of_a_straggler_until_it_has_caught_up():
    (first, those), (second, _) = ranks.run(train_with_a_straggler)
    host = socket.gethostname()
    assert those == [0, 1]
    for said in (first, second):
        assert [late for late, _ in said] == [
            [(1, host, "forward")], [(1, host, "forward")], [(1, host, "between")], [], [(1, host, "forward")]
        ]  # fmt: skip
    counts = [len(warned) for _, warned in first]
    assert counts == [1, 0, 1, 0, 1], first
    assert all(not warned for _, warned in second)
    assert "over 4 calls rank 1 on" in first[0][1][0] and "of the extra are forward" in first[0][1][0]


def test_a_step_that_is_watched_is_bit_for_bit_the_one_that_is_not():
    step, watching = make(), fds.watch_ranks(every=2)
    state = other = step.init(make_params())
    for _ in range(4):
        with watching(state):
            state, _ = step(state, BATCH)
        other, _ = step(other, BATCH)
    assert_same_bits(state, other)
    assert watching.stragglers == () and len(watching.paces) == 1
    assert watching.paces[0].busy_ms > 0 and repr(watching) == "watch_ranks(every=2, ratio=1.25)"


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"every": 0}, "every"),
        ({"every": 1.5}, "every"),
        ({"ratio": 1.0}, "ratio"),
        ({"ratio": float("nan")}, "ratio"),
        ({"ratio": "2"}, "ratio"),
        ({"axis": "dp"}, "axis"),
    ],
)
def test_other_arguments_are_refused(arguments, where):
    with pytest.raises(FdsError, match=f"where: watch_ranks, {where}"):
        fds.watch_ranks(**arguments)


def test_what_is_no_state_is_refused():
    with pytest.raises(FdsError, match="not a state"), fds.watch_ranks()({}):  # pyright: ignore[reportArgumentType]
        pass
