"""`teacher`: a model that is asked and never trained, beside the state of the model that is.

It is a composition of its own, all frozen, and a state of that, which no step of the student's has: so it is neither
updated nor saved. The transforms that say how parameters are held say it of a teacher's too: `shard_optimizer` at stage
3 keeps a slice on each rank and gathers what is used, `offload` keeps it on the host or on disk, `quantize_frozen` in
8 bits, `precision` computes in 16.

Source: Hinton et al. 2015, arXiv:1503.02531; Rajbhandari et al. 2020, arXiv:1910.02054, section 5 (stage 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import loss as losses, optim, tree
from fds.errors import ComposeError
from fds.loss.compiled import untraced
from fds.loss.modes import mode
from fds.state import State
from fds.step import Step, compose
from fds.step.parameters import open_parameters
from fds.step.residency.contract import deferred, hear
from fds.step.sharding.handles import materialize
from fds.step.stations import chosen_kernels
from fds.transforms.freeze import freeze


@attrs.frozen(eq=False, repr=False)
class Teacher:
    """A frozen model: `teacher(*args)` returns what its `forward(params, *args)` does, without gradients.

    Modules of `fds.functional` run in eval mode, and nothing that a step does to the modules of its loss is done to
    them. Where ranks share it all of them call it, as often and in the same places: inside a loss that every rank runs
    for each of its microbatches, say.

    Attributes:
        forward: `(params, *args)` -> a tree of tensors.
        step: the composition of its transforms.
        state: of that step, with the parameters as this rank holds them.
    """

    forward: Callable[..., Any]
    step: Step
    state: State

    def __repr__(self) -> str:
        words = [losses.name(self.forward), *map(str, self.step.composition[:-2])]
        return f"teacher({', '.join(words)})"

    @untraced("a teacher opens its parameters by itself; call it before what is compiled, and pass on what it returns")
    def __call__(self, *args: Any) -> Any:
        """Return what the model says, detached. Raises `StateError` for a state that was given up."""
        step, state = self.step, self.state
        structure, parts = step.held_by(state)
        residency = deferred(step.place.residency, step.everyone)
        masters = step.masters(structure, parts, state.step.device, residency)
        call, order = step.call(state, training=False), step.order("evaluate", structure)
        setting = step.settings(call, {}, 1)[0]
        for change in step.batch:  # such as the casts of fds.precision
            args = change(args, call)
        opened = step.microbatch(self.forward, structure).opened
        with chosen_kernels(step), torch.no_grad():
            params = open_parameters(
                step.gather, step.shard, structure, masters, step.runtime.pool, train=False, order=order
            )
            try:
                with opened(params.tree, args, setting, "values given to a teacher") as (seen, _), mode(setting.mode):
                    out = tree.map(_plain, self.forward(seen, *args))
                if order is not None:
                    order.finish()
            finally:
                params.close()
                if order is not None:
                    order.joins.clear()
        hear(residency)
        return out


def _plain(x: Any) -> Any:
    """Return what can be read when the parameters are gone."""
    return materialize(x).detach() if isinstance(x, Tensor) else x


def teacher(forward: Callable[..., Any], params: Any, *transforms: Any) -> Teacher:
    """Return a model that is asked and never trained: `fds.distill.teacher(apply, params)(tokens)`.

    A loss calls it, or the criterion of `fds.Layers`, in a pipeline on the ranks of the last stage. It belongs to no
    state of the student's: it is not trained, not saved, and `evaluate` runs it as training does.

    Args:
        forward: `(params, *args)` -> a tensor or a tree of them: what `fds.functional` returned, or a function.
        params: a tree of tensors, of which rank 0's values are taken, or a recipe, as `step.init` takes them.
        transforms: how the parameters are held and computed with, of the teacher's own: `fds.shard_optimizer(axis,
            stage=3)`, where each rank keeps one slice and gathers what is being used; `fds.offload(masters="host")`,
            where they are read from the host, or a disk, at each call; `fds.quantize_frozen()`; `fds.precision()`.

    Raises `ComposeError` for transforms that do nothing to a frozen model, and those that `compose` refuses;
    `StateError` for parameters that `step.init` refuses.
    """
    if not callable(forward) or isinstance(forward, type | torch.nn.Module):
        raise ComposeError(
            "a teacher is a function of its parameters",
            where="forward",
            got=type(forward).__name__,
            want="apply, of apply, params, _ = fds.functional(module), or a function (params, *args)",
        )
    for part in transforms:
        if isinstance(part, optim.Optimizer):
            raise ComposeError("a teacher is not trained", got=repr(part)[:80], want="no optimizer")
    step = compose(*transforms, freeze("*"), optim.sgd(lr=0.0))(forward)
    plain = {field.name: field.default for field in attrs.fields(Step)}
    if changed := [name for name in _OF_TRAINING if getattr(step, name) != plain[name] and getattr(step, name) != {}]:
        raise ComposeError(
            "a transform does nothing to a model that is not trained",
            where=f"station {changed[0]!r}",
            got=f"teacher(..., {', '.join(map(str, transforms))})",
            want="what holds or computes parameters: shard_optimizer, offload, quantize_frozen, precision, autocast",
        )
    return Teacher(forward, step, step.init(params))


_OF_TRAINING = ("split", "execute", "modules", "layer", "scale", "measure", "condition", "after", "run", "memory")
