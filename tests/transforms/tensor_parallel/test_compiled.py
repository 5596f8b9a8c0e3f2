"""fds.compile beside tensor_parallel: what is compiled is what runs, and what would draw otherwise is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fds
from fds.errors import ComposeError, LossError
from tests.transforms.tensor_parallel.models import EPS, check, steps

pytestmark = [  # of torch's own, while it traces
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def check_compiled(make, plan, *parts, **options):
    """Assert that ranks that compile compute what one does that does not."""
    want, compiled = steps(make, plan, *parts, **options), fds.compile(backend="aot_eager")
    for found in fds.simulate(lambda: steps(make, plan, compiled, *parts, size=2, **options), 2):
        for name, x in want.items():
            assert torch.allclose(found[name], x, rtol=EPS, atol=EPS), name


class Block(nn.Module):
    def __init__(self, part: nn.Module):
        super().__init__()
        self.norm, self.part, self.drop = nn.LayerNorm(8), part, nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.part(self.norm(x)))


class Blocks(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        attention = fds.nn.SelfAttention(8, 4, dropout=dropout, theta=1e4)
        self.blocks = nn.ModuleList([Block(attention), Block(fds.nn.MLP(8, 16, activation="swiglu", dropout=0.3))])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.dropout(self.up(x), 0.3, self.training))


def test_compiled_pieces_compute_and_drop_what_one_rank_does():
    check_compiled(Blocks, {"blocks.*.norm": "replicated"})


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_several_columns_of_one_activation_are_compiled():
    """As the gates, and the queries, keys and values, of Llama."""
    check_compiled(Gated, {"gate": "column", "up": "column", "down": "row"})


def test_compiled_parts_of_sequences_are_recomputed():
    check_compiled(Blocks, {"blocks.[01]": "sequence"}, fds.checkpoint_activations(), sequence=True)


@pytest.mark.parametrize(
    ("make", "plan"), [(lambda: Blocks(0.3), {"*.norm": "replicated"}), (Functional, {"up": "column", "down": "row"})]
)
def test_functions_that_draw_are_not_compiled(make, plan):
    def job():
        with pytest.raises(LossError, match="compiled functions draw for a piece"):
            steps(make, plan, fds.compile(backend="aot_eager"), size=2)

    fds.simulate(job, 2)


@pytest.mark.parametrize("says", ["sequence", "replicated", "row"])
def test_a_plan_does_not_leave_attention_of_ours_half_divided(says):
    def job():
        with pytest.raises(ComposeError, match=r"attention of fds\.nn|cannot be divided"):
            steps(Blocks, {"blocks.0.part": says}, size=2, sequence=True)

    fds.simulate(job, 2)


def test_attention_of_ours_may_be_whole():
    check(Blocks, {"blocks.0.part*": "replicated"})


def test_other_ranks_are_not_in_one_graph():
    def job():
        with pytest.raises(ComposeError, match="cannot be one graph"):
            steps(Blocks, {"*.norm": "replicated"}, fds.compile(backend="eager", whole=True), size=2)

    fds.simulate(job, 2)
