"""Gradients as values: torch.func is the oracle."""

import contextlib

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.checkpoint import checkpoint

from fds import tree
from fds.autodiff import exclusive, value_and_grad, vjp
from fds.errors import FdsError, LossError
from tests.bits import assert_same_bits, snapshot

FORWARD_MODE = "ignore:`torch.jit.script` is deprecated:DeprecationWarning"  # torch's forward mode uses it

OPS = {
    "tanh": torch.tanh,
    "square": lambda x: x * x,
    "softmax": lambda x: torch.softmax(x.flatten(), 0),
    "cumsum": lambda x: x.flatten().cumsum(0),
    "flip": lambda x: x.flip(0) * 2,
    "transpose": lambda x: x.mT.exp(),
}


@st.composite
def functions(draw):
    """Draw a scalar function of two nested trees, and the trees."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    shapes = draw(st.lists(st.sampled_from([(2, 3), (1, 1), (4, 2)]), min_size=1, max_size=3))
    names = draw(st.lists(st.sampled_from(sorted(OPS)), min_size=len(shapes), max_size=len(shapes)))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    a = {"w": [torch.randn(s, generator=g, dtype=dtype) for s in shapes], "unused": torch.ones(2, dtype=dtype)}
    b = (torch.randn((), generator=g, dtype=dtype), {"c": torch.randn(3, generator=g, dtype=dtype)})

    def f(a, b, power=1):
        parts = [OPS[n](w).sum() for n, w in zip(names, a["w"], strict=True)]
        return (sum(parts) * b[0] + (b[1]["c"] ** 2).sum()) ** power

    return f, a, b


@given(functions(), st.sampled_from([0, 1, (0, 1), (1, 0), (1,)]), st.booleans())
def test_gradients_are_those_of_torch_func(problem, argnums, has_aux):
    f, a, b = problem
    g = (lambda *x, **k: (f(*x, **k), [x[0]["w"][0] * 2])) if has_aux else f
    got = value_and_grad(g, argnums, has_aux)(a, b, power=2)
    grads, value = torch.func.grad_and_value(g, argnums, has_aux)(a, b, power=2)
    assert tree.structure(got[1]) == tree.structure(grads)
    torch.testing.assert_close((got[0], got[1]), (value, grads))


@given(functions())
def test_cotangents_are_those_of_torch_func(problem):
    f, a, b = problem
    g = lambda a, b: {"value": f(a, b), "more": [a["w"][0] * 3, b[1]["c"].exp()]}
    (got, pull), (want, pull_want) = vjp(g, a, b), torch.func.vjp(g, a, b)
    torch.testing.assert_close(got, want)
    cotangent = tree.map(torch.ones_like, want)
    torch.testing.assert_close(pull(cotangent), pull_want(cotangent))


def test_unused_leaves_have_zeros():
    _, grads = value_and_grad(lambda p: p["a"].sum())({"a": torch.ones(2), "b": torch.ones(3)})
    assert_same_bits(grads["b"], torch.zeros(3))


def test_integer_leaves_have_none():
    params = {"w": torch.ones(2), "n": torch.tensor(3), "on": torch.tensor(True)}
    _, grads = value_and_grad(lambda p: (p["w"] * p["n"]).sum())(params)
    assert grads["n"] is None
    assert grads["on"] is None
    assert_same_bits(grads["w"], torch.full((2,), 3.0))


def test_nothing_that_is_returned_has_a_graph():
    (value, aux), grads = value_and_grad(lambda p: (p.sum(), [p * 2]), has_aux=True)(torch.ones(2))
    assert not any(x.requires_grad for x in tree.leaves((value, aux, grads)))


def test_the_arguments_stay_as_they_are():
    w = torch.ones(2, requires_grad=True)
    other = torch.ones(2, requires_grad=True)
    value_and_grad(lambda p: (p * other).sum())(w)
    assert w.grad is None
    assert other.grad is None
    assert w.requires_grad


def test_gradients_come_also_under_no_grad():
    with torch.no_grad():
        _, grads = value_and_grad(lambda p: (p**2).sum())(torch.ones(2))
    assert_same_bits(grads, torch.full((2,), 2.0))


def test_a_gradient_of_a_gradient():
    inner = lambda p: torch.func.grad(lambda q: (q**3).sum())(p).sum()
    _, second = value_and_grad(inner)(torch.tensor([1.0, 2.0]))
    assert_same_bits(second, torch.tensor([6.0, 12.0]))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_functions_are_differentiated(use_reentrant):
    w, x = torch.randn(3, 3), torch.randn(2, 3, requires_grad=True)
    plain = lambda p: torch.tanh(x @ p).sum()
    kept = lambda p: checkpoint(lambda x, p: torch.tanh(x @ p), x, p, use_reentrant=use_reentrant).sum()
    assert_same_bits(value_and_grad(kept)(w), value_and_grad(plain)(w))
    assert x.grad is None


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (lambda p: p, "scalar"),
        (lambda p: p.sum().long(), "floating"),
        (lambda p: p.sum().detach(), "depend"),
        (lambda p: torch.tensor(1.0), "depend"),
        (lambda p: 1.0, "tensor"),
        (lambda p: (p.sum(), {}), "tensor"),
        (lambda p: p.sum().to(torch.complex64), "floating"),
    ],
)
def test_what_is_no_scalar_with_a_graph_is_refused(value, word):
    with pytest.raises(LossError, match=word):
        value_and_grad(value)(torch.ones(2))


def test_aux_that_was_promised_and_is_missing_is_refused():
    with pytest.raises(LossError):
        value_and_grad(lambda p: p.sum(), has_aux=True)(torch.ones(2))


def test_memory_of_one_tensor_is_its_own():
    x = torch.ones(3)
    assert exclusive(x) is x


@pytest.mark.parametrize(
    "alias",
    [lambda x: x[1:], lambda x: x.view(-1), lambda x: x.detach(), lambda x: x.expand(2, 4), lambda x: x.t()],
    ids=["slice", "view", "detached", "expanded", "transposed"],
)
def test_aliases_are_copied(alias):
    base = torch.arange(4.0)
    before, x = snapshot(base), alias(base)
    mine = exclusive(x)
    assert_same_bits(mine, x.contiguous())
    assert mine.is_contiguous()
    mine.fill_(9.0)
    assert_same_bits(base, before)


def test_a_lone_tensor_in_another_layout_is_made_contiguous():
    assert exclusive(torch.randn(2, 3).t()).is_contiguous()


def test_a_tensor_that_numpy_holds_is_copied():
    x = torch.ones(3)
    array = x.numpy()
    exclusive(x.detach()).fill_(5.0)
    assert array.tolist() == [1.0, 1.0, 1.0]


def slope(kind, f):
    """Return the gradient of a scalar function of one tensor, by one of the ways that there are."""
    return {
        "value_and_grad": lambda x: value_and_grad(f, create_graph=True)(x)[1],
        "vjp": lambda x: vjp(f, x, create_graph=True)[1](torch.ones((), dtype=x.dtype))[0],
        "torch.func.grad": torch.func.grad(f),
        "torch.func.vjp": lambda x: torch.func.vjp(f, x)[1](torch.ones((), dtype=x.dtype))[0],
    }[kind]


WAYS = ["value_and_grad", "vjp", "torch.func.grad", "torch.func.vjp"]


def nested(kinds, f):
    """Return a function with a gradient in it for every kind, each of a function that also reads outer arguments."""
    for i, kind in enumerate(kinds):
        inner = f
        if i % 2:
            f = lambda x, kind=kind, inner=inner: (slope(kind, inner)(x * 0.5).sin() * x).sum()
        else:
            f = lambda x, kind=kind, inner=inner: slope(kind, lambda z: inner(z * x.cos()) + (z * x).sum())(x).sum()
    return f


@given(st.lists(st.sampled_from(WAYS), min_size=1, max_size=4))
def test_gradients_nest_in_any_depth_and_mix(kinds):
    x = torch.tensor([0.3, -1.2, 0.7], dtype=torch.float64)
    f = lambda x: (x**3).sum() * x[0].exp()
    want = nested(["torch.func.grad"] * len(kinds), f)(x)
    torch.testing.assert_close(nested(kinds, f)(x).detach(), want)


@pytest.mark.filterwarnings(FORWARD_MODE)
def test_hessian_vector_products_are_exact():
    params = {"w": torch.randn(3, 2, dtype=torch.float64), "b": torch.randn(2, dtype=torch.float64)}
    v = tree.map(torch.ones_like, params)
    f = lambda p: torch.tanh(p["w"] @ p["b"]).square().sum()
    inner = value_and_grad(f, create_graph=True)
    dot = lambda p: sum((g * t).sum() for g, t in zip(tree.leaves(inner(p)[1]), tree.leaves(v), strict=True))
    torch.testing.assert_close(value_and_grad(dot)(params)[1], torch.func.jvp(torch.func.grad(f), (params,), (v,))[1])


def test_the_argument_is_not_what_a_closure_reads():
    x = torch.tensor(3.0)
    got = value_and_grad(lambda x: value_and_grad(lambda z: z * x, create_graph=True)(x)[1])(x)
    assert [v.item() for v in got] == [3.0, 1.0]  # d(zx)/dz = x, not 2x


def test_an_unused_leaf_has_zeros_in_a_graph_too():
    inner = value_and_grad(lambda p: p["a"].square().sum(), create_graph=True)
    outer = lambda p: sum(g.sum() for g in inner(p)[1].values())
    _, grads = value_and_grad(outer)({"a": torch.ones(2), "b": torch.ones(3)})
    assert_same_bits(grads, {"a": torch.full((2,), 2.0), "b": torch.zeros(3)})


NESTED = {
    "value_and_grad": lambda x: value_and_grad(lambda x: (x**3).sum())(x)[1].sum(),
    "a closure alone": lambda x: value_and_grad(lambda z: (z * x).sum())(torch.ones(2))[0],
    "vjp": lambda x: vjp(lambda x: (x**3).sum(), x)[0],
    "vjp, its value's graph": lambda x: vjp(lambda x: x**3, x)[1](x)[0].sum(),
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("outer", [lambda f, x: value_and_grad(f)(x), vjp], ids=["value_and_grad", "vjp"])
def test_nesting_without_a_graph_is_refused(name, outer):
    with pytest.raises(LossError, match="create_graph=True"):
        outer(NESTED[name], torch.ones(2))


@pytest.mark.filterwarnings(FORWARD_MODE)
@pytest.mark.parametrize("name", [name for name in NESTED if name != "a closure alone"])
def test_arguments_with_a_graph_or_a_tangent_are_refused(name):
    x = torch.ones(2, requires_grad=True) * 2
    with pytest.raises(LossError, match="create_graph=True"):
        NESTED[name](x)
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(LossError, match="create_graph=True"):
            NESTED[name](x)


def test_a_cotangent_that_is_differentiated_is_refused():
    _, pull = vjp(lambda x: x**3, torch.ones(2))
    with pytest.raises(LossError, match="create_graph=True"):
        value_and_grad(lambda c: pull(c)[0].sum())(torch.ones(2))
    _, pull = vjp(lambda x: x**3, torch.ones(2), create_graph=True)
    assert_same_bits(value_and_grad(lambda c: pull(c)[0].sum())(torch.ones(2))[1], torch.full((2,), 3.0))


@pytest.mark.parametrize("create_graph", [False, True])
def test_under_no_grad_an_inner_gradient_is_a_constant(create_graph):
    inner = value_and_grad(lambda x: (x**3).sum(), create_graph=create_graph)

    def f(x):
        with torch.no_grad():
            g = inner(x)[1]
        return (g * x).sum()

    assert_same_bits(value_and_grad(f)(torch.ones(2))[1], torch.full((2,), 3.0))


def test_torch_func_transforms_gradients():
    f = lambda x: (x**3).sum()
    x = torch.tensor([1.0, 2.0])
    assert_same_bits(torch.vmap(value_and_grad(f))(x[:, None])[1], torch.tensor([[3.0], [12.0]]))
    assert_same_bits(torch.func.grad(lambda x: value_and_grad(f)(x)[1].sum())(x), torch.tensor([6.0, 12.0]))
    (value, aux), grads = torch.vmap(value_and_grad(lambda x: (f(x), {"a": x * 2}), has_aux=True))(x[:, None])
    assert_same_bits([value, aux["a"], grads], [x**3, x[:, None] * 2, 3 * x[:, None] ** 2])


@pytest.mark.parametrize("around", [torch.inference_mode, contextlib.nullcontext])
def test_gradients_come_in_inference_mode(around):
    with around():
        x = torch.tensor([1.0, 2.0])
        found = value_and_grad(lambda x: (x**3).sum())(x)
    assert not any(y.is_inference() for y in found)
    assert_same_bits(found, (torch.tensor(9.0), torch.tensor([3.0, 12.0])))


def test_a_cotangent_goes_by_the_keys_of_what_it_is_of():
    f = lambda x: {"a": x * 2, "b": x * 3}
    for run in (lambda g: g, lambda g: torch.func.vmap(g)):

        def pulled(x):
            return vjp(f, x)[1]({"b": torch.zeros_like(x), "a": torch.ones_like(x)})

        assert_same_bits(run(pulled)(torch.ones(2)), (torch.full((2,), 2.0),))


COTANGENTS = {
    "lacks a key": ({"a": torch.ones(2)}, "cotangent.b"),
    "has another": (lambda good: {**good, "c": 1}, "cotangent.c"),
    "lacks an item": (lambda good: {**good, "b": []}, "cotangent.b.0"),
    "is a list": ([torch.ones(2)] * 2, "cotangent"),
    "has another shape": (lambda good: {**good, "a": torch.ones(3)}, "cotangent.a"),
    "has a hole": (lambda good: {**good, "b": [None]}, "cotangent.b.0"),
}


@pytest.mark.parametrize(("bad", "where"), COTANGENTS.values(), ids=COTANGENTS)
def test_a_cotangent_that_does_not_fit_is_named(bad, where):
    _, pull = vjp(lambda p: {"a": p * 2, "b": [p * 3]}, torch.ones(2))
    good = {"a": torch.ones(2), "b": [torch.ones(2)]}
    with pytest.raises(FdsError) as error:
        pull(bad(good) if callable(bad) else bad)
    assert error.value.where == where and error.value.got and error.value.want
    assert pull(good)[0].tolist() == [5.0, 5.0]


def test_an_argument_that_is_not_there_is_named():
    for argnums, args in ((3, (torch.ones(2),)), (0, ()), ((0, 1), (torch.ones(2),))):
        with pytest.raises(LossError) as error:
            value_and_grad(lambda *given: given[0].sum(), argnums=argnums)(*args)
        assert error.value.where == "value_and_grad, argnums"
