"""Comparing trees of tensors: to the bit, or within a derived rounding."""

import torch
from torch import Tensor

from fds import tree

_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, so that NaN equals itself and -0 is not 0."""
    return x.detach().contiguous().view(_INTS[x.element_size()])


def assert_same_bits(got, want) -> None:
    """Fail with the key path of the first leaf that differs in shape, dtype or a bit."""
    a, b = tree.paths(got), tree.paths(want)
    assert a.keys() == b.keys()
    for path in a:
        x, y = a[path], b[path]
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        assert torch.equal(bits(x), bits(y)), f"{path}: {x} != {y}"


def assert_rounding(got, want, *, additions: int, scale: float = 1.0) -> None:
    """Fail where leaves differ by more than eps(dtype) x additions x the scale of what was added."""
    a, b = tree.paths(got), tree.paths(want)
    assert a.keys() == b.keys()
    for path in a:
        if not a[path].is_floating_point():
            assert torch.equal(a[path], b[path]), path
            continue
        bound = torch.finfo(a[path].dtype).eps * additions * scale
        worst = (a[path] - b[path]).abs().max().item() if a[path].numel() else 0.0
        assert worst <= bound, f"{path}: differs by {worst}, rounding allows {bound}"


def snapshot(state):
    """Return a deep copy of a tree of tensors."""
    return tree.map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, state)
