"""Modules without their parameters: what a factory builds, on `meta`, with the values of all else that it holds."""

from typing import Any

import pytest
import torch
from torch import nn

import fds
from fds import random
from fds.loss import on_meta
from fds.loss.recorder import record
from tests.memory import peak_bytes


class Holding(nn.Module):
    """Tied weights, a buffer under two names, a table that is drawn, and a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        if torch.empty(0).device != torch.device("meta"):  # as transformers asks
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("angles", torch.arange(4.0) / 10)
        self.register_buffer("again", self.get_buffer("angles"), persistent=False)
        self.register_buffer("table", torch.randn(3))
        self.scale = torch.full((), 2.0)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_module_on_meta_has_its_buffers_and_no_parameter(recorded):
    def factory():
        module: Any = Holding()
        if not recorded:
            module.table.numpy()
        return module

    assert (record(factory, random.key(0)) is not None) == recorded
    module: Any = on_meta(factory)
    again: Any = on_meta(factory)
    assert all(p.is_meta for p in module.parameters()) and module.head.weight is module.embed.weight
    assert {n: (p.shape, p.requires_grad) for n, p in module.named_parameters()} == {
        "embed.weight": ((5, 3), True),
        "head.bias": ((5,), False),
    }
    assert module.again is module.angles and torch.equal(module.angles, torch.arange(4.0) / 10)
    assert module.scale == 2 and torch.equal(module.table, again.table) and module.table.std() > 0
    _, params, _ = fds.functional(module)
    assert all(x.is_meta for x in params.values())


def test_no_parameter_of_a_module_on_meta_is_ever_in_memory():
    width = 512
    assert peak_bytes(lambda: on_meta(lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(4))))) < width**2
