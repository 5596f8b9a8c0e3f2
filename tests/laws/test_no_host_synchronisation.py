"""No step asks the device for a value: the whole program runs on `meta` tensors, which have none to give."""

import attrs
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fds
from tests.laws.noting import noting
from tests.laws.problems import OPTIMIZERS

SCHEDULED = {
    "schedules": lambda: fds.adamw(
        fds.schedules.warmup_cosine(1e-3, warmup_steps=2, total_steps=9),
        betas=(fds.schedules.one_cycle_momentum(first_steps=3), 0.99),
    ),
    "tokens": lambda: fds.adamw(
        fds.schedules.by_tokens(lambda t: 1e-3 / (t + 1), fds.schedules.fixed_linear(2, 8, 9), 8)
    ),
    "muon": lambda: fds.by_name({"*.bias": fds.adamw(), "1.*": fds.lion(), "*": fds.muon()}),
}


class FusedOnMeta(TorchDispatchMode):
    """Let torch's fused optimizer kernels, which have no meta version, do nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__.startswith("_fused_"):
            assert not any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in [*args, *kwargs.values()])
            return None
        return func(*args, **(kwargs or {}))


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(OPTIMIZERS | SCHEDULED))
@pytest.mark.parametrize("donated", [False, True])
def test_a_step_never_waits_for_the_device(name, donated):
    def loss(out, targets):
        return fds.Mean(((out - targets) ** 2).sum(), (targets != 0).sum()), {"big": out.max(), "rows": len(out)}

    layers = fds.Layers([nn.Linear(5, 6), nn.LayerNorm(6), nn.Dropout(0.1), nn.Linear(6, 3)], loss)
    step = fds.compose(
        fds.accumulate(2),
        fds.precision(keep_float32="1.*"),
        fds.loss_scale(),
        fds.clip_by_global_norm(1.0),
        fds.clip_by_value(1.0),
        fds.ema(0.9),
        fds.checkpoint_activations(),
        noting(width=5),
        *[fds.donate()] * donated,
        (OPTIMIZERS | SCHEDULED)[name](),
    )(layers)
    state = attrs.evolve(step.structure(layers.init), calls=torch.zeros((), dtype=torch.int64), key=fds.random.key(0))
    batch = (torch.empty(8, 5, device="meta"), torch.empty(8, 3, device="meta"))
    with FusedOnMeta():
        state, metrics = step(state, batch)
        state, metrics = step(state, batch)
    assert {m.device.type for m in metrics.values()} == {"meta"}
    assert all(m.dim() == 0 for m in metrics.values())
    assert int(state.calls) == 2
