"""What a rank of a candidate holds, before anything of it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs

from fds.collectives import mesh
from fds.collectives.meshes import Topology, planned
from fds.profiling.peaks import of_dry_run
from fds.profiling.planned import tell_headers, untouched
from fds.tuning.problem import Problem
from fds.tuning.spaces import Candidate


@attrs.frozen
class Footprint:
    """What is known of a candidate before anything of it runs.

    Attributes:
        num_bytes: at the peak of a call on the rank that holds most, activations included where `is_whole`.
        is_whole: whether a dry run said so; else formulas, which know no activations.
        unknown: why there was no dry run.
    """

    num_bytes: int
    is_whole: bool
    unknown: str = ""


def weigh(tell: Callable[[Any], None], problem: Problem, candidates: tuple[Candidate, ...]) -> None:
    """Tell for each candidate the footprint of its first rank, or the text of what composing it raised.

    The rank is planned, and nothing is computed or sent. So each of those that run weighs some, and tells None of the
    others.
    """
    here = mesh(ranks=-1)
    for i, candidate in enumerate(candidates):
        if i % here.size != here.rank:
            tell(None)
            continue
        try:
            tell(attrs.asdict(_weighed(problem, candidate)))
        except Exception as error:
            tell(f"{type(error).__name__}: {error}".split("\n")[0])


def _weighed(problem: Problem, candidate: Candidate) -> Footprint:
    """Weigh the first rank, and of a pipeline one rank of each stage: return the largest."""
    first = Topology.of(**candidate.axes).filter_match(**{name: 0 for name in candidate.axes if name != "pp"})
    return max((_of_rank(problem, candidate, rank) for rank in first), key=lambda footprint: footprint.num_bytes)


def _of_rank(problem: Problem, candidate: Candidate, rank: int) -> Footprint:
    make = functools.partial(problem.step, candidate)
    with planned(candidate.axes, rank) as ranks:
        step, share = make(ranks), problem.share(candidate, ranks)
        state = step.structure(problem.params)
        run = lambda step: of_dry_run(step, untouched(step, problem.params), share)
        num_bytes, unknown = None, ""
        try:
            tell_headers(step, make, candidate.axes, run)
            num_bytes = run(step)
        except Exception as error:  # what the step itself refuses a trial will say
            unknown = f"{type(error).__name__}: {error}".split("\n")[0]
        if num_bytes is None:
            description = step.describe(state)
            away = sum(size for place, size in description.places.items() if place != "device")
            num_bytes = sum(description.num_bytes.values()) - away
    return Footprint(num_bytes, not unknown, unknown)
