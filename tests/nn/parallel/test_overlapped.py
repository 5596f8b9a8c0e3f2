"""Products beside their messages are the products and the messages one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fds import collectives as c
from fds.collectives.functional import copy_in, sum_out
from fds.errors import FdsError
from fds.nn.parallel.overlapped import copied_linear, gathered_linear, linear_scattered, linear_summed
from tests import ranks
from tests.bits import assert_rounding, assert_same_bits
from tests.kernels.ways import WAYS, as_handle, kept_bytes, traced

FLOATING = [torch.float64, torch.float32, torch.bfloat16]
MANY = 3  # weights of those that take several
IN = 5


@attrs.frozen
class Case:
    """One of the functions, beside what it is without overlap, both of (x, weights, biases, axis, dim, chunks)."""

    overlapped: Callable[..., Sequence[Tensor]]
    plain: Callable[..., Sequence[Tensor]]
    most: int = 1  # weights
    scattered: bool = False  # the dim must divide


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))


CASES = {
    "copied": Case(
        lambda x, ws, bs, axis, dim, chunks: copied_linear(x, ws, bs, axis),
        lambda x, ws, bs, axis, dim: linears(copy_in(x, axis), ws, bs),
        most=MANY,
    ),
    "summed": Case(
        lambda x, ws, bs, axis, dim, chunks: (linear_summed(x, ws[0], axis, chunks),),
        lambda x, ws, bs, axis, dim: (sum_out(F.linear(x, ws[0]), axis),),
    ),
    "gathered": Case(
        lambda x, ws, bs, axis, dim, chunks: gathered_linear(x, ws, bs, axis, dim=dim, chunks=chunks),
        lambda x, ws, bs, axis, dim: linears(c.all_gather(x, axis, dim), ws, bs),
        most=MANY,
    ),
    "scattered": Case(
        lambda x, ws, bs, axis, dim, chunks: (linear_scattered(x, ws[0], axis, dim=dim, chunks=chunks),),
        lambda x, ws, bs, axis, dim: (c.reduce_scatter(F.linear(x, ws[0]), axis, dim),),
        scattered=True,
    ),
}
EVERY = pytest.mark.parametrize("name", CASES)


@attrs.frozen
class Example:
    """One call on some ranks: this rank's numbers are drawn from its coordinate."""

    name: str
    size: int = 2
    part: tuple[int, ...] = (2, 7)  # the leading dims of a part
    dim: int = 1
    chunks: int = 1
    dtype: torch.dtype = torch.float64
    count: int = 1  # weights
    integers: bool = False
    frozen: str = ""  # of "x", "w" and "b": what needs no gradient

    @property
    def case(self) -> Case:
        return CASES[self.name]

    def arguments(self, axis: c.Axis) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        g = torch.Generator().manual_seed(axis.index)

        def draw(*shape: int) -> Tensor:
            if self.integers:
                return torch.randint(-8, 9, shape, generator=g).to(self.dtype)
            return torch.randn(shape, generator=g, dtype=torch.float64).to(self.dtype)

        shape = [*self.part, IN]
        shape[self.dim] *= axis.size if self.case.scattered else 1
        biased = self.name in ("copied", "gathered")
        weights = [draw(3 + i, IN) for i in range(self.count)]
        biases = [draw(len(w)) if biased and i != 1 else None for i, w in enumerate(weights)]
        return draw(*shape), weights, biases

    def leaves(self, axis: c.Axis) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        x, weights, biases = self.arguments(axis)
        for kind, tensors in (("x", [x]), ("w", weights), ("b", biases)):
            for t in tensors:
                if t is not None:
                    t.requires_grad_(kind not in self.frozen)
        return x, weights, biases

    def outputs(self, axis: c.Axis, x: Tensor, ws: Any, bs: Any, overlapped: bool) -> Sequence[Tensor]:
        if overlapped:
            return self.case.overlapped(x, ws, bs, axis, self.dim, self.chunks)
        return self.case.plain(x, ws, bs, axis, self.dim)

    def run(self, overlapped: bool) -> dict[str, Any]:
        """Return outputs and all gradients on this rank, where the outputs' are drawn, too."""
        axis = c.mesh(tp=-1)["tp"]
        x, ws, bs = self.leaves(axis)
        ys = self.outputs(axis, x, ws, bs, overlapped)
        g = torch.Generator().manual_seed(7)  # of a sum that all have, alike; of pieces, any
        dys = [torch.randint(-8, 9, y.shape, generator=g).to(y.dtype) for y in ys]
        if not self.integers:
            dys = [dy * 0.3 for dy in dys]
        pairs = [(y, dy) for y, dy in zip(ys, dys, strict=True) if y.requires_grad]
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
        leaves = {"x": [x], "w": ws, "b": [b for b in bs if b is not None]}
        grads = {f"{kind}[{i}]": t.grad for kind, ts in leaves.items() for i, t in enumerate(ts) if t.grad is not None}
        return {"y": [y.detach() for y in ys], **grads}

    def both(self) -> tuple[list, list]:
        """Return what all ranks get with overlap, and without."""
        return c.simulate(lambda: self.run(True), self.size), c.simulate(lambda: self.run(False), self.size)


LEADING = [((2, 7), 1), ((7,), 0), ((2, 3, 2), -3), ((0, 3), 1), ((2, 0), 1)]


@EVERY
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_products_in_one_piece_have_the_same_bits(name, dtype, size):
    for part, dim in LEADING:
        assert_same_bits(*Example(name, size, part, dim, dtype=dtype).both())


@EVERY
@pytest.mark.parametrize("chunks", [1, 3, 100])
def test_every_product_and_sum_is_there_once(name, chunks):
    """Sums of small integers are exact in any order."""
    for size in (2, 3):
        for part, dim in LEADING:
            count = CASES[name].most
            assert_same_bits(*Example(name, size, part, dim, chunks, count=count, integers=True).both())


@EVERY
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_products_in_pieces_agree_to_rounding(name, dtype):
    """A product adds up at most 8 weights' 5 terms of some 4 x 4, and ranks three of them."""
    got, want = Example(name, 3, (2, 33), 1, chunks=4, dtype=dtype, count=CASES[name].most).both()
    parameters = lambda results: [{k: v for k, v in result.items() if k[0] in "wb"} for result in results]
    assert_same_bits(parameters(got), parameters(want))
    assert_rounding(got, want, additions=3 * MANY * 8, scale=16.0)


@EVERY
@pytest.mark.parametrize("chunks", [1, 3])
def test_every_way_to_take_gradients_gives_the_same_bits(name, chunks):
    example = Example(name, chunks=chunks, count=CASES[name].most)

    def gradients(way: Callable) -> Sequence[Tensor]:
        axis = c.mesh(tp=-1)["tp"]
        x, ws, bs = example.leaves(axis)
        given = [x, *ws, *(b for b in bs if b is not None)]

        def loss(x: Tensor, *parameters: Tensor) -> Tensor:
            biases = iter(parameters[len(ws) :])
            ys = example.outputs(
                axis, x * 2, parameters[: len(ws)], [b if b is None else next(biases) for b in bs], True
            )
            return sum((y.square().sum() for y in ys), start=torch.zeros(()))

        return way(loss, given)

    ways = [way for way_name, way in WAYS.items() if way_name != "compiled"]
    first, *others = [c.simulate(lambda way=way: list(gradients(way)), 2) for way in ways]
    for other in others:
        assert_same_bits(other, first)


@EVERY
@pytest.mark.parametrize("frozen", ["x", "w", "b", "wb", "xw", "xb"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_what_is_frozen_gets_no_gradient_and_the_others_theirs(name, frozen, chunks):
    got, want = Example(name, chunks=chunks, count=CASES[name].most, integers=True, frozen=frozen).both()
    assert_same_bits(got, want)


class Events(TorchDispatchMode):
    """What happens in order: products, collectives started and waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.seen.append("x")
        return func(*args, **(kwargs or {}))


@attrs.frozen
class Waited:
    """A collective that notes when it is waited for."""

    work: c.Work
    number: int
    events: Events

    def wait(self) -> None:
        self.events.seen.append(f"-{self.number}")
        self.work.wait()


@attrs.define
class Watched:
    """A link that notes when a collective is started."""

    link: Any
    events: Events
    count: int = 0

    def start(self, *args: Any) -> Waited:
        self.count += 1
        self.events.seen.append(f"+{self.count}")
        return Waited(self.link.start(*args), self.count, self.events)


@pytest.mark.parametrize(
    ("name", "frozen", "forward", "backward"),
    [
        # +1: the first collective is started; -1: it is waited for; x: a product
        ("copied", "", "x", "x +1 x -1"),
        ("copied", "w", "x", "x +1 -1"),
        ("copied", "x", "x", "x"),
        ("summed", "", "x +1 x +2 x +3 -1 -2 -3", "x x"),
        ("gathered", "", "+1 +2 +3 x -1 x -2 x -3 x", "+4 x +5 -4 x -5"),
        ("gathered", "w", "+1 +2 +3 x -1 x -2 x -3 x", "x x +4 x x +5 x x +6 -4 -5 -6"),
        ("gathered", "x", "+1 +2 +3 x -1 x -2 x -3 x", "+4 -4 x"),
        ("scattered", "", "x x +1 x x +2 x x +3 -1 -2 -3", "+4 +5 +6 x -4 x -5 x -6 x x"),
        ("scattered", "w", "x x +1 x x +2 x x +3 -1 -2 -3", "+4 +5 +6 x -4 x -5 x -6 x"),
        ("scattered", "x", "x x +1 x x +2 x x +3 -1 -2 -3", "+4 -4 x"),
    ],
)
def test_messages_travel_beside_products(name, frozen, forward, backward):
    example = Example(name, part=(1, 6), chunks=3, frozen=frozen + "b")

    def order() -> list[str]:
        axis, events = c.mesh(tp=-1)["tp"], Events()
        axis = attrs.evolve(axis, link=Watched(axis._link, events))
        x, ws, bs = example.leaves(axis)
        with events:
            (y,) = example.outputs(axis, x, ws, bs, True)
            events.seen.append("|")
            y.backward(torch.ones_like(y))
        return " ".join(events.seen)

    assert c.simulate(order, 2) == [f"{forward} | {backward}"] * 2


@EVERY
def test_autocast_casts_all_before_it_travels(name):
    """As of arguments that were cast, and gradients of 32 bits of these."""
    example = Example(name, chunks=3, dtype=torch.float32, count=CASES[name].most)

    def run(cast: bool) -> list[Tensor]:
        axis = c.mesh(tp=-1)["tp"]
        x, ws, bs = example.leaves(axis)
        low = lambda t: t if t is None or cast else t.to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            ys = example.outputs(axis, low(x), [low(w) for w in ws], [low(b) for b in bs], True)
        torch.autograd.backward(ys, [torch.full_like(y, 0.3) for y in ys])
        return [*(y.detach() for y in ys), *(t.grad for t in (x, *ws) if t.grad is not None)]

    got, want = (c.simulate(lambda cast=cast: run(cast), 2) for cast in (True, False))
    assert got[0][0].dtype == torch.bfloat16
    assert got[0][-1].dtype == torch.float32
    assert_same_bits(got, want)


@EVERY
def test_backward_is_of_first_order(name):
    example = Example(name)

    def twice() -> None:
        axis = c.mesh(tp=-1)["tp"]
        x, ws, bs = example.leaves(axis)
        (y,) = example.outputs(axis, x, ws, bs, True)
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with pytest.raises(FdsError, match="no second derivative"):
            g.sum().backward()

    c.simulate(twice, 2)


@EVERY
def test_weights_may_be_handles(name):
    example = Example(name, chunks=2, count=CASES[name].most)

    def run(held: bool) -> list[Tensor]:
        axis = c.mesh(tp=-1)["tp"]
        x, ws, bs = example.leaves(axis)
        ws = [as_handle(w) for w in ws] if held else ws
        ys = example.outputs(axis, x, ws, bs, True)
        return [*ys, *torch.autograd.grad(sum(y.square().sum() for y in ys), [x, *ws])]

    assert_same_bits(c.simulate(lambda: run(True), 2), c.simulate(lambda: run(False), 2))


@traced
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch asks for it behind a break
def test_compiled_code_breaks_around_them():
    torch.compiler.reset()

    def gradients() -> tuple[list[Tensor], list[Tensor]]:
        axis = c.mesh(tp=-1)["tp"]
        x, (w,), _ = Example("gathered").leaves(axis)
        back = w.detach().t().clone().requires_grad_()

        def loss(x: Tensor) -> Tensor:
            (h,) = gathered_linear(x.cos(), [w], [None], axis, dim=1, chunks=2)
            y = linear_scattered(h.sin(), back, axis, dim=1, chunks=2)
            (h,) = copied_linear(y, [w], [None], axis)
            return linear_summed(h.sin(), back, axis, 2).square().sum()

        ways = (loss, torch.compile(loss, backend="aot_eager"))
        return tuple(list(torch.autograd.grad(way(x), [x, w, back])) for way in ways)  # type: ignore

    for plain, compiled in c.simulate(gradients, 2):
        assert_same_bits(compiled, plain)


def test_only_the_part_is_kept_and_only_for_gradients_of_weights():
    def kept() -> list[int]:
        axis = c.mesh(tp=-1)["tp"]
        found = []
        for frozen in ("", "w"):
            example = Example("gathered", chunks=2, count=MANY, frozen=frozen)
            x, ws, bs = example.leaves(axis)
            found.append(kept_bytes(lambda: example.outputs(axis, x, ws, bs, True)) - sum(w.nbytes for w in ws))  # noqa: B023
        return [*found, x.nbytes]

    with_weights, without, part = c.simulate(kept, 2)[0]
    assert (with_weights, without) == (part, 0)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda a: copied_linear(torch.ones(2, 5), [], [], a), "not a bias"),
        (lambda a: copied_linear(torch.ones(2, 5), [torch.ones(3, 5)], [], a), "not a bias"),
        (lambda a: copied_linear(torch.ones(2, 4), [torch.ones(3, 5)], [None], a), "do not fit"),
        (lambda a: copied_linear(torch.ones(2, 5), [torch.ones(5)], [None], a), "do not fit"),
        (lambda a: copied_linear(torch.ones(2, 5), [torch.ones(3, 5)], [torch.ones(2)], a), "do not fit"),
        (lambda a: copied_linear(torch.ones(2, 5).double(), [torch.ones(3, 5)], [None], a), "do not fit"),
        (lambda a: linear_summed(torch.ones(2, 5).int(), torch.ones(3, 5).int(), a, 1), "do not fit"),
        (lambda a: linear_summed(torch.ones(2, 5), torch.ones(3, 5), a, 0), "number of pieces"),
        (lambda a: linear_summed(torch.ones(2, 5), torch.ones(3, 5), a, True), "number of pieces"),
        (lambda a: gathered_linear(torch.ones(2, 5), [torch.ones(3, 5)], [None], a, dim=1, chunks=1), "no dim"),
        (lambda a: gathered_linear(torch.ones(2, 5), [torch.ones(3, 5)], [None], a, dim=-1, chunks=1), "no dim"),
        (lambda a: gathered_linear(torch.ones(2, 5), [torch.ones(3, 5)], [None], a, dim=0, chunks=2.0), "number of"),
        (lambda a: linear_scattered(torch.ones(2, 5), torch.ones(3, 5), a, dim=-3, chunks=1), "no dim"),
        (lambda a: linear_scattered(torch.ones(3, 5), torch.ones(3, 5), a, dim=0, chunks=1), "cut into equal"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(call, match):
    def refused() -> None:
        with c.counted() as traffic, pytest.raises(FdsError, match=match):
            call(c.mesh(tp=-1)["tp"])
        assert not traffic.counts

    c.simulate(refused, 2)


def run_every_function() -> list[dict]:
    """Return what this rank gets of each function, in many pieces that are under way at once."""
    return [
        Example(name, part=(2, 40), chunks=chunks, dtype=dtype, count=case.most).run(True)
        for name, case in CASES.items()
        for chunks in (1, 3)
        for dtype in (torch.float32, torch.bfloat16)
    ]


def test_real_ranks_compute_what_simulated_ones_do():
    assert_same_bits(ranks.run(run_every_function), c.simulate(run_every_function, 2))
