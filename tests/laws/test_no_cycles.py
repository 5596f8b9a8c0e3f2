"""A step frees what it made without the garbage collector: no reference cycle holds a tensor."""

import gc
import warnings

import pytest
import torch
from torch import nn

import fds
from tests.collector import uncollected

TRANSFORMS = {
    "plain": (),
    "accumulate": (fds.accumulate(2),),
    "precision": (fds.precision(),),
    "checkpoint": (fds.checkpoint_activations(policy="matmuls"),),
    "scale": (fds.loss_scale(), fds.clip_by_global_norm(1.0), fds.ema(0.9)),
}


def live_tensors() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.distributed.reduce_op warns when it is looked at
        return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("name", TRANSFORMS)
def test_no_tensor_waits_for_the_garbage_collector(name):
    layers = fds.Layers([nn.Linear(5, 6), nn.LayerNorm(6), nn.Dropout(0.1), nn.Linear(6, 3)], nn.MSELoss())
    step = fds.compose(*TRANSFORMS[name], fds.adamw())(layers)
    state, batch = step.init(layers.init), (torch.randn(8, 5), torch.randn(8, 3))
    for _ in range(2):
        state, _ = step(state, batch)
    with uncollected():
        before = live_tensors()
        for _ in range(5):
            state, _ = step(state, batch)
        assert live_tensors() == before
