"""Blocks whose activations are parts of sequences, named by patterns."""

import pytest
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fds
from tests.transforms.tensor_parallel.models import check


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 10), nn.Linear(10, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_a_pattern_that_matches_what_is_in_blocks_too_names_the_blocks():
    check(Model, {"*.up": "column", "*.down": "row", "blocks.*": "sequence"}, sequence=True, shape=(2, 7, 8))


def test_it_is_shown_which_block_begins_and_which_ends():
    def described():
        apply, _, _ = fds.functional(Model())
        plan = {"*.up": "column", "*.down": "row", "blocks.*": "sequence"}
        transform = fds.tensor_parallel(fds.mesh(tp=2)["tp"], plan, sequence=True)
        return fds.compose(transform, fds.sgd(0.1))(lambda params, x: apply(params, x).mean()).describe()

    text = str(fds.simulate(described, 2)[0])
    assert "sequence(leaves=False)" in text
    assert "sequence(enters=False)" in text
    assert "3 x blocks.*.up: column" in text


class Recomputing(Model):
    """What enters the first block is whole, and what cuts it is not in the graph."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        x = checkpoint(self.blocks[0], self.norm(x), use_reentrant=True)
        for block in self.blocks[1:]:
            x = block(x)
        return x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch says it of an evaluation
def test_a_block_behind_a_reentrant_checkpoint():
    check(Recomputing, {"*.up": "column", "*.down": "row", "blocks.*": "sequence"}, sequence=True)
