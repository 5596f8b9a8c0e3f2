"""Modules whose dimensions become smaller: what masks leave out of weights, biases and norms is not there any more.

A view that prunes whole structures has a method `removed(params, call) -> list[Cut]`, which `fds.bake` asks for.
Outputs are those of the masked module, but for rounding: a sum over fewer numbers, the others being 0, may be added up
in another order.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fds.errors import StateError, is_a, is_int

NUM_HEADS = ("num_heads", "heads", "n_heads", "n_head", "nhead", "num_attention_heads")  # attributes
WIDTHS = ("all_head_size", "split_size", "inner_dim")  # and with the number of columns of all heads


@attrs.frozen(eq=False)
class Cut:
    """What stays of a parameter along one dim. Where nothing stays, as of scores, the parameter is not there any more.

    Attributes:
        name: of the parameter.
        dim: along which it becomes shorter.
        keep: (its length,) bool, True where it stays.
        num_heads: of an output projection whose columns are those of heads, how many heads there are and stay.
    """

    name: str
    dim: int
    keep: Tensor
    num_heads: tuple[int, int] | None = None

    def __attrs_post_init__(self) -> None:
        heads: Any = self.num_heads
        right = is_a(self.name, str) and is_int(self.dim, 0) and is_a(self.keep, Tensor)
        right = right and self.keep.dim() == 1 and self.keep.dtype is torch.bool
        if not right or not (heads is None or (is_a(heads, tuple) and len(heads) == 2 and all(map(is_int, heads)))):
            raise StateError(
                "not a cut of a parameter",
                got=f"name={self.name!r}, dim={self.dim!r}, keep={self.keep!r}, num_heads={heads!r}"[:120],
                want="a name, a dim of 0 or more, a bool for each index along it, and heads before and after, or None",
            )


def merged(cuts: Iterable[Cut]) -> list[Cut]:
    """Return cuts of which each dim of a parameter has one: what all of its cuts keep."""
    places: dict[tuple[str, int], Cut] = {}
    for cut in cuts:
        if not is_a(cut, Cut):
            raise StateError("not a cut", got=repr(cut)[:80], want="fds.compression.Cut")
        old = places.get((cut.name, cut.dim), cut)
        if old.keep.shape != cut.keep.shape:
            got = f"{len(old.keep)} and {len(cut.keep)}"
            raise StateError("two cuts of a parameter are of different lengths", where=cut.name, got=got)
        num_heads = cut.num_heads or old.num_heads
        places[cut.name, cut.dim] = attrs.evolve(cut, keep=cut.keep & old.keep, num_heads=num_heads)
    return [*places.values()]


def shrink(module: nn.Module, cuts: Iterable[Cut]) -> nn.Module:
    """Return a copy of a module that is smaller, with parameters as its own but for what is cut off.

    Linear layers, convolutions in one group and batch norms become ones of fewer features (of a norm its statistics
    too). Where heads are cut, the attribute of an enclosing module that says how many there are says the new number:
    one of `num_heads`, `heads`, `n_heads`, `n_head`, `nhead`, `num_attention_heads`.

    Raises `StateError` for a parameter that is not there, is tied, or of a module that computes otherwise with fewer
    features (layer norms, say), for a `keep` of another length, and where no module says how many heads there are.
    """
    if not is_a(module, nn.Module) or not is_a(cuts, Iterable):
        got = f"{type(module).__name__}, {type(cuts).__name__}"
        raise StateError("shrink takes a module and cuts", got=got, want="nn.Module, [fds.compression.Cut(...)]")
    module = copy.deepcopy(module)
    cut_off(module, cuts)
    return module


def cut_off(module: nn.Module, cuts: Iterable[Cut]) -> None:
    """Do to a module in place what `shrink` does; where that raises, parts of it are smaller."""
    places = places_of(module)
    for cut in merged(cuts):
        path, _, last = cut.name.rpartition(".")
        owner = _owner(module, path, last)
        if not cut.keep.any():
            del owner._parameters[last]
            continue
        parameter = owner._parameters[last]
        assert parameter is not None
        if places[id(parameter)] > 1:
            raise _refused(cut.name, owner, "a parameter that one module has, in one place: it is tied")
        if cut.dim >= parameter.dim() or cut.keep.shape != (parameter.shape[cut.dim],):
            raise _refused(cut.name, owner, f"{tuple(cut.keep.shape)} along dim {cut.dim} of {tuple(parameter.shape)}")
        if cut.num_heads is not None:
            _drop_heads(module, path, *cut.num_heads, len(cut.keep), int(cut.keep.sum()))
        for other in _together(owner, last, cut.name):
            _select(owner, other, cut.dim, cut.keep)
    for owner in module.modules():
        _describe(owner)


def places_of(module: nn.Module) -> Counter[int]:
    """Return by `id` in how many places of modules parameters are; a layer that a module has twice is in two."""
    owners = [module, *(child for parent in module.modules() for child in parent._modules.values())]
    return Counter(id(p) for owner in owners if owner is not None for p in owner.parameters(recurse=False))


def _owner(module: nn.Module, path: str, last: str) -> nn.Module:
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        owner = None
    if owner is None or owner._parameters.get(last) is None:
        raise StateError("a parameter to shrink is not there", where=f"{path}.{last}", got=type(module).__name__)
    return owner


def _refused(name: str, owner: nn.Module, got: str) -> StateError:
    return StateError(
        "a parameter cannot be made smaller",
        where=f"{name} of {type(owner).__name__}",
        got=got,
        want="one of an nn.Linear, a convolution in one group, or a batch norm",
        hint="without related=, masks stay zeros in parameters of the same shape",
    )


def _together(owner: nn.Module, last: str, name: str) -> Sequence[str]:
    """Return the names in a module of what becomes shorter with one of its parameters."""
    if isinstance(owner, nn.modules.batchnorm._BatchNorm):
        return [n for n in ("weight", "bias", "running_mean", "running_var") if getattr(owner, n) is not None]
    grouped = isinstance(owner, nn.modules.conv._ConvNd) and (owner.groups != 1 or owner.transposed)
    if grouped or not isinstance(owner, nn.Linear | nn.modules.conv._ConvNd):
        raise _refused(name, owner, repr(owner)[:80])
    return [last]


def _select(owner: nn.Module, last: str, dim: int, keep: Tensor) -> None:
    """Replace a parameter or a buffer by what is kept of it."""
    x: Any = getattr(owner, last)
    smaller = x.detach().index_select(dim, keep.nonzero().flatten().to(x.device))  # of the meta device, too
    if isinstance(x, nn.Parameter):
        setattr(owner, last, nn.Parameter(smaller, requires_grad=x.requires_grad))
    else:
        setattr(owner, last, smaller)


def _describe(owner: Any) -> None:
    """Have a module say what sizes it has."""
    if isinstance(owner, nn.Linear):
        owner.out_features, owner.in_features = owner.weight.shape
        lengths = [owner.out_features]
    elif isinstance(owner, nn.modules.conv._ConvNd) and owner.groups == 1 and not owner.transposed:
        owner.out_channels, owner.in_channels = owner.weight.shape[:2]
        lengths = [owner.out_channels]
    elif isinstance(owner, nn.modules.batchnorm._BatchNorm) and owner.weight is not None:
        owner.num_features = len(owner.weight)
        return
    else:
        return
    if owner.bias is not None and [len(owner.bias)] != lengths:
        raise _refused("bias", owner, f"{len(owner.bias)} numbers for {lengths[0]} rows")


def _drop_heads(module: nn.Module, path: str, total: int, left: int, width: int, new_width: int) -> None:
    """Write the new number of heads where the innermost module around an output projection, or in it, says the old."""
    parts = path.split(".")
    for length in range(len(parts) - 1, -1, -1):
        around = module.get_submodule(".".join(parts[:length]))
        if isinstance(around, nn.MultiheadAttention):
            raise _refused(path, around, "an nn.MultiheadAttention, whose heads divide its width")
        owners: list[Any] = [m for m in around.modules() if any(getattr(m, n, None) == total for n in NUM_HEADS)]
        for owner in owners:
            renamed = {name: left for name in NUM_HEADS if getattr(owner, name, None) == total}
            renamed |= {name: new_width for name in WIDTHS if getattr(owner, name, None) == width}
            vars(owner).update(renamed)
        if owners:
            return
    raise StateError(
        "no module says how many heads there are",
        where=path,
        got=f"{total} heads",
        want=f"an attribute {', '.join(NUM_HEADS)} of a module around it",
    )
