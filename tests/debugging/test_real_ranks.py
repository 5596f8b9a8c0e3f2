"""What goes wrong on one of two processes is said by both, in the same words."""

import warnings

from torch import nn

import fds
from fds.errors import StateError
from tests import ranks
from tests.debugging.test_watch import batch, of_module


class Unit(nn.Module):
    def forward(self, x):
        return x / x.norm(dim=1, keepdim=True)


def what_is_found(stage):
    """Return what a rank finds of a row that only rank 1 has, and of a number that only rank 0 changed."""
    dp = fds.mesh(dp=-1)["dp"]
    loss, params = of_module(nn.Linear(4, 8), first=Unit())
    step = fds.compose(fds.shard_optimizer(dp, stage=stage), fds.skip_nonfinite(), fds.adamw(0.01))(loss)
    watch, state = fds.watch(step), step.init(params, key=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the call was skipped
        state, _ = watch(state, batch(*[3] * dp.index))
    found, words = str(watch.last), []
    fds.check_ranks(state, step)
    if dp.index == 0:
        state.step.add_(5)
    try:
        fds.check_ranks(state, step)
    except StateError as error:
        words.append(str(error))
    return found, words


def test_two_processes_find_what_one_of_them_has():
    for stage in (0, 3):
        (found, words), other = ranks.run(what_is_found, stage)
        assert (found, words) == other
        assert "rank 1" in found and "[3, 0]" in found and len(words) == 1 and "step" in words[0]
