"""Losses of modules and of `Layers`, as `fds.initialize` takes them: `loss(model, batch)` becomes one of parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from torch import Tensor, nn

from fds.errors import ComposeError, LossError
from fds.loss import Layers, functional, with_buffers
from fds.step.checks.forms import takes


def loss_and_params(model: Any, loss: Callable | None) -> tuple[Any, Any]:
    """Return `loss_fn(params, batch)` of a module or `Layers`, and the argument of `step.init`.

    Raises `ComposeError` for a model or a loss that cannot be used.
    """
    if isinstance(model, Layers):
        if loss is not None:
            raise ComposeError(
                "`Layers` have their own criterion",
                where="loss",
                got=f"{loss!r:.60} and Layers",
                want="fds.Layers(layers, criterion)",
            )
        return model, model.init
    if not isinstance(model, nn.Module):
        raise ComposeError("not a model", where="model", got=type(model).__name__, want="a module, or fds.Layers")
    if any(x.is_meta for x in model.parameters()):
        raise ComposeError(
            "the parameters of the module have no values",
            where="model",
            got="parameters on meta",
            want="step.init(fds.recipe(Model)) of fds.compose(*config.transforms(mesh))(loss_fn)",
        )
    if loss is not None and not takes(2)(loss):
        raise ComposeError("not a loss", where="loss", got=repr(loss)[:60], want="loss(model, batch) -> scalar")
    apply, params, buffers = functional(model)
    name = type(model).__name__ if loss is None else getattr(loss, "__name__", type(loss).__name__)
    loss = _loss_of_module if loss is None else loss
    if not _changes_buffers(model):
        plain = lambda params, batch: loss(_Model(functools.partial(apply, params)), batch)
        plain.__name__ = name
        return plain, params

    def threaded(params: Any, batch: Any, buffers: dict[str, Tensor]) -> tuple[Any, dict, dict[str, Tensor]]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal buffers
            out, buffers = apply.with_buffers(params, buffers, *args, **kwargs)
            return out

        value = loss(_Model(call), batch)
        value, metrics = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
        return value, metrics, buffers

    threaded.__name__ = name
    return with_buffers(threaded, buffers), params


class _AttributeError(LossError, AttributeError):
    """An `AttributeError`, so that `hasattr` and `getattr` with a default work."""


@attrs.frozen(eq=False)
class _Model:
    """What a loss receives in place of the module: called like it, but with the parameters of the step."""

    call: Callable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        raise _AttributeError(
            "the model that a loss receives can be called, but has no attributes",
            where="loss(model, batch)",
            got=f"model.{name}",
            want="model(...)",
            hint="read settings from the module itself; for the parameters of the step, use loss_fn(params, batch) "
            "with fds.compose(*config.transforms(mesh))(loss_fn)",
        )


def _loss_of_module(model: Callable, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        out = model(**batch)
    else:
        out = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    return getattr(out, "loss", out)


def _changes_buffers(model: nn.Module) -> bool:
    """Return whether the module has batch statistics; changes of other buffers are refused when they happen."""
    return any(
        isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats for module in model.modules()
    )
