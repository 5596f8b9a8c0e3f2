"""Backward passes that add gradients into the `.grad` of given leaves, reentrant checkpoints included."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward  # private: see `backward_into`

from fds.errors import LossError

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
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in _nodes([total]))


def backward_through_reentrant(
    ends: Sequence[Tensor], seeds: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> None:
    """Add gradients into the `.grad` of `leaves`, leaving the `.grad` of other leaves of the graph as it was.

    A reentrant checkpoint does not allow `inputs=leaves`, so backward accumulates into every leaf.
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
    """Yield the nodes of the graph of some tensors."""
    todo = [x.grad_fn for x in ends if x.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
