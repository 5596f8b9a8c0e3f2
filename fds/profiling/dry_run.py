"""A dry run: operators run without arithmetic, into memory that nobody touches, so that only bytes are real.

Memory that was asked of the system and never written takes an address and no more. So everything that follows storages
(who shares which, what a pool may hand out again, what autograd saves) goes the way it goes in a real run, in the time
that the host takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from fds import tree
from fds.errors import FdsError

aten: Any = torch.ops.aten
# what the host reads is computed: counters, keys, flags, and what is made of those
_MOST_COMPUTED = 16  # elements of the arguments
_MOST_FILLED = 2**16  # elements of results, which then are ones: sums that are compared, and what is divided by
_SECRET_VIEWS = {aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten._unsafe_view.default}
_UNKNOWN = {aten.mkldnn_rnn_layer.default}  # of nn.LSTM: of what it keeps for backward oneDNN alone knows the size
_MOVES = {torch.Tag.data_dependent_output, torch.Tag.inplace_view}


class DryRun(TorchDispatchMode):
    """Run operators on large tensors without arithmetic: results have memory, and in it anything.

    Raises what `FakeTensorMode` raises for results whose shape depends on values; `FdsError` for operators that keep
    memory of which nothing is known, and for those that communicate past fds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._shapes = FakeTensorMode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what an operator writes, or new memory for its results."""
        kwargs = kwargs or {}
        given = [x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not hasattr(func, "_schema"):
            return func(*args, **kwargs)
        if func in _UNKNOWN or func.namespace == "c10d":
            raise FdsError(
                f"{func} cannot be run dry", want="operators whose memory is known from shapes, and collectives of fds"
            )
        if any(type(x) not in (Tensor, Parameter) for x in given):
            return NotImplemented  # such as a parameter that is gathered on use, which asks again with its values
        if _is_run(func):
            return func(*args, **kwargs)
        computed = all(x.numel() <= _MOST_COMPUTED for x in given)
        returned = func._schema.returns
        if func._schema.is_mutable and all(one.alias_info is not None for one in returned):
            return func(*args, **kwargs) if computed else _written(func, args, kwargs)
        with self._shapes:
            like_args, like_kwargs = tree.map(self._shape, (args, kwargs))
            outs = func(*like_args, **like_kwargs)
        if computed and all(x.numel() <= _MOST_FILLED for x in tree.leaves(outs) if isinstance(x, Tensor)):
            return func(*args, **kwargs)
        return tree.map(_memory, outs)

    def _shape(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        return FakeTensor(self._shapes, like, x.device)


def _is_run(func: Any) -> bool:
    """Say whether an operator computes nothing, or tells the host what it waits for."""
    return func.is_view or func in _SECRET_VIEWS or bool(_MOVES & {*func.tags})


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the arguments that an operator would write over, and return."""
    named = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    sets = {
        frozenset(one.alias_info.before_set): named.get(one.name) for one in func._schema.arguments if one.alias_info
    }
    outs = [sets[frozenset(one.alias_info.before_set)] for one in func._schema.returns]
    return None if not outs else outs[0] if len(outs) == 1 else tuple(outs)


def _memory(x: Any) -> Any:
    """Return memory like that of a tensor without any; of few elements they are ones."""
    if not isinstance(x, Tensor):
        return x
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return made.fill_(1) if x.numel() <= _MOST_FILLED else made
