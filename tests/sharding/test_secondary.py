"""A secondary axis: stage 3 gathers from all ranks once a step, and again from those of a node, with the same bits."""

import pytest
import torch

import fds
from fds import transports
from fds.errors import ComposeError
from tests.bits import assert_same_bits
from tests.laws import problems

ACCUMULATED = 2


def trained(secondary, *more, calls=3, **ways):
    """Return the last state, the messages of the last call by axis, and what `describe` says, on every rank."""

    def run():
        mesh = fds.mesh(node=2, local=2)
        data = mesh["node", "local"]
        problem = problems.layers(1, torch.float32, 0.3, True)
        shard = fds.shard_optimizer(
            data,
            stage=3,
            bucket_bytes=300,
            max_live_bytes=1200,
            prefetch=1,
            secondary=mesh["local"] if secondary else None,
            **ways,
        )
        step = fds.compose(shard, fds.accumulate(ACCUMULATED), *more, fds.adamw(0.05))(problem.loss)
        state = step.init(problem.params, key=3)
        batch = fds.tree.map(lambda x: x.roll(data.index, 0), problem.batch)
        for _ in range(calls):
            with fds.collectives.counted() as traffic:
                state, _ = step(state, batch)
        sent = {axis: n.bytes_sent for (operation, axis), n in traffic.counts.items() if operation == "all_gather"}
        return state, sent, step.describe(state), step.evaluate(state, batch)

    return fds.simulate(run, 4)


@pytest.mark.parametrize("precise", [False, True])
def test_a_secondary_axis_changes_no_bit_and_keeps_messages_inside_nodes(precise):
    more = [fds.precision(torch.bfloat16)] if precise else []
    for (state, sent, told, metrics), (want, flat, plain, losses) in zip(
        trained(True, *more), trained(False, *more), strict=True
    ):
        assert_same_bits((state, metrics), (want, losses))
        assert flat.keys() == {"node,local"} and sent.keys() == {"node,local", "local"}
        assert 0 < sent["node,local"] < flat["node,local"] / 2
        assert sent["node,local"] + sent["local"] <= told.sent["gather"] < plain.sent["gather"]
        assert told.num_bytes["secondary"] > 0 == plain.num_bytes.get("secondary", 0)
        assert "again over local (2)" in told.stations["topology"]


def test_what_a_message_of_weights_lost_is_lost_once():
    """What is gathered again is what was gathered, not that coded again."""
    ways = {"weights": transports.quantized(8, group=8)}
    for (state, sent, told, _), (want, *_) in zip(trained(True, **ways), trained(False, **ways), strict=True):
        assert_same_bits(state, want)
        assert sent["node,local"] + sent["local"] <= told.sent["gather"]


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        (lambda mesh: {"stage": 2, "secondary": mesh["local"]}, "stage=2"),
        (lambda mesh: {"stage": 3, "secondary": "local"}, "'local'"),
        (lambda mesh: {"stage": 3, "secondary": fds.mesh(a=4)["a"]}, "'a' and 'node,local'"),
    ],
)
def test_an_axis_that_cannot_be_secondary_is_refused(ways, said):
    def run():
        mesh = fds.mesh(node=2, local=2)
        with pytest.raises(ComposeError) as caught:
            fds.shard_optimizer(mesh["node", "local"], **ways(mesh))
        assert said in caught.value.got
        return True

    assert all(fds.simulate(run, 4))
