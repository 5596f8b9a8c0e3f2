"""What was trained by DeepSpeed for tests/golden, and is trained on by fds: modules, their data and their optimizer.

Neither fds nor DeepSpeed is imported here. Sizes are odd, so that partitions have padding and cut through parameters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, INPUTS, WIDTH, OUTPUTS = 12, 6, 5, 3
LR, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.9, 0.99), 1e-8, 0.1
STEPS_BEFORE, STEPS_AFTER = 3, 3


class Net(nn.Module):
    """Two layers that share a weight, one that is frozen, and buffers beside them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(INPUTS, WIDTH)
        self.still = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.middle = nn.Linear(WIDTH, WIDTH, bias=False)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.middle.weight
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("seen", torch.tensor(7))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = self.middle(x + torch.tanh(self.still(x))) * self.scale.to(x.dtype)
        return self.head(self.again(torch.tanh(x)))


class Scaled(nn.Module):
    """A layer of a pipeline with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale.to(x.dtype) + self.shift)


def turned(module: nn.Linear, x: Tensor) -> Tensor:
    """Use a tied layer the other way round."""
    return F.linear(x, module.weight.t())


def layers(spec: type, tied: type | None) -> list:
    """Return the layers of the pipeline, given the classes of specifications; without `tied`, none shares."""
    middle = spec if tied is None else lambda *layer, **forward: tied("both", *layer, **forward)
    turn = {} if tied is None else {"forward_fn": turned}
    return [
        spec(nn.Linear, INPUTS, WIDTH),
        middle(nn.Linear, WIDTH, WIDTH, bias=False),
        spec(Scaled),
        torch.tanh,
        middle(nn.Linear, WIDTH, WIDTH, bias=False, **turn),
        spec(nn.Linear, WIDTH, OUTPUTS),
    ]


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error."""
    return F.mse_loss(outputs.float(), targets.float())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the rows of all ranks at a step, counted from 0."""
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(ROWS, INPUTS, generator=generator)
    return x, torch.randn(ROWS, OUTPUTS, generator=generator)
