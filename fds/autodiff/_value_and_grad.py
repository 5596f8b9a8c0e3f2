"""`value_and_grad` and `vjp`: values together with gradients, and vector-Jacobian products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fds import tree
from fds.autodiff._backward import (
    backward_through_reentrant,
    differentiated,
    exclusive,
    in_torch_func,
    is_inside_loss,
    is_reentrant,
)
from fds.errors import LossError


def value_and_grad(
    f: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False, *, create_graph: bool = False
) -> Callable[..., Any]:
    """Return a function computing `f` and its gradients with respect to the arguments `argnums`.

    `f` returns a scalar, or `(scalar, aux)` with `has_aux`. The result returns `(value, grads)` or
    `((value, aux), grads)`; `grads` has the structure of the argument (a tuple of them for a tuple of `argnums`),
    zeros where `f` does not depend on a leaf and None at leaves that are not floating point.

    The results are detached, so inside another function that is differentiated (another `value_and_grad` or `vjp`,
    the loss of a step) this raises `LossError`, unless gradients are disabled there (`torch.no_grad()`). With
    `create_graph=True` value and gradients keep their graph, and derivatives of any order are exact:

    >>> value, grads = value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
    >>> grads["w"]
    tensor([2., 4.])
    >>> slope = lambda x: value_and_grad(lambda x: x**3, create_graph=True)(x)[1]
    >>> value_and_grad(slope)(torch.tensor(2.0))  # 3 x^2 and its derivative, 6 x
    (tensor(12.), tensor(12.))
    """

    def once(args: tuple[Any, ...], kwargs: dict[str, Any], *, reentrant: bool = False) -> Any:
        outs, pull = _linearize(
            f, argnums, has_aux, args, kwargs, "value_and_grad", create_graph=create_graph, reentrant=reentrant
        )
        if has_aux and not (isinstance(outs, tuple) and len(outs) == 2):
            raise LossError(
                "a function with aux returns a pair",
                where="value_and_grad",
                got=type(outs).__name__,
                want="(scalar, aux)",
            )
        value: Any = outs[0] if has_aux else outs
        check_scalar(value, "value_and_grad")
        if not (value.requires_grad or in_torch_func()):
            raise LossError(
                "the loss does not depend on the parameters",
                got="a value without a graph",
                want="a value computed from params",
                hint="look for .detach(), .item(), torch.no_grad() or a constant",
            )
        return _result(outs, create_graph), pull(torch.ones_like(value))

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return once(args, kwargs)
        except _ReentrantError:
            if create_graph:
                raise
            return once(args, kwargs, reentrant=True)  # with a new value, so that both come from the same draws

    return run


def vjp(f: Callable[..., Any], *args: Any, create_graph: bool = False) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """Return `f(*args)` and a function for vector-Jacobian products.

    That function takes a cotangent, a tree of the structure of `f(*args)`, and returns a tuple with one gradient for
    each argument. `create_graph` is that of `value_and_grad`.

    Raises `StateError` for a cotangent of another structure and `LossError` for one of another shape, naming the leaf.
    """
    picked = tuple(range(len(args)))
    outs, pull = _linearize(f, picked, False, args, {}, "vjp", create_graph=create_graph, keep=True)
    return _result(outs, create_graph), pull


def check_scalar(value: Any, where: str) -> None:
    """Raise `LossError` unless `value` is a 0-d floating-point tensor."""
    if not isinstance(value, Tensor):
        raise LossError(
            "the loss is not a tensor",
            where=where,
            got=type(value).__name__,
            want="a 0-d floating tensor",
            hint="look for .item() or float(); a pair is (scalar, metrics)",
        )
    if value.dim() != 0:
        raise LossError(
            "the loss is not a scalar",
            where=where,
            got=f"shape {tuple(value.shape)}",
            want="shape ()",
            hint="return loss.mean(), or fds.Mean(loss.sum(), loss.numel())",
        )
    if not value.is_floating_point():
        raise LossError("the loss is not floating point", where=where, got=str(value.dtype), want="a float dtype")


@attrs.frozen(eq=False)
class _Arguments:
    """The arguments of a function, of which some are differentiated with respect to their floating-point leaves."""

    f: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    argnums: int | tuple[int, ...]
    picked: tuple[int, ...]  # `argnums` as a tuple
    leaves: list[Any]  # of the picked arguments
    floats: list[int]  # indices of the floating-point leaves
    build: Callable[..., Any]  # leaves -> picked arguments

    @classmethod
    def of(
        cls, f: Callable[..., Any], argnums: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: str
    ) -> _Arguments:
        """Pick the arguments `argnums`. Raises `LossError` if there is no such argument."""
        picked = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        if not all(-len(args) <= i < len(args) for i in picked):
            raise LossError(
                "no such argument to differentiate",
                where=f"{where}, argnums",
                got=str(argnums),
                want=f"indices of the {len(args)} positional arguments, from 0",
            )
        leaves, build = tree.flatten([args[i] for i in picked])
        floats = [i for i, x in enumerate(leaves) if tree.is_float(x)]
        return cls(f, args, kwargs, argnums, picked, leaves, floats, build)

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors to differentiate with respect to."""
        return [self.leaves[i] for i in self.floats]

    def call(self, inputs: Sequence[Tensor]) -> Any:
        """Call the function with other tensors in place of `inputs`."""
        leaves, args = list(self.leaves), list(self.args)
        for i, x in zip(self.floats, inputs, strict=True):
            leaves[i] = x
        for i, arg in zip(self.picked, self.build(leaves), strict=True):
            args[i] = arg
        with differentiated():
            return self.f(*args, **self.kwargs)

    def gradients(self, grads: Sequence[Tensor]) -> Any:
        """Return gradients, one per input, in the structure of the picked arguments; None at other leaves."""
        leaves: list[Any] = [None] * len(self.leaves)
        for i, grad in zip(self.floats, grads, strict=True):
            leaves[i] = grad
        return self.build(leaves)[0] if isinstance(self.argnums, int) else tuple(self.build(leaves))


def _linearize(
    f: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    where: str,
    *,
    create_graph: bool,
    keep: bool = False,
    reentrant: bool = False,
) -> tuple[Any, Callable[..., Any]]:
    """Return the result of `f` and the function from its cotangent (of the first part, with aux) to the gradients."""
    arguments = _Arguments.of(f, argnums, args, kwargs, where)
    if in_torch_func():
        return _by_torch_func(arguments, has_aux)
    graph = create_graph and torch.is_grad_enabled()
    if not create_graph:
        _check_not_nested((args, kwargs), where)
    with torch.inference_mode(False):
        inputs = [_entrance(x, graph) for x in arguments.inputs]
        with torch.enable_grad():
            outs = arguments.call(inputs)

    def pull(cotangent: Any) -> Any:
        if not create_graph:
            _check_not_nested(cotangent, where)
        first = outs[0] if has_aux else outs
        pairs = zip(tree.leaves(first), _in_order_of(first, cotangent), strict=True)
        live = [(o, c) for o, c in pairs if isinstance(o, Tensor) and o.requires_grad]
        ends, seeds = [o for o, _ in live], [c for _, c in live]
        zeros = lambda: [torch.zeros_like(x, requires_grad=False) for x in inputs]
        with torch.inference_mode(False):
            if not (live and inputs):
                return arguments.gradients(zeros())
            if reentrant:
                backward_through_reentrant(ends, seeds, inputs)
                grads = [zero if x.grad is None else x.grad for x, zero in zip(inputs, zeros(), strict=True)]
                return arguments.gradients(grads)
            grads = _grad(
                ends, inputs, seeds, where, retain_graph=keep or graph, create_graph=graph and torch.is_grad_enabled()
            )
            return arguments.gradients([exclusive(grad) for grad in grads])

    return outs, pull


class _ReentrantError(LossError):
    """Refuse a graph that `torch.autograd.grad` cannot differentiate; `value_and_grad` tries again without it."""


def _grad(
    ends: list[Tensor], inputs: list[Tensor], seeds: list[Any], where: str, **options: bool
) -> tuple[Tensor, ...]:
    """Return `torch.autograd.grad`, zeros where it has none. Raises `_ReentrantError` for a reentrant checkpoint."""
    try:
        return torch.autograd.grad(ends, inputs, seeds, materialize_grads=True, **options)
    except RuntimeError as error:
        if any(map(is_reentrant, ends)):
            raise _ReentrantError(
                "a reentrant checkpoint is differentiated by value_and_grad in first order alone",
                where=where,
                got="torch.utils.checkpoint.checkpoint(..., use_reentrant=True)",
                want="use_reentrant=False",
            ) from error
        raise


def _by_torch_func(arguments: _Arguments, has_aux: bool) -> tuple[Any, Callable[[Any], Any]]:
    """Do the same as `_linearize` by `torch.func.vjp`, inside a transform of `torch.func`; exact in every order."""
    rebuild: list[Callable[..., Any]] = []

    def run(inputs: list[Tensor]) -> tuple[list[Any], list[Any]]:
        outs = arguments.call(inputs)
        leaves, build = tree.flatten(outs)
        rebuild[:] = [build]
        count = len(tree.leaves(outs[0])) if has_aux else len(leaves)
        return leaves[:count], leaves[count:]

    result: Any = torch.func.vjp(run, arguments.inputs, has_aux=True)  # annotated as a pair; has_aux returns three
    outs, pull, aux = result
    built = rebuild[0]([*outs, *aux])
    first = built[0] if has_aux else built
    return built, lambda cotangent: arguments.gradients(pull(_in_order_of(first, cotangent))[0])


def _in_order_of(outs: Any, cotangent: Any) -> list[Any]:
    """Return the leaves of a cotangent in the order of the leaves of `outs`; entries of dicts are matched by key.

    Raises `StateError` for one of another structure, `LossError` for a leaf of another shape.
    """
    cotangents = tree.at_leaves(outs, cotangent, "cotangent")
    for (path, out), grad in zip(tree.paths(outs).items(), cotangents, strict=True):
        tracked = isinstance(out, Tensor) and out.requires_grad
        fits = grad.shape == out.shape if isinstance(grad, Tensor) and isinstance(out, Tensor) else not tracked
        if not fits:
            where = ".".join(filter(None, ("cotangent", path)))
            got = f"a tensor {tuple(grad.shape)}" if isinstance(grad, Tensor) else repr(grad)[:60]
            raise LossError(
                "a cotangent does not have the shape of its output",
                where=where,
                got=got,
                want=f"a tensor {tuple(out.shape)}",
            )
    return cotangents


def _entrance(x: Tensor, graph: bool) -> Tensor:
    """Return a new tensor with the values of `x` to differentiate with respect to; with `graph`, attached to `x`."""
    if not graph or x.is_inference():
        x = x.detach()
        return (x.clone() if x.is_inference() else x).requires_grad_()
    with torch.enable_grad():
        inner = x.view_as(x)  # not x itself, which `f` may also read through a closure
    return inner if inner.requires_grad else inner.requires_grad_()


def _check_not_nested(args: Any, where: str) -> None:
    """Raise `LossError` if a graph leads beyond these arguments, and would be cut off."""
    if not torch.is_grad_enabled():
        return
    tensors = [x for x in tree.leaves(args) if isinstance(x, Tensor)]
    attached = any(x.grad_fn is not None for x in tensors)
    if getattr(forward_ad, "_current_level", 0) >= 0:  # private: inside a dual_level
        attached = attached or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    if attached or is_inside_loss():
        raise LossError(
            "a gradient inside a function that is differentiated has no graph",
            where=where,
            got="an argument with a graph (or a tangent)"
            if attached
            else f"{where} inside another one, or inside the loss of a step",
            want=f"{where}(..., create_graph=True): derivatives through it are exact",
            hint="under torch.no_grad() it is a constant",
        )


def _result(outs: Any, create_graph: bool) -> Any:
    """Return the value for the caller: detached, unless its graph is wanted."""
    graph = in_torch_func() or (create_graph and torch.is_grad_enabled())
    return outs if graph else tree.map(lambda x: x.detach() if isinstance(x, Tensor) else x, outs)
