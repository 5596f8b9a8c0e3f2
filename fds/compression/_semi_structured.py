"""Weights of which 2 of each 4 numbers of a row stay, as semi-structured tensors, which some GPUs multiply faster."""

from __future__ import annotations

import copy

import attrs
import torch
from torch import nn

from fds import tree
from fds.errors import ComposeError, StateError, is_a


@attrs.frozen
class Bytes:
    """What a weight of which 2 of each 4 numbers stay takes.

    Attributes:
        name: of the parameter.
        dense_bytes: with its zeros.
        held_bytes: as it is held: the same where no GPU multiplies it as a sparse one, else 9/16 of it in 16 bit.
        least_bytes: of its numbers that stay, and two bits for the place of each.
    """

    name: str
    dense_bytes: int
    held_bytes: int
    least_bytes: int


def semi_structured(module: nn.Module, *patterns: str) -> tuple[nn.Module, list[Bytes]]:
    """Return a copy of a module whose linear layers hold weights as torch's semi-structured tensors, and their bytes.

    Those layers multiply faster on GPUs of compute capability 8.0 and more, for inference alone. A weight stays a plain
    one where it is not on such a GPU, of another dtype than float16 and bfloat16, or of rows and columns that are no
    multiples of 32 and 64: outputs are the same.

    Args:
        module: which stays as it is.
        patterns: of names of parameters (`*` crosses dots); of these, the weights of linear layers.

    Raises `ComposeError` for no module and no patterns; `StateError` for a pattern that matches nothing, patterns that
    choose no weight of a linear layer, and a weight that has more than 2 numbers other than 0 in 4 of a row.
    """
    if not is_a(module, nn.Module) or not patterns or not all(is_a(p, str) for p in patterns):
        got = ", ".join(map(repr, patterns)) if is_a(module, nn.Module) else type(module).__name__
        raise ComposeError(
            "semi_structured takes a module and patterns of parameter names", got=got[:80], want='module, "*.weight"'
        )
    module, report = copy.deepcopy(module), list[Bytes]()
    shapes = {name: tuple(x.shape) for name, x in module.named_parameters()}
    matches = tree.match(patterns, shapes, what="semi_structured")
    linear = {f"{path}.weight".lstrip("."): x for path, x in module.named_modules() if isinstance(x, nn.Linear)}
    names = [name for name in shapes if name in matches and name in linear]
    if not names:
        raise StateError(
            "semi_structured: patterns choose no weight of a linear layer",
            got=tree.named([*patterns]),
            want="a weight of an nn.Linear",
            hint=f"they match {tree.named(sorted(matches))}",
        )
    for name in names:
        weight = linear[name].weight.detach()
        (rows, columns), dense = weight.shape, weight.nbytes
        if columns % 4 or (weight.unflatten(1, (-1, 4)) != 0).sum(-1).gt(2).any():
            raise StateError(
                "semi_structured: a weight has more than 2 numbers other than 0 in 4 of a row",
                where=name,
                got=f"{rows} x {columns}, {(weight == 0).double().mean():.0%} zeros",
                want="what prune_weights(block='2:4') leaves",
                hint="patterns may leave a weight out",
            )
        fits = weight.dtype in (torch.float16, torch.bfloat16) and not (rows % 32 or columns % 64)
        runs = fits and weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= (8, 0)
        if runs:
            sparse = torch.sparse.to_sparse_semi_structured(weight)
            linear[name].weight = nn.Parameter(sparse, requires_grad=False)
        report.append(Bytes(name, dense, dense * 9 // 16 if runs else dense, dense // 2 + weight.numel() // 8))
    return module, report
