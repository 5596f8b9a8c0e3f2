"""However a module holds its parameters, `functional` computes with those it is given, or refuses by name."""

import copy
import functools
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

import fds
from fds.errors import LossError
from tests.bits import assert_same_bits

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
HIDDEN = {}


class Base(nn.Module):
    """Scales, and calls whatever `build` has made of it."""

    def __init__(self, build):
        super().__init__()
        self.w, self.inner = nn.Parameter(torch.full((3,), 1.5)), nn.Linear(3, 3)
        self.register_buffer("shift", torch.full((3,), 0.5))
        self.f = None
        self.made = build(self)

    def double(self, z):
        return z * self.w * 2

    def forward(self, x):
        f = self.f or self.made
        return self.inner(f(x)) + self.shift


class Caller:
    def __init__(self, module):
        self.module = module

    def __call__(self, z):
        return z * self.module.w


class Slotted:
    __slots__ = ("w",)

    def __init__(self, w):
        self.w = w

    def __call__(self, z):
        return z * self.w


class Shared:
    def __init__(self, w):
        self.w = w

    def __deepcopy__(self, memo):
        return self

    def __call__(self, z):
        return z * self.w


def in_a_list(m):
    m.ws = [m.w, {"again": [m.w]}]
    m.f = lambda z: z * m.ws[0] + m.ws[1]["again"][0]


def in_a_tuple(m):
    m.ws = (m.w, (m.w, 2.0))
    return lambda z: z * m.ws[0] + m.ws[1][0] * m.ws[1][1]


def in_an_object(m):
    return Caller(m)


def in_a_hidden_module(m):
    hidden = nn.Linear(3, 3, bias=False)
    hidden.weight = m.inner.weight
    m.hidden = [hidden]
    m.f = lambda z: m.hidden[0](z * m.w)


def in_a_lambda(m):
    return lambda z: z * m.w


def in_a_default(m):
    return lambda z, m=m: z * m.w


def in_a_keyword_default(m):
    def f(z, *, w=m.w):
        return z * w

    return f


def as_a_local(m):
    w, shift = m.w, m.shift
    return lambda z: z * w + shift


def in_a_list_of_a_closure(m):
    things = [m, (m.w,)]
    return lambda z: z * things[0].w + things[1][0]


def in_a_partial(m):
    return functools.partial(torch.mul, m.w)


def in_a_partial_of_a_lambda(m):
    return functools.partial(lambda w, z: m.double(z) * w, m.w)


def in_a_method(m):
    return m.double


def in_a_weak_reference(m):
    m.parent = weakref.ref(m)
    return lambda z: z * m.parent().w


def in_functions_that_call_each_other(m):
    def even(z, n):
        return z if n == 0 else odd(z * m.w, n - 1)

    def odd(z, n):
        return z + m.w if n == 0 else even(z, n - 1)

    return lambda z: even(z, 3)


def in_a_tuple_of_functions(m):
    m.fs = (lambda z: z * m.w, m.double)
    return lambda z: m.fs[0](z) + m.fs[1](z)


def in_a_wrapped_forward(m):
    inner = m.inner.forward

    @functools.wraps(inner)
    def forward(z):
        return inner(z) * 2

    m.inner.forward = forward
    return m.double


def in_a_compiled_forward(m):
    m.inner.forward = torch.compile(m.inner.forward, backend="eager", fullgraph=True)
    return m.double


def in_a_compiled_method(m):
    return torch.compile(m.double, backend="eager")


def in_hooks(m):
    m.inner.register_forward_pre_hook(lambda _, args: (args[0] * m.w,))
    m.inner.register_forward_hook(lambda part, args, out: out * m.w + part.bias)
    return m.double


SUPPORTED = [
    in_a_list,
    in_a_tuple,
    in_an_object,
    in_a_hidden_module,
    in_a_lambda,
    in_a_default,
    in_a_keyword_default,
    as_a_local,
    in_a_list_of_a_closure,
    in_a_partial,
    in_a_partial_of_a_lambda,
    in_a_method,
    in_a_weak_reference,
    in_functions_that_call_each_other,
    in_a_tuple_of_functions,
    in_a_wrapped_forward,
    in_a_compiled_forward,
    in_a_compiled_method,
    in_hooks,
]


def other_values(module):
    torch.manual_seed(3)
    return {name: torch.randn_like(p) for name, p in module.named_parameters()}


def by_torch(build, params, shift):
    module = Base(build)
    module.load_state_dict({**params, "shift": shift})
    out = module(X)
    out.square().mean().backward()
    return out.detach(), {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch.compile reads itself
@pytest.mark.parametrize("moved", [lambda apply: apply, copy.deepcopy], ids=["made", "copied"])
@pytest.mark.parametrize("build", SUPPORTED, ids=lambda f: f.__name__)
def test_what_holds_a_parameter_computes_with_the_given_one(build, moved):
    module = Base(build)
    apply = moved(fds.functional(module)[0])
    params, shift = other_values(module), {"shift": torch.arange(3.0)}
    want, grads = by_torch(build, params, shift["shift"])
    for _ in range(2):
        with torch.no_grad():
            assert_same_bits(apply(params, X, buffers=shift), want)
        _, got = fds.autodiff.value_and_grad(lambda p: apply(p, X, buffers=shift).square().mean())(params)
        assert_same_bits(got, grads)


def test_a_buffer_that_is_held_in_a_list_too_is_threaded():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("calls", torch.zeros(()))
            self.all = [self.calls]

        def forward(self, x):
            self.all[0].add_(1)
            return x * self.w * self.calls

    apply, params, buffers = fds.functional(Counting())
    for count in (1, 2, 3):
        out, buffers = apply.with_buffers(params, buffers, X)
        assert_same_bits(out, X * count)


def in_a_set(m):
    m.ws = {m.w}
    return lambda z: z * next(iter(m.ws))


def in_slots(m):
    return Slotted(m.w)


def as_its_data(m):
    m.data = [m.w.data]
    return lambda z: z * m.data[0]


def as_a_view_in_a_closure(m):
    view = m.w.detach()[:]
    return lambda z: z * view


def in_a_global(m):
    HIDDEN["module"] = m
    return lambda z: z * HIDDEN["module"].w


def in_an_object_that_is_not_copied(m):
    return Shared(m.w)


@pytest.mark.parametrize(
    "build",
    [in_a_set, in_slots, as_its_data, as_a_view_in_a_closure, in_a_global, in_an_object_that_is_not_copied],
    ids=lambda f: f.__name__,
)
def test_what_cannot_be_given_another_parameter_is_refused_by_name(build):
    module = Base(build)
    apply, params, _ = fds.functional(module)
    step = fds.compose(fds.sgd(0.1))(lambda p, x: apply(p, x).mean())
    state = step.init(params)
    calls = [
        lambda: step.evaluate(state, X),
        lambda: step(state, X),
        lambda: apply(params, X),
        lambda: fds.autodiff.value_and_grad(lambda p: apply(p, X).mean())(params),
    ]
    for call in [*calls, *calls]:
        with pytest.raises(LossError, match="module reads a parameter") as caught:
            call()
        assert caught.value.where == "w"
        assert "self.w" in caught.value.want


def test_a_view_that_forward_makes_anew_is_no_matter():
    torch.manual_seed(0)
    module = nn.utils.spectral_norm(nn.Linear(3, 3)).eval()  # its hook assigns `weight`, which began as a view
    apply, params, _ = fds.functional(module)
    assert_same_bits(apply(params, X), module(X))


class Keeping(nn.Module):
    """Keeps what it computed, as code that shows attention does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        self.last = y = self.linear(x)
        self.all = [y, y]
        return y


def normed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(3, 3))


@pytest.mark.parametrize(
    "make",
    [normed, lambda: prune.l1_unstructured(nn.Linear(3, 3), "weight", 0.5), Keeping],
    ids=["weight_norm", "prune", "kept"],
)
def test_what_is_computed_anew_in_every_call_is_no_matter(make):
    module = make()
    module(X).sum().backward()
    apply, params, _ = fds.functional(module)
    _, grads = fds.autodiff.value_and_grad(lambda p: apply(p, X).sum())(params)
    for name, p in module.named_parameters():
        assert_same_bits(grads[name], p.grad)


def test_what_was_computed_once_is_refused_where_it_is_read():
    module = nn.Linear(3, 3)
    module.double = module.weight * 2
    module.forward = lambda x: x @ module.double
    apply, params, _ = fds.functional(module)
    with pytest.raises(LossError, match="was computed before") as caught:
        apply(params, X)
    assert caught.value.where == "double"


class Running(nn.Module):
    """Subtracts a mean, which begins as None."""

    def __init__(self, persistent, drop=False):
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 3), drop
        self.register_buffer("mean", torch.zeros(3) if drop else None, persistent=persistent)

    def forward(self, x):
        if self.mean is None:
            self.mean = x.detach().mean(0)
        y = self.linear(x - self.mean)
        if self.drop:
            self.mean = None
        return y


def test_a_buffer_that_begins_as_none_is_made_anew_in_every_call():
    apply, params, _ = fds.functional(Running(persistent=False))
    first = apply(params, X)
    apply(params, X + 1)
    assert_same_bits(apply(params, X), first)


@pytest.mark.parametrize("drop", [False, True])
def test_a_buffer_that_is_added_to_the_state_or_removed_is_refused(drop):
    apply, params, buffers = fds.functional(Running(persistent=True, drop=drop))
    for call in (lambda: apply(params, X), lambda: apply.with_buffers(params, buffers, X)) * 2:
        with pytest.raises(LossError, match="adds a buffer") as caught:
            call()
        assert caught.value.where == "mean"


def test_reading_about_a_parameter_is_not_reading_it():
    def build(m):
        return lambda z: z.to(HIDDEN["about"].w.dtype) * torch.ones(HIDDEN["about"].w.shape)

    HIDDEN["about"] = module = Base(build)
    apply, params, _ = fds.functional(module)
    assert_same_bits(apply(params, X), module(X))


def test_parameters_of_the_module_itself_may_be_passed():
    module = Base(in_a_lambda)
    apply, _, _ = fds.functional(module)
    own = dict(module.named_parameters())
    assert_same_bits(apply(own, X), module(X))
    with torch.no_grad():
        assert_same_bits(apply(own, module.w * X), module(module.w * X))


@pytest.mark.parametrize("kind", ["plain", "layers"])
def test_a_loss_that_reads_a_parameter_of_the_module_itself_is_refused(kind):
    module = nn.Sequential(nn.Linear(3, 3))
    apply, params, _ = fds.functional(module)
    penalty = lambda: module[0].weight.square().sum()
    if kind == "plain":
        loss, batch = lambda p, x: apply(p, x).mean() + penalty(), X
    else:
        loss, batch = fds.Layers(module, lambda out, y: F.mse_loss(out, y) + penalty()), (X, X)
        params = loss.init
    step = fds.compose(fds.accumulate(5), fds.sgd(0.1))(loss)
    state = step.init(params)
    for _ in range(2):
        with pytest.raises(LossError, match="of a module itself") as caught:
            step(state, batch)
        assert caught.value.where.endswith("0.weight") or caught.value.where == "weight"
    meant = fds.compose(fds.sgd(0.1))(lambda p, x: apply(p, x).mean() + penalty().detach())
    meant(meant.init(fds.functional(module)[1]), X)
