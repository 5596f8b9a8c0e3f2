"""Operators: what torch expects of one, and what is refused since it has no gradient; how functions are called."""

import importlib
import inspect
import pkgutil

import pytest
import torch

import fds.kernels
from fds.attention_layouts import local_sliding_window
from fds.errors import KernelError
from fds.kernels._swiglu import swiglu
from fds.kernels.choice import only
from fds.kernels.operators import Function, Operator
from tests.kernels.accuracy import random
from tests.kernels.ways import WAYS, plain, traced

X, ROW, COLUMN, LOSS = random(4, 8), random(8, seed=1), random(4, seed=2).abs(), random(4, seed=3)
TARGETS, SEED = torch.tensor([0, 7, -100, 3]), torch.tensor(3)
HEADS, LSE, ANGLES = random(1, 2, 16, 16, seed=4), random(1, 2, 16, seed=5), random(16, 8, seed=6)
WINDOW = local_sliding_window(2, 1, num_sliding_window_blocks=1), local_sliding_window(2, 4, block=4)
LISTED = (None, WINDOW[0].key, 16, 0, True, 0.25, 0.5, 0)
ROWS = (None, WINDOW[1].key, [1, 1, 1, 1], 4, 0, True, 0.25, 0.5, 0)
CHOSEN = torch.arange(4).expand(1, 2, 4, 4)

CALLS = {
    "bias_dropout_add": (X, ROW, None, SEED, 0.5, 0),
    "bias_dropout_add_backward": (X, SEED, 0.5, 0, True),
    "bias_gelu": (X, ROW, "tanh"),
    "bias_gelu_and_derivative": (X, None, "none"),
    "bias_gelu_backward": (X, X, ROW, "tanh", True),
    "bias_gelu_multiply": (X, X, True),
    "cross_entropy": (X, TARGETS, 0.1, 0.1, -100),
    "cross_entropy_backward": (LOSS, X, TARGETS, random(4, 2), 0.1, 0.1, -100),
    "fake_quantize": (X, 4, None, "torchao", True, None, True),
    "flash_attention": (HEADS, HEADS, HEADS, None, None, SEED, None, None, True, 0.25, 0.5, 0),
    "flash_attention_backward": (
        HEADS,
        HEADS,
        HEADS,
        HEADS,
        None,
        None,
        None,
        None,
        None,
        HEADS,
        LSE,
        True,
        0.25,
        0.0,
        0,
    ),
    "linear_cross_entropy": (X, X, TARGETS % 4, None, [True, True, False], 2, 0.0, 0.0, -100, True),
    "linear_cross_entropy_backward": (LOSS[0], X, X, X.new_empty(0)),
    "masked_softmax": (HEADS, None, 1.0, True, 0.5, SEED, 0),
    "masked_softmax_backward": (HEADS, HEADS, 1.0, 0.0, None, 0),
    "normalize": (X, None, ROW, None, 1e-5, True, False, True),
    "normalize_backward": (X, X, COLUMN, COLUMN, ROW, None, None, True, False, torch.float32, None),
    "rotary": (HEADS, ANGLES, ANGLES, False, False),
    "sparse_attention": (HEADS, HEADS, HEADS, None, None, None, SEED, None, *LISTED),
    "sparse_attention_backward": (
        *(HEADS, HEADS, HEADS, HEADS, None, None, None, None, None, None, HEADS, LSE, *LISTED[1:6], 0.0, 0),
    ),
    "sparse_attention_rows": (HEADS, HEADS, HEADS, None, None, None, SEED, None, *ROWS),
    "sparse_attention_rows_backward": (
        *(HEADS, HEADS, HEADS, HEADS, None, None, None, SEED, None, CHOSEN, 0, *ROWS[2:4], 4, *ROWS[5:], False, False),
    ),
    "swiglu": (X, X),
    "swiglu_backward": (X, X, X),
    "vocabulary_gradient": (X, TARGETS, random(2, 4), random(3, 4), True, 8),
    "vocabulary_statistics": (X, TARGETS, True),
}


def operators() -> dict[str, Operator]:
    """Return all operators of kernels."""
    names = [each.name for each in pkgutil.walk_packages(fds.kernels.__path__, "fds.kernels.") if not each.ispkg]
    values = [value for name in names for value in vars(importlib.import_module(name)).values()]
    return {op.name: op for op in values if isinstance(op, Operator)}


@pytest.fixture(scope="module")
def made() -> dict[str, Operator]:
    return operators()


def test_every_operator_is_tried(made):
    assert made.keys() == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_torch_finds_that_it_writes_to_no_argument_and_that_its_fake_is_right(name, made):
    torch.library.opcheck(made[name]._overload, CALLS[name], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", CALLS)
def test_called_where_a_gradient_would_be_needed_it_is_refused(name, made):
    args = [x.clone().requires_grad_() if x is X or x is HEADS else x for x in CALLS[name]]
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
        args[0] = args[0].clone().requires_grad_()
    with pytest.raises(KernelError, match="no gradient of its own") as caught:
        made[name](*args)
    assert caught.value.where == f"fds::{name}"
    with torch.no_grad():
        made[name](*args)


def test_it_is_refused_under_torch_func_too(made):
    with pytest.raises(KernelError, match="no gradient of its own"):
        torch.func.grad(lambda x: made["swiglu"](x, X).sum())(X)


@pytest.mark.parametrize("way", ["plain", "transformed"])
def test_vmap_over_a_kernel_is_refused(way):
    with only("triton"), pytest.raises(RuntimeError, match="vmap"):
        torch.vmap(lambda x: WAYS[way](lambda x: swiglu(x, x).sum(), (x,)))(X.clone().requires_grad_(way == "plain"))


class Scaled(Function):
    @staticmethod
    def forward(x, factor=2.0):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.factor, None


@pytest.mark.parametrize(("rest", "factor"), [((), 2.0), ((3.0,), 3.0)])
def test_a_function_may_leave_arguments_out(rest, factor):
    (dx,) = plain(lambda x: Scaled.apply(x, *rest).sum(), [X.clone().requires_grad_()])
    assert torch.equal(dx, torch.full_like(X, factor))


def test_a_function_shows_the_signature_that_it_has():
    assert str(inspect.signature(Scaled.forward)) == "(x, factor=2.0)"
    with pytest.raises(TypeError):
        Scaled.apply(X, 1.0, 2.0)


def test_torch_neither_makes_nor_binds_a_signature_when_a_function_is_called(monkeypatch):
    slow = []
    monkeypatch.setattr(inspect.Signature, "bind", lambda *args: slow.append(args))
    with only("triton"):
        swiglu(X.clone().requires_grad_(), X).sum().backward()
    assert not slow


ITSELF = local_sliding_window(1, 1, num_sliding_window_blocks=1)
UNRECORDED = {
    "linear_cross_entropy": lambda x: fds.kernels.linear_cross_entropy(x, x, torch.arange(len(x))),
    "flash_attention": lambda x: fds.kernels.flash_attention(*[x.view(1, 1, *x.shape)] * 3),
    "sparse_attention": lambda x: fds.kernels.sparse_attention(*[x.view(1, 1, *x.shape)] * 3, ITSELF),
}


@pytest.mark.sweep
@traced
@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("name", UNRECORDED)
def test_a_graph_without_gradients_is_compiled_whole(name, kind):
    x = random(8, 16)
    with only(kind), torch.no_grad():
        compiled = torch.compile(UNRECORDED[name], backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), UNRECORDED[name](x))
