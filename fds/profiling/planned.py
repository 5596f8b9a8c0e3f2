"""What a rank holds at the peak of a call, found without it, and without the others.

Its part of the step runs dry: without arithmetic, in memory of this process that nobody touches. Where ranks tell each
other something, all are taken to say what this one does; what the stages of a pipeline send each other, each is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fds import tree
from fds.collectives import Mesh
from fds.collectives.meshes import planned
from fds.profiling.peaks import of_dry_run
from fds.state import State
from fds.step import Step


def of_planned(make: Callable[[Mesh], Step], axes: Mapping[str, int], rank: int, params: Any, batch: Any) -> int:
    """Return the bytes at the peak of a call of a rank that is only planned; nothing is computed, sent or written to.

    The other ranks are taken to say what this one does; those of a pipeline run dry as well, for what they send.
    `make` makes the step of a mesh, `params` is what `step.init` takes, `batch` the rank's. Raises what `of_dry_run`
    does.
    """
    run = lambda step: of_dry_run(step, untouched(step, params), batch)
    with planned(axes, rank) as ranks:
        step = make(ranks)
        tell_headers(step, make, axes, run)
        return run(step)


def untouched(step: Step, params: Any) -> State:
    """Return the state that `step.init(params)` would make, in memory of the CPU that nobody has touched."""

    def allocate(x: Any) -> Any:
        is_meta = isinstance(x, Tensor) and x.is_meta
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu") if is_meta else x

    return tree.map(allocate, step.structure(params))


def tell_headers(
    step: Step, make: Callable[[Mesh], Step], axes: Mapping[str, int], run: Callable[[Step], object]
) -> None:
    """Let a planned step of a pipeline know what other stages send it.

    Each of them is run by `run`, in the order of the ranks, and again where it lacked what a later one sends.
    """
    pipeline: Any = step.execute
    along = getattr(pipeline, "axis", None)
    if along is None or not hasattr(pipeline, "headers"):
        return
    headers, left = pipeline.headers, list(along.ranks)
    progress = True
    while left and progress:
        progress = False
        for other in tuple(left):
            with planned(axes, other) as ranks:
                stage: Any = make(ranks)
                stage.execute.headers.update(headers)
                with contextlib.suppress(Exception):  # of one that was not sent enough, or that raises by itself
                    run(stage)
                    left.remove(other)
                sent = {i: x for i, x in stage.execute.headers.items() if x and "failed" not in x}
            progress |= other not in left or sent.keys() > headers.keys()
            headers.update(sent)
