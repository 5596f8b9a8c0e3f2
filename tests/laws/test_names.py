"""Everything in a state is found by its name: the order of a dict's entries, which a user may change, says nothing."""

from __future__ import annotations

import attrs
import pytest
import torch
from torch import nn

import fds
from fds import plans, tree
from tests.bits import assert_same_bits


def turned(x):
    """Return a tree with the entries of all its dicts in the opposite order."""
    return {k: turned(v) for k, v in reversed(x.items())} if isinstance(x, dict) else x


LAYERS = fds.Layers(
    [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)], lambda out, y: (out - y).square().mean()
)
EXTRAS = {
    "plain": [],
    "accumulated": [fds.accumulate(2)],
    "donated": [fds.donate()],
    "low": [fds.precision()],
    "skipping": [fds.loss_scale(2.0**4)],
    "frozen": [fds.freeze("0.bias")],
    "staged": [fds.pipeline(plans.gpipe, 2, num_microbatches=2)],
    "stage 0": "ranks",
}
OPTIMIZERS = [fds.adamw(0.1), fds.by_name({"*.bias": fds.sgd(0.1, momentum=0.9), "*": fds.lamb(0.2)})]


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "by_name"])
def test_a_state_whose_dicts_come_in_another_order_is_the_same_state(extra, optimizer):
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.ones(8, 2)

    def steps():
        more = [fds.shard_optimizer(fds.mesh(dp=-1)["dp"], stage=0)] if extra == "ranks" else extra
        step = fds.compose(*more, fds.ema(0.5), fds.ema(0.9, name="slow"), fds.clip_by_value(0.1), optimizer)(LAYERS)
        state, _ = step(step.init(LAYERS.init, key=0), rows)
        found = []
        for part in (None, "params", "opt", "buffers", "slots"):
            copy = tree.map(torch.clone, state)
            copy = copy if part is None else attrs.evolve(copy, **{part: turned(getattr(copy, part))})
            found.append((step.evaluate(copy, rows), tree.paths(step(copy, rows)[0])))
        return found

    for (seen, want), *others in fds.simulate(steps, 2) if extra == "ranks" else [steps()]:
        for also, got in others:
            assert_same_bits(also, seen)
            assert set(want) == set(got)
            for name, x in want.items():
                assert_same_bits(x, got[name])
