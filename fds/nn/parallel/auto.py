"""Plans that are found by the structure of a module."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fds.errors import ComposeError
from fds.nn.parallel.plan import Column, Heads, Part, Row


def parts(module: nn.Module, prefix: str) -> dict[str, Part]:
    """Return what is divided of a module, by the paths of its submodules; nothing of one that nothing is known of."""
    found: dict[str, Part] = {}
    for path, one in module.named_modules():
        at = f"{path}." if path else ""
        if isinstance(one, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            found |= {f"{at}linear1": Column(), f"{at}linear2": Row()}
        if type(one) is nn.MultiheadAttention:
            found[path] = Heads()
    return found


def unknown(modules: Sequence[nn.Module]) -> ComposeError:
    """Return the error for modules of which nothing is known."""
    return ComposeError(
        "tensor_parallel knows no plan for this",
        where="plan='auto'",
        got=", ".join(type(module).__name__ for module in modules)[:120],
        want='{"blocks.*.up": "column", "blocks.*.down": "row"}',
    )
