"""Weights on gloo processes: a consumer that goes, in any way, leaves no other rank waiting."""

import pytest
import torch

import fds
from tests import ranks

WAYS = ("takes all", "never begins", "lets go of it", "breaks", "raises", "keeps it")


def consume(stage, how):
    """Consume as told on the second of two ranks, and train on; return what the first one got, and two losses."""
    generator = torch.Generator().manual_seed(0)
    params = {f"{i}.weight": torch.randn(40, 50, generator=generator) for i in range(6)}
    axis = fds.mesh(dp=-1)["dp"]
    step = fds.compose(fds.shard_optimizer(axis, stage=stage, bucket_bytes=20_000), fds.sgd(0.1))(
        lambda p, x: sum((x @ w).square().mean() for w in p.values())
    )
    state, got, kept = step.init(params), {}, []
    for num_bytes in (2**20, 10_000):
        if axis.index == 0 or how == "takes all":
            got |= dict(step.weights(state, bucket_bytes=num_bytes))
            continue
        weights = step.weights(state, bucket_bytes=num_bytes)
        if how == "never begins":
            weights.close()
        elif how in ("breaks", "raises"):
            try:
                for _ in weights:
                    if how == "breaks":
                        break
                    raise KeyError("a consumer")
            except KeyError as error:
                kept.append(error)  # as a log does
        elif how == "keeps it":
            kept.append((weights, next(weights)))
        del weights
    same = all(torch.equal(got[name], params[name]) for name in got)
    losses = [float(step(state, torch.ones(2, 40))[1]["loss"]) for _ in range(2)]
    return len(got), same, losses


@pytest.mark.parametrize("stage", [1, 3])
def test_a_consumer_that_goes_leaves_no_process_waiting(stage):
    everything = ranks.run(consume, stage, "takes all")
    assert [n for n, *_ in everything] == [6, 6]
    for how in WAYS[1:]:
        (first, same, losses), (other, _, others) = ranks.run(consume, stage, how)
        assert (first, same, other) == (6, True, 0) and losses == others == everything[0][2]
