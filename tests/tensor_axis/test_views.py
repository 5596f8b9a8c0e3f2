"""Views of pieces on a `tensor` axis: what they read, and the gradients of that, are those of one rank."""

from __future__ import annotations

import pytest
import torch

import fds
from fds.errors import ComposeError
from fds.step import fill, transform
from tests.tensor_axis.splitting import Place, model, share

CALLS = 3


class Scaled:
    """A view that multiplies the columns of a weight by another parameter."""

    draws = False

    def __init__(self, weight: str, scale: str):
        self.weight, self.scale = weight, scale

    def reads(self, leaf, call):
        return [leaf.name.replace(self.weight, self.scale)] if leaf.name.endswith(self.weight) else []

    def __call__(self, x, leaf, call, read):
        return x * next(iter(read.values())) if read else x


@transform
def scaled(weight: str, scale: str):
    return lambda step: fill(step, view=Scaled(weight, scale))


@pytest.mark.parametrize("place", [Place(2), Place(2, data=2, stages=2, zero=1), Place(2, data=2, zero=3)], ids=str)
def test_a_view_of_a_piece_reads_what_is_whole(place):
    """Ranks have terms of the gradient of the norm's weight by the view, and the same one by the norm itself."""

    def run(place):
        step = place.step(scaled("up.weight", "norm.weight"), fds.clip_by_global_norm(0.5), optimizer=fds.sgd(0.3))
        state = step.init(model(None).init, key=3)
        for call in range(CALLS):
            state, metrics = step(state, share(step, call))
        return step.params(state), metrics["grad_norm"]

    want = run(Place())
    for result in fds.simulate(lambda: run(place), place.ranks):
        torch.testing.assert_close(result, want, rtol=0, atol=1e-11)


def test_a_view_that_every_rank_computes_alike_reads_nothing_of_which_ranks_have_terms():
    def body():
        step = Place(2).step(scaled("norm.weight", "inner"), optimizer=fds.sgd(0.1))
        with pytest.raises(ComposeError, match="the same gradient on all ranks") as refusal:
            step(step.init(model(None).init), share(step, 0))
        assert refusal.value.where == "station 'view', 1.norm.weight"

    fds.simulate(body, 2)
