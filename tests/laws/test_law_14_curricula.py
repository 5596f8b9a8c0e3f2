"""Law 14 for curricula: stopped after every call and resumed on other ranks, a run is the run that was not."""

import torch

import fds
from fds import schedules
from tests.bits import assert_same_bits

ROWS = torch.randint(0, 11, (8, 8), generator=torch.Generator().manual_seed(0))
LENGTHS = schedules.stay_at(schedules.fixed_discrete([2, 4, 8, 4], [2, 5, 6]), 8)
FOLDED = schedules.fixed_discrete([4, 1, 2], [1, 4])
PLACES = [(1, 0), (2, 1), (4, 2), (2, 3), (1, 2)]  # ranks, and the stage at which they share the state


def made(ranks, stage):
    """Return a step in which all numbers are multiples of a power of two, and sums exact in any order; and its rows."""
    axis = fds.mesh(dp=ranks)["dp"]

    def loss(params, batch):
        return fds.Mean((params["w"][batch["x"]] * batch["times"]).sum(), batch["x"].numel())

    def weighed(batch, difficulty):
        return {**batch, "times": torch.tensor(float(difficulty))}

    step = fds.compose(
        fds.curriculum("seqlen", LENGTHS),
        fds.curriculum("seqlen_reshape", FOLDED),
        fds.curriculum(weighed, lambda t: t),
        fds.accumulate(4 // ranks),
        fds.shard_optimizer(axis, stage=stage),
        fds.sgd(schedules.by_tokens(lambda t: t / 64, LENGTHS, 8)),
    )(loss)
    return step, {"x": ROWS.chunk(ranks)[axis.index]}


def went_on(directory, calls, place):
    """Return the parameters after one more call, on these ranks, of a state that is saved before and after it."""

    def run():
        step, batch = made(*place)
        state = step.init(PARAMS) if calls == 0 else fds.load(directory, step, PARAMS)[0]
        state, metrics = step(state, batch)
        fds.save(directory, state, step)
        return step.params(state), metrics["loss"], metrics["lr"]

    return fds.simulate(run, place[0])[-1]


PARAMS = {"w": torch.zeros(11)}


def test_a_run_that_is_resumed_on_other_ranks_after_every_call_is_the_run_bit_for_bit(tmp_path):
    step, batch = made(1, 0)
    state, tokens = step.init(PARAMS), 0
    for calls in range(7):
        state, metrics = step(state, batch)
        assert float(metrics["lr"]) == tokens / 8 / 64
        assert_same_bits(
            went_on(tmp_path, calls, PLACES[calls % len(PLACES)]), (step.params(state), metrics["loss"], metrics["lr"])
        )
        tokens += LENGTHS(calls + 1)
    assert tokens == 2 * 2 + 4 * 3 + 8 * 2 and state.params["w"].abs().max() > 0
