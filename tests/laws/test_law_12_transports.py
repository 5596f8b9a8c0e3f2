"""Law 12: a lossless transport is invisible, a lossy one keeps to its bound, and what it keeps back is never lost."""

import pytest
import torch
from torch import Tensor

import fds
from fds import tree
from fds.errors import ComposeError
from fds.step import Pending, Transport, fill, transform
from tests.bits import assert_same_bits
from tests.laws import problems
from tests.storage.topologies import Stages, Topology, roll

PLACES = [
    *(Topology(3, stage, 300) for stage in range(4)),
    *(Topology(4, stage, 300, replicas=2) for stage in (0, 3)),
    *(Stages(2, fds.plans.zb_h1, 2, stage) for stage in (1, 2)),
]
NAMES = [f"{type(one).__name__.lower()} of {one.ranks}, stage {one.stage}, {one.replicas} copies" for one in PLACES]


class ByPieces(Transport):
    """Sends by other collectives, and sums in the order of ranks, as reductions do."""

    def reduce(self, axis, whole, out):
        pieces = torch.empty_like(whole)
        return Pending(axis.start_all_to_all(pieces, whole.clone()), lambda: out.copy_(in_order(pieces, axis.size)))

    def combine(self, axis, own):
        everything = own.new_empty(axis.size * len(own))
        return Pending(axis.start_all_gather(everything, own), lambda: own.copy_(in_order(everything, axis.size)))

    def spread(self, axis, own, whole):
        return axis.start_all_to_all(whole, own.repeat(axis.size))

    def gather(self, axis, part, whole):
        return self.spread(axis, part.to(whole.dtype), whole)


def in_order(pieces: Tensor, size: int) -> Tensor:
    first, *others = pieces.chunk(size)
    total = first.float() if tree.is_low(first) else first.clone()
    for one in others:
        total += one
    return total


@transform
def by(reduce: Transport, gather: Transport):
    return lambda step: fill(step, reduce={"transport": reduce}, gather={"transport": gather})


def trained(place, *more, calls=3):
    """Return what every rank ends with: its state, the whole parameters, the last metrics."""
    problem = problems.layers(1, torch.float32, 0.3, True)

    def run():
        cut = [place.shard(), fds.accumulate(2)] if isinstance(place, Topology) else place.transforms()
        step = fds.compose(*cut, fds.clip_by_global_norm(0.1), fds.adamw(0.05), *more)(problem.loss)
        state, metrics = step.init(problem.params, key=3), {}
        for _ in range(calls):
            state, metrics = step(state, tree.map(lambda x: roll(x, step.shard.data.index), problem.batch))
        return state, step.params(state), metrics

    return place.run(run)


@pytest.mark.parametrize("place", PLACES, ids=NAMES)
def test_a_lossless_transport_is_invisible(place):
    more = [fds.precision(reduce=torch.bfloat16), fds.donate()] if place.stage % 2 else []
    for got, want in zip(trained(place, *more, by(ByPieces(), ByPieces())), trained(place, *more), strict=True):
        assert_same_bits(got, want)


class Short(Transport):
    def reduce(self, axis, whole):
        return axis.start_reduce_scatter(whole, whole)


@pytest.mark.parametrize("wrong", [Short(), ByPieces, "lossless", None], ids=range(4))
def test_what_is_no_transport_is_refused_with_the_contract(wrong):
    for one in (by(wrong, Transport()), by(Transport(), wrong)):
        with pytest.raises(ComposeError, match=r"fds.step.Transport, with reduce\(axis, whole, out\)"):
            fds.compose(one, fds.sgd(0.1))(lambda params, batch: params.sum())
