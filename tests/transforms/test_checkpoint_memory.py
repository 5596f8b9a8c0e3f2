"""What checkpointing saves, measured by the allocator's own events."""

import pytest
import torch
from torch import nn

import fds
from fds.errors import LossError
from fds.loss import LayerCall
from tests.memory import peak_bytes

LAYERS, ROWS, WIDTH = 12, 2048, 64
ACTIVATION = ROWS * WIDTH * 4


class Wide(nn.Module):
    """Keeps eight activations of its own for backward."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def measure(*transforms) -> int:
    layers = fds.Layers([fds.LayerSpec(Wide) for _ in range(LAYERS)], nn.MSELoss())
    step = fds.compose(*transforms, fds.sgd(0.1), fds.donate())(layers)
    state = step.init(layers.init)
    batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    state, _ = step(state, batch)
    return peak_bytes(lambda: step(state, batch))


def test_one_input_a_group_is_kept():
    plain = measure()
    each = measure(fds.checkpoint_activations())
    pairs = measure(fds.checkpoint_activations(every=2))
    kept = LAYERS * (1 + 4) * ACTIVATION  # of each layer its output and the tanh's
    assert plain >= kept
    assert each <= plain - (LAYERS - 2) * 4 * ACTIVATION  # all tanh results but those of one layer, twice in backward
    assert pairs <= plain - (LAYERS - 4) * 4 * ACTIVATION
    assert pairs - 2 * (1 + 4) * ACTIVATION <= each  # one more layer is recomputed, half the inputs are kept


def test_a_policy_keeps_what_it_names():
    everything, matmuls, nothing = (
        measure(),
        measure(fds.checkpoint_activations(policy="matmuls")),
        measure(fds.checkpoint_activations()),
    )
    assert nothing < matmuls < everything + LAYERS * 4 * ACTIVATION


def test_accumulation_divides_the_activations():
    whole, quarter = measure(), measure(fds.accumulate(4))
    grads = LAYERS * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH) * 4
    assert quarter <= whole / 4 + 2 * grads


def test_a_group_has_as_many_layers_as_was_said():
    step = fds.compose(fds.checkpoint_activations(every=2), fds.sgd(0.1))(lambda params, batch: params["w"].sum())
    (recompute,) = step.layer
    groups = recompute([LayerCall(torch.tanh, (i,)) for i in range(5)], None)
    assert [group.layers for group in groups] == [(0, 1), (2, 3), (4,)]
    groups = recompute([LayerCall(torch.tanh, (i,), in_place=i == 2) for i in range(5)], None)
    assert [group.layers for group in groups] == [(0, 1, 2), (3, 4)], "one in place joins those before it"


def test_a_layer_that_writes_over_what_it_would_be_computed_from_again_is_refused():
    layers = fds.Layers([nn.Linear(3, 3), lambda x: x.mul_(2), nn.Linear(3, 1)], nn.MSELoss())
    step = fds.compose(fds.checkpoint_activations(), fds.sgd(0.1))(layers)
    with pytest.raises(LossError, match="writes over its input"):
        step(step.init(layers.init), (torch.ones(2, 3), torch.ones(2, 1)))
