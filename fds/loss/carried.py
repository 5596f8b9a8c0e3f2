"""Which buffers of a state are a module's: for an `eval_fn` that calls it without passing them."""

from __future__ import annotations

from typing import Any, Protocol

import attrs
from torch import Tensor, nn

from fds.errors import LossError


class _Called(Protocol):
    """What `fds.functional` returned, as far as this asks it."""

    source: nn.Module
    initial: dict[str, Tensor]
    threaded: list[bool]


@attrs.frozen(eq=False)
class Carried:
    """The buffers of a state, and the tensors that they began as.

    A module's own are those that began as the very tensors that the same call of `fds.functional` returned: names say
    nothing, since a loss may give them prefixes, and other modules may have the same ones.
    """

    initial: dict[str, Tensor]  # name in the state -> tensor that the loss was made with
    values: dict[str, Tensor]

    def of(self, module: Any) -> dict[str, Tensor]:
        """Return the state's buffers of a module, under its own names; none for a module that is not in the state.

        Raises `LossError` where that cannot be told.
        """
        called: _Called = module
        names: dict[int, list[str]] = {}
        for name, x in self.initial.items():
            names.setdefault(id(x), []).append(name)
        found = {local: names[id(x)] for local, x in called.initial.items() if id(x) in names}
        if any(len(several) > 1 for several in found.values()):
            _refuse(called, "a module whose buffers the state holds several times")
        if found:
            return {local: self.values[name] for local, (name,) in found.items()}
        memory = {_address(x) for x in self.initial.values()} - {None}
        if any(_address(x) in memory for x in called.initial.values()):
            _refuse(called, "another call of fds.functional than that whose buffers are in the state")
        if called.threaded or _in_training(called.source):
            _refuse(called, "a module in training mode, and none of the tensors that the state's buffers began as")
        return {}


def _refuse(called: _Called, got: str) -> None:
    raise LossError(
        "eval_fn calls a module, and nothing says which buffers it is to see", where=", ".join(sorted(called.initial)),
        got=got, want="apply(params, ..., buffers=...)",
        hint="fds.with_buffers(eval_fn, buffers) makes an eval_fn(params, batch, buffers) that is given the state's; "
        "module.eval() before fds.functional(module) says that its own are meant",
    )  # fmt: skip


def _address(x: Tensor) -> tuple | None:
    """Return where a tensor lies, None where it has no memory."""
    return None if x.is_meta or not x.numel() else (x.device, x.data_ptr())


def _in_training(module: nn.Module) -> bool:
    """Say whether calling the module would have changed batch statistics."""
    norms = (part for part in module.modules() if isinstance(part, nn.modules.batchnorm._NormBase))
    return any(part.training and part.running_mean is not None for part in norms)
