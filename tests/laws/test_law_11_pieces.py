"""Law 11 where an update visits pieces of slices: cuts at multiples of 64 elements change no bit."""

import itertools
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import fds
from fds import tree
from fds.errors import ComposeError
from tests.laws.mapped import Mapped, mapped
from tests.laws.test_law_11_residency import ALL, same_run
from tests.storage.topologies import Topology


class InPieces(Mapped):
    """Cut every slice at some multiples of 64 elements, and visit some pieces together."""

    seed, most = 0, 4

    def chunks(self, structure):
        draw = random.Random(self.seed)
        pieces = []
        for i, part in enumerate(structure.trained):
            numel = structure.shapes[part].numel()
            cuts = range(64, numel, 64)
            ends = [0, *sorted(draw.sample(cuts, min(len(cuts), draw.randint(0, 3)))), numel]
            pieces += [(i, a, b) for a, b in itertools.pairwise(ends)]
        ends = [0, *sorted(draw.randint(0, len(pieces)) for _ in range(3)), len(pieces)]
        return [pieces[a:b] for a, b in itertools.pairwise(ends)]


def loss(params, batch):
    hidden = torch.tanh(batch @ params["0.weight"] + params["0.bias"])
    return ((hidden @ params["1.weight"]) ** 2).mean() + (params["2.weight"] ** 2).sum()


def problem(seed, dtype):
    draw = torch.Generator().manual_seed(seed)
    sizes = {"0.weight": (7, 301), "0.bias": (301,), "1.weight": (301, 5), "2.weight": (1000, 3)}
    params = {name: torch.randn(*size, generator=draw).to(dtype) for name, size in sizes.items()}

    class Problem:
        batch = torch.randn(8, 7, generator=draw).to(dtype)

    Problem.params = params
    return Problem


DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples)
@given(
    st.sampled_from(sorted(ALL)),
    st.sampled_from([("opt",), ("opt", "params"), ("params",)]),
    DTYPES,
    st.integers(0, 99),
    st.booleans(),
    st.sampled_from([None, 1, 2]),
)
def test_pieces_change_no_bit(tmp_path, optimizer, kinds, dtype, seed, donated, stage):
    residency, found = InPieces(tmp_path, kinds), problem(seed, dtype)
    residency.seed = seed

    def body():
        parts = [fds.skip_nonfinite(), *[fds.donate()] * donated]
        shard = [] if stage is None else [Topology(2, stage, 1600).shard()]
        plain = fds.compose(*shard, *parts, ALL[optimizer]())(loss)
        placed = fds.compose(mapped(residency), *shard, *parts, ALL[optimizer]())(loss)
        batches = [found.batch, found.batch * torch.inf, found.batch]
        same_run(plain, placed, found, batches, donated=donated)

    body() if stage is None else fds.simulate(body, 2)


FUSED = {
    "adamw": fds.adamw(0.01),
    "sgd": fds.sgd(0.1, momentum=0.9),
    "adagrad": fds.adagrad(0.1),
    "lion": fds.lion(0.1),
}


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_threads_of_a_kernel_share_a_piece_as_they_share_a_slice(tmp_path, name, dtype):
    params = {"w": torch.randn(300_007).to(dtype)}
    square = lambda params, batch: (params["w"].float() * batch).square().sum()

    class Problem:
        batch = torch.randn(300_007)

    Problem.params, residency = params, Mapped(tmp_path)
    residency.chunks = lambda structure: [[(0, 0, 64)], [(0, 64, 200_000), (0, 200_000, 300_007)]]
    plain = fds.compose(FUSED[name])(square)
    same_run(plain, fds.compose(mapped(residency), FUSED[name])(square), Problem, [Problem.batch] * 3)
    assert torch.get_num_threads() > 0 and len(residency.made) == 4 * len(tree.leaves(plain.init(params).opt))


MISCUT = {
    "between vectors": [[(0, 0, 100), (0, 100, 301)]],
    "a hole": [[(0, 0, 64), (0, 128, 301)]],
    "the last first": [[(0, 64, 301), (0, 0, 64)]],
    "beyond the end": [[(0, 0, 320)]],
    "nothing": [[(0, 0, 64), (0, 64, 64), (0, 64, 301)]],
    "before the first": [[-1]],
    "two numbers": [[(0, 301)]],
    "not whole numbers": [[(0, 0, 301.0)]],
}


@pytest.mark.parametrize("chunks", MISCUT.values(), ids=MISCUT)
def test_pieces_that_are_cut_wrong_are_refused(tmp_path, chunks):
    residency = Mapped(tmp_path)
    residency.chunks = lambda structure: chunks
    step = fds.compose(mapped(residency), fds.adamw(0.01))(lambda params, batch: params["w"].sum())
    with pytest.raises(ComposeError, match="what fills a station did not return") as caught:
        step.init({"w": torch.randn(301)})
    assert "chunks of Mapped" in caught.value.where and "multiples of 64" in caught.value.want
