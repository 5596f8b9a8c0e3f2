"""Backward passes into the `.grad` of leaves, who may write to these gradients, and what is being differentiated."""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward  # private: see `backward_into`

from fds import tree
from fds.errors import LossError

_differentiated: ContextVar[bool] = ContextVar("fds_differentiated", default=False)
is_inside_loss = _differentiated.get
# private: torch has no public function that tells the tensors of its transforms from others, not even by their type
_functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def differentiated() -> Iterator[None]:
    """Run code that will be differentiated: a gradient without a graph would be a wrong constant in it."""
    token = _differentiated.set(True)
    try:
        yield
    finally:
        _differentiated.reset(token)


def is_differentiated() -> bool:
    """Return whether this is the inside of a function that is being differentiated, with gradients enabled."""
    return _differentiated.get() and torch.is_grad_enabled()


def in_torch_func() -> bool:
    """Return whether this is the inside of a function that `torch.func` transforms."""
    return torch._C._are_functorch_transforms_active()  # private: torch has no public function for it


def is_wrapped(x: Tensor) -> bool:
    """Return whether a tensor stands for one sample, or for a value and its tangent, in a transform of `torch.func`."""
    return _functorch.is_functorch_wrapped_tensor(x)


def in_backward() -> bool:
    """Return whether this thread runs a backward, or what it computes again."""
    return torch._C._current_graph_task_id() != -1  # private; torch has no public function that says so


# Have a function called with a leaf whenever a gradient has been added to its `.grad`.
on_gradient: Callable[[Tensor, Callable[[Tensor], None]], Any] = Tensor.register_post_accumulate_grad_hook


def backward_into(
    total: Tensor,
    seed: Tensor | None,
    leaves: Sequence[Tensor],
    *,
    more: Sequence[Tensor] = (),
    reentrant: bool = False,
) -> None:
    """Add the gradients of `total` with respect to `leaves` and `more` into their `.grad`, each as soon as it is ready.

    `torch.autograd.grad` returns a list only when all gradients are ready; this sums microbatches in place and frees
    each gradient at once. The leaves belong to the step, so no other code sees their `.grad`. `reentrant` is the
    value of `is_reentrant(total)`.
    """
    if not (leaves and total.requires_grad):  # the loss depends on no parameters on this rank, perhaps on another one
        return
    if reentrant:
        backward_through_reentrant([total], [seed], [*leaves, *more])
        return
    # The last call in torch.autograd.backward, which before it calls two Python functions for each of its inputs.
    with _no_reentrant_checkpoint():
        _engine_run_backward(
            (total,),
            (torch.ones_like(total) if seed is None else seed,),
            False,
            False,
            (*leaves, *more),
            allow_unreachable=True,
            accumulate_grad=True,
        )


def backward_by(ends: Sequence[Any], seeds: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> None:
    """Run `torch.autograd.backward(ends, seeds, inputs=leaves)`. Raises `LossError` for a reentrant checkpoint."""
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
            "a reentrant checkpoint cannot be differentiated here",
            got="torch.utils.checkpoint.checkpoint(..., "
            "use_reentrant=True), in a pipeline or not in the first call of the step",
            want="use_reentrant=False",
        ) from error


def is_reentrant(total: Tensor) -> bool:
    """Return whether backward through this graph runs another backward pass inside.

    It does after `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)`. The search takes about 1 us per node.
    """
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes_behind([total]))


def backward_through_reentrant(
    ends: Sequence[Tensor], seeds: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> None:
    """Add gradients into the `.grad` of `leaves`, leaving the `.grad` of other leaves of the graph as it was.

    A reentrant checkpoint does not allow `inputs=leaves`, so backward accumulates into every leaf.
    """
    ids = {id(x) for x in leaves}
    others = {id(x): x for node in nodes_behind(ends) if (x := getattr(node, "variable", None)) is not None}
    before = [(x, x.grad) for key, x in others.items() if key not in ids]
    for x, _ in before:
        x.grad = None
    try:
        torch.autograd.backward(list(ends), list(seeds))
    finally:
        for x, grad in before:
            x.grad = grad


def nodes_behind(ends: Iterable[Any], stops: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield the nodes of the graph of the tensors among `ends`, but for what is behind one of the nodes `stops`."""
    todo = [x.grad_fn for x in ends if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = {*todo, *stops}
    while todo:
        node = todo.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


def exclusive(grad: Tensor) -> Tensor:
    """Return `grad`, or a contiguous copy if its memory is shared with anything (a batch, another gradient).

    Autograd returns a gradient without a copy when nothing else holds the *tensor*; its storage may still be that of
    a view. Only memory that is not shared may be written.
    """
    if grad.layout is not torch.strided:
        return grad.to_dense()
    is_alone = all(n <= alone for n, alone in zip(storage_counts(grad), _ALONE, strict=True))
    return grad if is_alone and grad.is_contiguous() else grad.clone(memory_format=torch.contiguous_format)


def own(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Make the `.grad` of each leaf `exclusive`, and return the leaves that have none."""
    grads = list(map(tree.grad_of, leaves))
    if all(map(operator.is_not, grads, itertools.repeat(None))) and _all_exclusive(grads):
        return []
    del grads
    for x in leaves:
        if x.grad is not None:
            x.grad = exclusive(x.grad)
    return [x for x in leaves if x.grad is None]


def _all_exclusive(grads: list[Tensor]) -> bool:
    """Return whether `exclusive` would return each of these gradients unchanged: 0.2 us per gradient."""
    try:
        if not all(map(Tensor.is_contiguous, grads)):
            return False
        storages = list(map(Tensor.untyped_storage, grads))
    except RuntimeError:  # a sparse one is neither contiguous nor has it a storage
        return False
    uses, counts = map(torch._C._storage_Use_Count, [s._cdata for s in storages]), map(sys.getrefcount, storages)
    return set(uses) <= {_ALONE_IN_LIST[0]} and set(counts) <= {_ALONE_IN_LIST[1]}


def storage_counts(x: Tensor) -> tuple[int, int]:
    """Return the reference counts of a tensor's storage, in C++ and in Python."""
    storage = x.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)  # private: no public count


_ALONE = storage_counts(torch.empty(1, device="cpu"))  # of a tensor that shares nothing: 2 and 3 in torch 2.13


def _counts_in_list(tensors: list[Tensor]) -> tuple[int, int]:
    storages = list(map(Tensor.untyped_storage, tensors))
    return torch._C._storage_Use_Count(storages[0]._cdata), next(map(sys.getrefcount, storages))


_ALONE_IN_LIST = _counts_in_list([torch.empty(1, device="cpu")])  # the same, where a list holds the storage
