"""Gradients as values, on torch.autograd over detached leaves.

`torch.func.grad` costs 45% more per step on small operators and refuses saved-tensor hooks, which
`torch.utils.checkpoint` needs; so it is not the engine here. Inside the transforms of `torch.func` (`grad`, `vmap`,
...) it is, since nothing else can differentiate there.
"""

from fds.autodiff._backward import (
    backward_by,
    backward_into,
    differentiated,
    exclusive,
    in_backward,
    in_torch_func,
    is_differentiated,
    is_reentrant,
    is_wrapped,
    nodes_behind,
    on_gradient,
    own,
    storage_counts,
)
from fds.autodiff._value_and_grad import check_scalar, value_and_grad, vjp

__all__ = [
    "value_and_grad", "vjp", "check_scalar", "backward_by", "backward_into", "is_reentrant", "nodes_behind",
    "on_gradient", "exclusive", "own", "storage_counts", "differentiated", "in_backward", "in_torch_func",
    "is_differentiated", "is_wrapped",
]  # fmt: skip
