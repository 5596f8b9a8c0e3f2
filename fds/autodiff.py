"""Gradients as values, on torch.autograd over leaves of their own.

`torch.func.grad` costs 45% more per step on small operators and refuses saved-tensor hooks, so
`torch.utils.checkpoint`; it is not the engine here, but what runs here may use it. Inside its transforms (`grad`,
`vmap`, ...) it is, since nothing else differentiates there.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import _engine_run_backward

from fds import tree
from fds.errors import LossError

_differentiated: ContextVar[bool] = ContextVar("fds_differentiated", default=False)


@contextlib.contextmanager
def differentiated() -> Iterator[None]:
    """Run what somebody will differentiate: inside, a gradient without a graph would be a wrong constant."""
    token = _differentiated.set(True)
    try:
        yield
    finally:
        _differentiated.reset(token)


def is_differentiated() -> bool:
    """Return whether this is the inside of a function that is being differentiated, with gradients enabled."""
    return _differentiated.get() and torch.is_grad_enabled()


def value_and_grad(
    f: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False, *, create_graph: bool = False
) -> Callable:
    """Return a function computing `f` and its gradients with respect to the arguments `argnums`.

    `f` returns a scalar, or `(scalar, aux)` with `has_aux`. The result returns `(value, grads)` or
    `((value, aux), grads)`; `grads` has the structure of the argument (a tuple of them for a tuple of `argnums`),
    zeros where `f` does not depend on a leaf and None at leaves that are not floating point.

    What it returns is detached, so inside another function that is differentiated (another `value_and_grad` or `vjp`,
    the loss of a step) it raises `LossError`, unless gradients are disabled there (`torch.no_grad()`). With
    `create_graph=True` value and gradients keep their graph, and derivatives of any order are exact:

    >>> value, grads = value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([1.0, 2.0])})
    >>> grads["w"]
    tensor([2., 4.])
    >>> slope = lambda x: value_and_grad(lambda x: x**3, create_graph=True)(x)[1]
    >>> value_and_grad(slope)(torch.tensor(2.0))  # 3 x^2 and its derivative, 6 x
    (tensor(12.), tensor(12.))
    """

    def once(args: tuple, kwargs: dict, *, reentrant: bool = False) -> Any:
        outs, pull = _linearize(f, argnums, has_aux, args, kwargs, "value_and_grad", create_graph=create_graph,
                                reentrant=reentrant)  # fmt: skip
        if has_aux and not (isinstance(outs, tuple) and len(outs) == 2):
            raise LossError("a function with aux returns a pair", where="value_and_grad", got=type(outs).__name__,
                            want="(scalar, aux)")  # fmt: skip
        value: Any = outs[0] if has_aux else outs
        check_scalar(value, "value_and_grad")
        if not (value.requires_grad or in_torch_func()):
            raise LossError(
                "the loss does not depend on the parameters", got="a value without a graph",
                want="a value computed from params", hint="look for .detach(), .item(), torch.no_grad() or a constant",
            )  # fmt: skip
        return _result(outs, create_graph), pull(torch.ones_like(value))

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return once(args, kwargs)
        except _ReentrantError:
            if create_graph:
                raise
            return once(args, kwargs, reentrant=True)  # from the start: value and gradients belong to the same draws

    return run


def vjp(f: Callable, *args: Any, create_graph: bool = False) -> tuple[Any, Callable[[Any], tuple]]:
    """Return `f(*args)` and a function for vector-Jacobian products.

    That function takes a cotangent, a tree of the structure of `f(*args)`, and returns a tuple with one gradient for
    each argument. `create_graph` is that of `value_and_grad`.

    Raises `StateError` for a cotangent of another structure and `LossError` for one of another shape, naming the leaf.
    """
    picked = tuple(range(len(args)))
    outs, pull = _linearize(f, picked, False, args, {}, "vjp", create_graph=create_graph, keep=True)
    return _result(outs, create_graph), pull


def backward_into(total: Tensor, seed: Tensor | None, leaves: Sequence[Tensor], *, reentrant: bool = False) -> None:
    """Add the gradients of `total` by `leaves` into their `.grad`, each as soon as it is ready.

    Unlike a list from `torch.autograd.grad`, which is whole before anyone can read it, this sums microbatches in
    place and frees each gradient at once; `leaves` are the step's own, so nobody else sees `.grad`. `reentrant` says
    what `is_reentrant(total)` is.
    """
    if not (leaves and total.requires_grad):  # the loss of another rank may depend on parameters, and this one not
        return
    if reentrant:
        _backward_through_reentrant([total], [seed], leaves)
        return
    # What torch.autograd.backward ends in; before that it calls two functions of Python for each of its inputs.
    with _no_reentrant_checkpoint():
        _engine_run_backward(
            (total,), (torch.ones_like(total) if seed is None else seed,), False, False, tuple(leaves),
            allow_unreachable=True, accumulate_grad=True,
        )  # fmt: skip


def backward_by(ends: Sequence[Any], seeds: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> None:
    """Do what `torch.autograd.backward(ends, seeds, inputs=leaves)` does.

    Raises `LossError` for a reentrant checkpoint.
    """
    with _no_reentrant_checkpoint():
        torch.autograd.backward(list(ends), list(seeds), inputs=list(leaves))


@contextlib.contextmanager
def _no_reentrant_checkpoint() -> Iterator[None]:
    """Raise `LossError` where torch refuses a reentrant checkpoint."""
    try:
        yield
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise LossError(
            "a reentrant checkpoint cannot be differentiated here", got="torch.utils.checkpoint.checkpoint(..., "
            "use_reentrant=True), in a pipeline or not in the first call of the step", want="use_reentrant=False",
        ) from error  # fmt: skip


def is_reentrant(total: Tensor) -> bool:
    """Return whether a part of the graph is computed again by a backward inside backward.

    So it is after `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`. It takes about 1 us per node.
    """
    return any(node.name() == "CheckpointFunctionBackward" for node in _nodes([total]))


def exclusive(grad: Tensor) -> Tensor:
    """Return `grad`, or a contiguous copy if its memory is shared with anything (a batch, another gradient).

    Autograd hands a gradient over without a copy when nobody holds the *tensor*; its storage may still be that of
    a view. Only memory that is ours may be written.
    """
    if grad.layout is not torch.strided:
        return grad.to_dense()
    return grad if is_alone(grad) and grad.is_contiguous() else grad.clone(memory_format=torch.contiguous_format)


def own(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Make the `.grad` of each leaf `exclusive`, and return the leaves that have none."""
    arrived, missing = list(leaves), []
    if not all(map(operator.is_not, map(tree.grad_of, leaves), itertools.repeat(None))):
        arrived, missing = [x for x in leaves if x.grad is not None], [x for x in leaves if x.grad is None]
    if not _all_exclusive(list(map(tree.grad_of, arrived))):
        for x in arrived:
            assert x.grad is not None
            x.grad = exclusive(x.grad)
    return missing


def _all_exclusive(grads: list[Tensor]) -> bool:
    """Say whether `exclusive` would return each of these as it is: 0.2 us for one."""
    if not (set(map(tree.layout_of, grads)) <= {torch.strided} and all(map(Tensor.is_contiguous, grads))):
        return False
    storages = list(map(Tensor.untyped_storage, grads))
    uses, counts = map(torch._C._storage_Use_Count, [s._cdata for s in storages]), map(sys.getrefcount, storages)
    return set(uses) <= {_ALONE_OF_MANY[0]} and set(counts) <= {_ALONE_OF_MANY[1]}


def is_alone(x: Tensor) -> bool:
    """Say whether nobody else holds the memory of `x`: no other tensor, and no storage object."""
    return all(n <= alone for n, alone in zip(_holders(x), _ALONE, strict=True))


def _holders(x: Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ALONE = _holders(torch.empty(1))  # how one tensor by itself is counted: 2 and 3 in torch 2.13


def _holders_of_many(tensors: list[Tensor]) -> tuple[int, int]:
    storages = list(map(Tensor.untyped_storage, tensors))
    return torch._C._storage_Use_Count(storages[0]._cdata), next(map(sys.getrefcount, storages))


_ALONE_OF_MANY = _holders_of_many([torch.empty(1)])  # the same, where a list holds the storage


def check_scalar(value: Any, where: str) -> None:
    """Raise `LossError` unless `value` is a floating-point tensor of no dims."""
    if not isinstance(value, Tensor):
        raise LossError("the loss is no tensor", where=where, got=type(value).__name__, want="a 0-d floating tensor",
                        hint="look for .item() or float(); a pair is (scalar, metrics)")  # fmt: skip
    if value.dim() != 0:
        raise LossError(
            "the loss is not a scalar", where=where, got=f"shape {tuple(value.shape)}", want="shape ()",
            hint="return loss.mean(), or fds.Mean(loss.sum(), loss.numel())",
        )  # fmt: skip
    if not value.is_floating_point():
        raise LossError("the loss is not floating point", where=where, got=str(value.dtype), want="a float dtype")


def _linearize(
    f: Callable, argnums: Any, has_aux: bool, args: tuple, kwargs: dict, where: str, *, create_graph: bool,
    keep: bool = False, reentrant: bool = False,
) -> tuple[Any, Callable]:  # fmt: skip
    """Return what `f` returns, and the function from a cotangent (of the first part, with aux) to the gradients."""
    picked = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if not all(-len(args) <= i < len(args) for i in picked):
        raise LossError("there is no argument to differentiate by", where=f"{where}, argnums", got=str(argnums),
                        want=f"numbers of the {len(args)} positional arguments, from 0")  # fmt: skip
    parts, build = tree.flatten([args[i] for i in picked])
    floats = [i for i, x in enumerate(parts) if tree.is_float(x)]

    def call(inputs: Sequence[Tensor]) -> Any:
        tracked, full = list(parts), list(args)
        for i, x in zip(floats, inputs, strict=True):
            tracked[i] = x
        for i, arg in zip(picked, build(tracked), strict=True):
            full[i] = arg
        with differentiated():
            return f(*full, **kwargs)

    def arrange(found: Sequence[Tensor]) -> Any:
        grads: list = [None] * len(parts)
        for i, grad in zip(floats, found, strict=True):
            grads[i] = grad
        return build(grads)[0] if isinstance(argnums, int) else tuple(build(grads))

    given = [parts[i] for i in floats]
    if in_torch_func():
        return _by_torch_func(call, given, arrange, has_aux)
    graph = create_graph and torch.is_grad_enabled()
    if not create_graph:
        _refuse_nesting((args, kwargs), where)
    with torch.inference_mode(False):
        inputs = [_entrance(x, graph) for x in given]
        with torch.enable_grad():
            outs = call(inputs)

    def pull(cotangent: Any) -> Any:
        if not create_graph:
            _refuse_nesting(cotangent, where)
        first = outs[0] if has_aux else outs
        pairs = zip(tree.leaves(first), _in_order_of(first, cotangent), strict=True)
        live = [(o, c) for o, c in pairs if isinstance(o, Tensor) and o.requires_grad]
        ends, seeds = [o for o, _ in live], [c for _, c in live]
        zeros = lambda: [torch.zeros_like(x, requires_grad=False) for x in inputs]
        with torch.inference_mode(False):
            if not (live and inputs):
                return arrange(zeros())
            if reentrant:
                _backward_through_reentrant(ends, seeds, inputs)
                return arrange([zero if x.grad is None else x.grad for x, zero in zip(inputs, zeros(), strict=True)])
            try:
                found = torch.autograd.grad(
                    ends, inputs, seeds, materialize_grads=True, retain_graph=keep or graph,
                    create_graph=graph and torch.is_grad_enabled(),
                )  # fmt: skip
            except RuntimeError as error:
                if any(map(is_reentrant, ends)):
                    raise _ReentrantError(
                        "a reentrant checkpoint is differentiated by value_and_grad in first order alone", where=where,
                        got="torch.utils.checkpoint.checkpoint(..., use_reentrant=True)", want="use_reentrant=False",
                    ) from error  # fmt: skip
                raise
            return arrange([exclusive(grad) for grad in found])

    return outs, pull


class _ReentrantError(LossError):
    """Refuse, or try again, what `torch.autograd.grad` cannot differentiate."""


def _backward_through_reentrant(
    ends: Sequence[Tensor], seeds: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> None:
    """Add gradients into the `.grad` of `leaves`, and of no other tensor that the graph shows.

    A backward inside backward is incompatible with naming what is to be differentiated.
    """
    known = {id(x) for x in leaves}
    others = {id(x): x for node in _nodes(ends) if (x := getattr(node, "variable", None)) is not None}
    before = [(x, x.grad) for key, x in others.items() if key not in known]
    for x, _ in before:
        x.grad = None
    try:
        torch.autograd.backward(list(ends), list(seeds))
    finally:
        for x, grad in before:
            x.grad = grad


def _nodes(ends: Sequence[Tensor]) -> Iterator[Any]:
    """Yield the nodes of a graph."""
    todo = [x.grad_fn for x in ends if x.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


def _by_torch_func(
    call: Callable, given: list[Tensor], arrange: Callable, has_aux: bool
) -> tuple[Any, Callable[[Any], Any]]:
    """Do what `_linearize` does by `torch.func.vjp`, exact in every order: for the inside of its transforms."""
    rebuild: list[Callable] = []

    def run(inputs: list[Tensor]) -> tuple[list, list]:
        outs = call(inputs)
        leaves, build = tree.flatten(outs)
        rebuild[:] = [build]
        own = len(tree.leaves(outs[0])) if has_aux else len(leaves)
        return leaves[:own], leaves[own:]

    outs, pull, aux = torch.func.vjp(run, given, has_aux=True)  # pyright: ignore[reportAssignmentType]
    built = rebuild[0]([*outs, *aux])
    first = built[0] if has_aux else built
    return built, lambda cotangent: arrange(pull(_in_order_of(first, cotangent))[0])


def _in_order_of(outs: Any, cotangent: Any) -> list:
    """Return the leaves of a cotangent in the order of what it is of: entries of dicts go by their keys.

    Raises `StateError` for one of another structure, `LossError` for a leaf of another shape.
    """
    found = tree.at_leaves(outs, cotangent, "cotangent")
    for (path, out), one in zip(tree.paths(outs).items(), found, strict=True):
        fits = one.shape == out.shape if isinstance(one, Tensor) and isinstance(out, Tensor) else not _is_tracked(out)
        if not fits:
            where = ".".join(filter(None, ("cotangent", path)))
            got = f"a tensor {tuple(one.shape)}" if isinstance(one, Tensor) else repr(one)[:60]
            raise LossError("a cotangent is not of the shape of what it is of", where=where, got=got,
                            want=f"a tensor {tuple(out.shape)}")  # fmt: skip
    return found


def _is_tracked(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def in_torch_func() -> bool:
    """Return whether this is the inside of a function that `torch.func` transforms."""
    return torch._C._are_functorch_transforms_active()


def _entrance(x: Tensor, graph: bool) -> Tensor:
    """Return the same values as a tensor of its own to differentiate by, whose graph leads on to `x` or begins here."""
    if not graph or x.is_inference():
        x = x.detach()
        return (x.clone() if x.is_inference() else x).requires_grad_()
    with torch.enable_grad():
        inner = x.view_as(x)  # not x itself: `f` may read that too, beside its argument
    return inner if inner.requires_grad else inner.requires_grad_()


def _refuse_nesting(args: Any, where: str) -> None:
    """Raise `LossError` where a graph leads beyond what is differentiated here, and would be cut."""
    if not torch.is_grad_enabled():
        return
    tensors = [x for x in tree.leaves(args) if isinstance(x, Tensor)]
    attached = any(x.grad_fn is not None for x in tensors)
    if getattr(forward_ad, "_current_level", 0) >= 0:  # inside a dual_level
        attached = attached or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    if attached or _differentiated.get():
        raise LossError(
            "a gradient inside a function that is differentiated has no graph", where=where,
            got="an argument with a graph (or a tangent)" if attached else
            f"{where} inside another one, or inside the loss of a step",
            want=f"{where}(..., create_graph=True): derivatives through it are exact",
            hint="under torch.no_grad() it is a constant",
        )  # fmt: skip


def _result(outs: Any, create_graph: bool) -> Any:
    """Return the value as the caller gets it: detached, unless its graph is wanted."""
    graph = in_torch_func() or (create_graph and torch.is_grad_enabled())
    return outs if graph else tree.map(_detach, outs)


def _detach(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x
