"""Find a module's buffers in the state, for an `eval_fn` that calls the module without passing them."""

from __future__ import annotations

from typing import Any, Protocol

import attrs
from torch import Tensor, nn

from fds.errors import LossError


class _Applied(Protocol):
    """The part of what `fds.functional` returns that is needed here."""

    source: nn.Module
    initial: dict[str, Tensor]
    threaded: list[bool]


@attrs.frozen(eq=False)
class Carried:
    """The buffers of a state, and the tensors that they started from.

    A module's buffers are identified by the initial tensors, which `fds.functional` returned. Names cannot identify
    them: a loss may add prefixes, and other modules may have buffers of the same names.
    """

    initial: dict[str, Tensor]  # name in the state -> tensor that the loss was made with
    values: dict[str, Tensor]

    def of(self, module: Any) -> dict[str, Tensor]:
        """Return the state's buffers of a module, under its own names; none for a module that is not in the state.

        Raises `LossError` where this is ambiguous.
        """
        applied: _Applied = module
        names: dict[int, list[str]] = {}
        for name, x in self.initial.items():
            names.setdefault(id(x), []).append(name)
        found = {local: names[id(x)] for local, x in applied.initial.items() if id(x) in names}
        if any(len(several) > 1 for several in found.values()):
            _raise_ambiguous(applied, "a module whose buffers the state holds several times")
        if found:
            return {local: self.values[name] for local, (name,) in found.items()}
        memory = {_address(x) for x in self.initial.values()} - {None}
        if any(_address(x) in memory for x in applied.initial.values()):
            _raise_ambiguous(applied, "another call of fds.functional than that whose buffers are in the state")
        if applied.threaded or _in_training(applied.source):
            _raise_ambiguous(applied, "a module in training mode, whose buffers are not those of the state")
        return {}


def _raise_ambiguous(applied: _Applied, got: str) -> None:
    raise LossError(
        "eval_fn calls a module, and nothing says which buffers to use",
        where=", ".join(sorted(applied.initial)),
        got=got,
        want="apply(params, ..., buffers=...)",
        hint="fds.with_buffers(eval_fn, buffers) makes an eval_fn(params, batch, buffers) that receives the state's; "
        "module.eval() before fds.functional(module) selects the module's own",
    )


def _address(x: Tensor) -> tuple | None:
    """Return the device and address of a tensor, None where it has no memory."""
    return None if x.is_meta or not x.numel() else (x.device, x.data_ptr())


def _in_training(module: nn.Module) -> bool:
    """Say whether a call of the module would change batch statistics."""
    norms = (part for part in module.modules() if isinstance(part, nn.modules.batchnorm._NormBase))
    return any(part.training and part.running_mean is not None for part in norms)
