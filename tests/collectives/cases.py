"""What each collective is, written down for all ranks at once, and random inputs for it."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import hypothesis.strategies as st
import torch
from torch import Tensor

from fds import collectives as c

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def in_rank_order(xs: list[Tensor]) -> Tensor:
    """Sum left to right; 16-bit numbers in float32, rounded once."""
    low = xs[0].dtype in (torch.bfloat16, torch.float16)
    total = xs[0].float() if low else xs[0].clone()
    for x in xs[1:]:
        total = total + x
    return total.to(xs[0].dtype)


def transposed(xs: list[Tensor], split_dim: int, concat_dim: int) -> list[Tensor]:
    pieces = [x.chunk(len(xs), split_dim) for x in xs]
    return [torch.cat([row[i] for row in pieces], concat_dim) for i in range(len(xs))]


@attrs.frozen
class Case:
    """A collective as a function, its definition, and the shapes it takes."""

    function: Callable[..., Tensor]  # (x, axis, *arguments)
    definition: Callable[..., list[Tensor]]  # (all xs, *arguments) -> all results
    divided: bool = False  # the dim named first must divide
    dims: int = 0  # arguments that are dims
    source: bool = False  # an argument is a coordinate


CASES = {
    "all_gather": Case(c.all_gather, lambda xs, dim: [torch.cat(xs, dim)] * len(xs), dims=1),
    "reduce_scatter": Case(
        c.reduce_scatter, lambda xs, dim: list(in_rank_order(xs).chunk(len(xs), dim)), divided=True, dims=1
    ),
    "all_reduce": Case(c.all_reduce, lambda xs: [in_rank_order(xs)] * len(xs)),
    "all_to_all": Case(c.all_to_all, transposed, divided=True, dims=2),
    "broadcast": Case(c.broadcast, lambda xs, source: [xs[source]] * len(xs), source=True),
}


@attrs.frozen
class Example:
    """One call of a case on some ranks."""

    name: str
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    arguments: tuple[int, ...]
    seed: int

    def inputs(self, integers: bool = False) -> list[Tensor]:
        return random_tensors([self.shape] * self.size, self.dtype, self.seed, integers)

    def __call__(self, x: Tensor) -> Tensor:
        """Call the function on the rank that runs."""
        return CASES[self.name].function(x, axis(), *self.arguments)


def random_tensors(shapes: list, dtype: torch.dtype, seed: int, integers: bool = False) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    if integers or not dtype.is_floating_point:
        return [torch.randint(-8, 9, shape, generator=g).to(dtype) for shape in shapes]
    return [(torch.randn(shape, generator=g, dtype=torch.float64) * 3).to(dtype) for shape in shapes]


def axis() -> c.Axis:
    """Return the axis of all ranks that run."""
    return c.mesh(dp=-1)["dp"]


@st.composite
def examples(draw, dtypes=tuple(DTYPES)):
    """Generate calls: every collective, shapes with zeros and odd numbers, any dims, one to five ranks."""
    name, size = draw(st.sampled_from(list(CASES))), draw(st.integers(1, 5))
    case = CASES[name]
    shape = draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    arguments = tuple(draw(st.integers(-len(shape), len(shape) - 1)) for _ in range(case.dims))
    if case.divided:
        shape[arguments[0]] *= size
    if case.source:
        arguments += (draw(st.integers(0, size - 1)),)
    return Example(name, size, tuple(shape), draw(st.sampled_from(dtypes)), arguments, draw(st.integers(0, 2**32)))
