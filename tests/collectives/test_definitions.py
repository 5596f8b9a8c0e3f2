"""Every collective is its definition, and its gradient the transpose, on one to five simulated ranks."""

import functools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given
from torch.utils.checkpoint import checkpoint

from fds import collectives as c
from fds.errors import FdsError
from tests.bits import assert_same_bits
from tests.collectives.cases import CASES, axis, examples, in_rank_order, random_tensors

FLOAT64 = (torch.float64,)


def on_ranks(function, xs):
    """Call a function of a tensor on as many ranks as there are tensors."""
    return c.simulate(lambda: function(xs[axis().index]), len(xs))


def inner(xs, ys) -> float:
    return sum((x * y).sum().item() for x, y in zip(xs, ys, strict=True))


@given(examples())
def test_a_collective_is_its_definition_and_leaves_its_input(example):
    xs = example.inputs()
    kept = [x.clone() for x in xs]
    got = on_ranks(example, xs)
    assert_same_bits(got, CASES[example.name].definition(xs, *example.arguments))
    assert_same_bits(xs, kept)
    if example.size > 1:
        assert not {x.data_ptr() for x in got if x.numel()} & {x.data_ptr() for x in xs if x.numel()}


@given(examples(dtypes=FLOAT64))
def test_the_gradient_is_the_transpose(example):
    xs = example.inputs(integers=True)
    outs = on_ranks(example, xs)
    ys = random_tensors([out.shape for out in outs], torch.float64, example.seed + 1, integers=True)

    def gradient(pair):
        x, y = pair[0].clone().requires_grad_(), pair[1]
        return torch.autograd.grad(example(x), x, y)[0]

    assert inner(outs, ys) == inner(xs, on_ranks(gradient, list(zip(xs, ys, strict=True))))


@given(examples(dtypes=FLOAT64))
def test_every_way_to_differentiate_gives_the_same_bits(example):
    def gradients(x):
        loss = lambda x: (example(x * 2) ** 2).sum()
        leaf = x.clone().requires_grad_()
        return [
            torch.autograd.grad(loss(leaf), leaf)[0],
            torch.func.grad(loss)(x),
            torch.func.vjp(loss, x)[1](torch.ones((), dtype=x.dtype))[0],
            torch.autograd.grad(checkpoint(loss, leaf, use_reentrant=False), leaf)[0],
        ]

    for first, *others in on_ranks(gradients, example.inputs()):
        for other in others:
            assert_same_bits(other, first)


@given(examples(dtypes=FLOAT64))
def test_a_gradient_has_a_gradient(example):
    """The second derivative of |f x|^2 / 2 along v is f^T f v."""
    xs, vs = example.inputs(integers=True), random_tensors([example.shape] * example.size, torch.float64, 7, True)

    def products(pair):
        x, v = pair[0].clone().requires_grad_(), pair[1].clone().requires_grad_()
        (g,) = torch.autograd.grad((example(x) ** 2).sum() / 2, x, create_graph=True)
        twice = torch.autograd.grad(g, x, v.detach())[0]
        return twice, torch.autograd.grad(example(v), v, example(v.detach()))[0]

    for got, want in on_ranks(products, list(zip(xs, vs, strict=True))):
        assert torch.equal(got, want)


@given(st.integers(2, 5), st.integers(0, 2**32))
def test_a_message_is_received_and_its_gradient_is_sent_back(size, seed):
    xs = random_tensors([(3, 2)] * size, torch.float64, seed)

    def around(x):
        a, x = axis(), x.clone().requires_grad_()
        like = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
        left, right = (a.index - 1) % size, (a.index + 1) % size
        if a.index == 0:
            zero = c.send(x, a, right)
            got = c.recv(like, a, left)
        else:
            got = c.recv(like, a, left)
            zero = c.send(x, a, right)
        # one half of the ring first, lest all wait for a gradient that nobody has sent
        first, second = ((got**2).sum(), zero) if a.index == 0 else (zero, (got**2).sum())
        grads = [
            torch.autograd.grad(part, of)[0]
            for part, of in (((first, like), (second, x)) if a.index == 0 else ((first, x), (second, like)))
        ]
        return got.detach(), grads[0] if a.index else grads[1], grads[1] if a.index else grads[0]

    for i, (got, grad, of_like) in enumerate(on_ranks(around, xs)):
        assert_same_bits([got, grad, of_like], [xs[i - 1], 2 * xs[i], torch.zeros(3, 2, dtype=torch.float64)])


@example(3, "sum", 40, True, 0)  # the fewest ranks on which rounding twice differs
@given(st.integers(1, 5), st.sampled_from(["sum", "max", "min"]), st.integers(1, 40), st.booleans(), st.integers(0, 99))
def test_reductions_in_place(size, op, n, low, seed):
    dtype = torch.bfloat16 if low else torch.float32
    xs = random_tensors([(n,)] * size, dtype, seed)

    def reduce(x):
        x = x.clone()
        axis().start_all_reduce(x, op).wait()
        return x

    chain = lambda combine: lambda xs: functools.reduce(combine, xs)
    want = {"sum": in_rank_order, "max": chain(torch.maximum), "min": chain(torch.minimum)}
    assert_same_bits(on_ranks(reduce, xs), [want[op](xs)] * size)
    xs[-1][0] = float("nan")  # one on one rank reaches all, as the same bits
    first, *others = on_ranks(reduce, xs)
    assert first[0].isnan()
    for other in others:
        assert_same_bits(other, first)


@given(st.integers(1, 5), st.integers(0, 7), st.booleans(), st.integers(0, 99))
def test_the_raw_core_writes_into_the_memory_that_it_is_given(size, n, inside, seed):
    parts = random_tensors([(n,)] * size, torch.float32, seed)
    wholes = random_tensors([(n * size,)] * size, torch.float32, seed + 1)

    def run(pair):
        part, whole = pair[0].clone(), pair[1].clone()
        a = axis()
        own = slice(a.index * n, (a.index + 1) * n)
        out = torch.zeros(size * n)
        if inside:
            out[own] = part
            part = out[own]
        piece = whole[own] if inside else torch.empty(n)
        works = [a.start_all_gather(out, part), a.start_reduce_scatter(piece, whole)]
        for work in works:
            work.wait()
            assert work.done()
        if not inside:
            assert_same_bits(whole, pair[1])
        return out, piece.clone()

    results = on_ranks(run, list(zip(parts, wholes, strict=True)))
    assert_same_bits([out for out, _ in results], [torch.cat(parts)] * size)
    assert_same_bits([piece for _, piece in results], list(in_rank_order(wholes).chunk(size)))


def test_an_axis_of_one_rank_gives_back_what_it_got():
    x = torch.randn(2, 2)
    a = axis()
    for name, arguments in {
        "all_gather": (1,),
        "reduce_scatter": (),
        "all_reduce": (),
        "all_to_all": (0, 1),
        "broadcast": (),
    }.items():
        assert CASES[name].function(x, a, *arguments) is x
    assert a.all_reduce(x) is x
    assert a.exchange({"a": 1}) == [{"a": 1}] and a.exchange_numbers([1, -2]) == [[1, -2]]
    a.barrier()
    c.barrier(a)


def test_a_0_d_tensor_is_gathered_to_a_vector():
    def run():
        x = torch.tensor(float(axis().index), requires_grad=True)
        out = c.all_gather(x, axis())
        return out.detach(), torch.autograd.grad(out.sum(), x)[0]

    assert_same_bits(c.simulate(run, 3), [(torch.arange(3.0), torch.tensor(3.0))] * 3)


def test_values_of_python_are_exchanged_in_rank_order():
    def run():
        return axis().exchange({"rank": axis().index, "text": "ä" * axis().index, "list": [1.5, None]})

    want = [{"rank": i, "text": "ä" * i, "list": [1.5, None]} for i in range(3)]
    assert c.simulate(run, 3) == [want] * 3


def test_numbers_are_exchanged_in_rank_order_and_for_one_purpose():
    def run(purpose=lambda rank: "step"):
        rank = axis().index
        return axis().exchange_numbers([rank, -(2**62)], purpose(rank))

    assert c.simulate(run, 3) == [[[i, -(2**62)] for i in range(3)]] * 3
    with pytest.raises(FdsError, match="different collectives"):
        c.simulate(lambda: run(str), 2)


REFUSED = {
    "all_gather": lambda a, x: a.start_all_gather(torch.empty(5), torch.empty(2)),
    "all_gather, a matrix": lambda a, x: a.start_all_gather(torch.empty(4, 2), torch.empty(2, 2)),
    "reduce_scatter": lambda a, x: a.start_reduce_scatter(torch.empty(2), torch.empty(3)),
    "reduce_scatter, dtypes": lambda a, x: a.start_reduce_scatter(torch.empty(2), torch.empty(4).double()),
    "all_reduce, strides": lambda a, x: a.start_all_reduce(x.T),
    "all_reduce, op": lambda a, x: a.start_all_reduce(x, "mean"),
    "all_to_all": lambda a, x: a.start_all_to_all(torch.empty(3), torch.empty(3)),
    "broadcast": lambda a, x: a.start_broadcast(x, 2),
    "send to itself": lambda a, x: a.start_send(x, a.index),
    "recv": lambda a, x: a.start_recv(x, -1),
    "a dim": lambda a, x: c.all_gather(x, a, 2),
    "a dim that does not divide": lambda a, x: c.reduce_scatter(x, a, 1),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_sent(call):
    def run():
        with pytest.raises(FdsError) as error:
            call(axis(), torch.zeros(2, 3))
        return str(error.value)

    assert all("want:" in text for text in c.simulate(run, 2))
