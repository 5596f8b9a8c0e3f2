"""`profile`, of a training step, and `profile_model`, of a module's forward: run under a mode that counts."""

from __future__ import annotations

import time
from typing import Any

import attrs
import torch
from torch import nn

from fds import tree
from fds.errors import FdsError, checked_call
from fds.profiling.counting import counting
from fds.profiling.record import Profile, check_shown, profile_of
from fds.state import State
from fds.step import Step
from fds.step.stations import AtOnce


@checked_call
def profile(
    step: Step, state: State, batch: Any, *, depth: int | None = None, top: int = 1, detailed: bool = True
) -> Profile:
    """Count what a call of the step takes on this rank: flops, parameters, bytes and time, module by module.

    The step runs three times with this state and batch, to warm up, to be timed and to be counted, and what it returns
    is dropped. The state stays as it is: a step that donates runs as one that does not. What is compiled runs as it is
    written, and so does what CUDA graphs would replay. Where ranks share the step all of them call this; each gets its
    own profile, in a pipeline that of its own stages.

    Args:
        step: what `compose(...)(loss)` returned.
        state: of it.
        batch: as for a call.
        depth: levels of nested modules in the printed table; None: all.
        top: kinds of modules that the table names as the most expensive of each level.
        detailed: whether the table has a line for every module.

    Raises `FdsError` for what is no step and for other values of these, and all that a call raises.
    """
    check_shown(depth, top, detailed)
    if not isinstance(step, Step):
        raise FdsError(
            "only a step can be profiled",
            where="step",
            got=type(step).__name__,
            want="what fds.compose(...)(loss) returned",
            hint="fds.profile_model(model, example) profiles a module" if isinstance(step, nn.Module) else "",
        )
    plain = attrs.evolve(step, place=attrs.evolve(step.place, donate=False), run=AtOnce())
    with torch.compiler.set_stance("force_eager"):
        plain(state, batch)  # memory is touched, and what is found out in a first call is known
        start = _now(state.step.device)
        plain(state, batch)
        seconds = _now(state.step.device) - start
        with counting() as counted:
            plain(state, batch)
    structure, _ = step.structure_of(state.params)
    num_parameters = sum(leaf.numel for leaf in structure.leaves.values())
    rank = "" if step.everyone is None else f" on rank {step.everyone.index} of {step.everyone.size}"
    return profile_of(
        counted, num_parameters, f"Profile of a step{rank}", seconds=seconds, depth=depth, top=top, detailed=detailed
    )


@checked_call
def profile_model(
    model: nn.Module, example: Any, *, depth: int | None = None, top: int = 1, detailed: bool = True
) -> Profile:
    """Count what the forward of a module takes, in eval mode and without gradients, as `get_model_profile` does.

    `profile.phases["forward"]` has `flops` and `macs`, and `profile.num_parameters` counts parameters. The module runs
    three times, and is in its own mode again afterwards.

    Args:
        model: a module.
        example: what it is called with: a tensor, a tuple of arguments, or a dict of keywords.
        depth: levels of nested modules in the printed table; None: all.
        top: kinds of modules that the table names as the most expensive of each level.
        detailed: whether the table has a line for every module.

    Raises `FdsError` for what is no module and for other values of these, and all that the module raises.
    """
    check_shown(depth, top, detailed)
    if not isinstance(model, nn.Module):
        raise FdsError("only a module can be profiled", where="model", got=repr(model)[:80], want="an nn.Module")
    args = example if isinstance(example, tuple) else () if tree.is_dict(example) else (example,)
    kwargs = dict(example) if tree.is_dict(example) else {}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model(*args, **kwargs)
            start = _now(device)
            model(*args, **kwargs)
            seconds = _now(device) - start
            with counting() as counted:
                model(*args, **kwargs)
    finally:
        for part, mode in modes.items():
            part.training = mode
    num_parameters = sum(p.numel() for p in model.parameters())
    title = f"Profile of {type(model).__name__}"
    return profile_of(counted, num_parameters, title, seconds=seconds, depth=depth, top=top, detailed=detailed)


def _now(device: torch.device) -> float:
    """Return the time in seconds when the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
