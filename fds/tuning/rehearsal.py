"""A rank's part of a candidate without its messages: how long it computes, and what it holds.

The rank is planned: the others do not exist, and a collective returns as if all had this one's values. So one device
can rehearse a rank of a hundred. Arithmetic is done on the values of a real state, since zeros, or what memory happens
to hold, may be slower (denormal numbers) or refused.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor

from fds import plans, tree
from fds.collectives import mesh
from fds.collectives.links import ALIKE, dry
from fds.collectives.meshes import Topology, planned
from fds.profiling.peaks import of_dry_run
from fds.profiling.planned import tell_headers, untouched
from fds.state import State
from fds.step import Step
from fds.transforms.checkpoint_activations import Recompute
from fds.transforms.pipeline.station import Pipeline
from fds.tuning.problem import Problem
from fds.tuning.spaces import Candidate

BLOCKS = 3  # of calls: their median counts


@attrs.frozen
class Message:
    """A kind of message of a rank in a call."""

    op: str
    axis: str
    num_bytes: int
    count: int


@attrs.frozen
class Footprint:
    """What is known of a candidate before anything of it runs.

    Attributes:
        num_bytes: at the peak of a call on the rank that holds most, activations included where `is_whole`.
        is_whole: whether a dry run said so; else formulas, which know no activations.
        messages: those of a call, by kind.
        unknown: why there was no dry run.
    """

    num_bytes: int
    is_whole: bool
    messages: tuple[Message, ...]
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
        description = step.describe(state)  # which after a dry run knows what stages send, and what is gathered again
    if num_bytes is None:
        away = sum(size for place, size in description.places.items() if place != "device")
        num_bytes = sum(description.num_bytes.values()) - away
    messages = tuple(Message(m.kind.op, m.kind.axis, m.kind.num_bytes, m.count) for m in description.messages)
    return Footprint(num_bytes, not unknown, messages, unknown)


def rehearse(tell: Callable[[Any], None], problem: Problem, candidates: tuple[Candidate, ...], seconds: float) -> None:
    """Tell for each candidate the seconds of a call without its messages, or the text of what it raised.

    In a pipeline they hold what this rank waits for others. All ranks of this machine rehearse the same candidate at a
    time, as they will share its memory and cores.
    """
    together, measured = mesh(ranks=-1), dict[int, plans.LayerCosts]()
    for candidate in candidates:
        together["ranks"].barrier()
        try:
            tell(_rehearsed(problem, candidate, together.rank, seconds, measured))
        except Exception as error:
            tell(f"{type(error).__name__}: {error}".split("\n")[0])


def _rehearsed(
    problem: Problem, candidate: Candidate, rank: int, seconds: float, measured: dict[int, plans.LayerCosts]
) -> float:
    make = functools.partial(problem.step, candidate)
    with planned(candidate.axes, rank) as ranks:
        step, share = make(ranks), problem.share(candidate, ranks)
        tell_headers(step, make, candidate.axes, lambda step: of_dry_run(step, untouched(step, problem.params), share))
        with alone():
            state = problem.init(step)
            return time_calls(step, state, share, seconds) + _waiting(step, share, measured)


def _waiting(step: Step, batch: Any, measured: dict[int, plans.LayerCosts]) -> float:
    """Return the seconds in which this rank waits for other stages in a call: 0 where there is no pipeline.

    It is what the plan leaves idle with the measured costs of its layers, messages aside. `measured` has them by the
    rows of a microbatch; what is not there yet is measured.
    """
    run = step.execute
    if not isinstance(run, Pipeline):
        return 0.0
    pairs = [x for x in tree.leaves(batch) if isinstance(x, Tensor)]
    rows = len(pairs[0]) // run.num_microbatches
    microbatch = tree.map(lambda x: x[:rows] if isinstance(x, Tensor) else x, batch)
    if rows not in measured:
        measured[rows] = plans.measure(run.owned.loss, microbatch)
    costs = measured[rows].by_stage(run.owned.boundaries)
    if any(isinstance(map_, Recompute) for map_ in step.layer):  # which runs forward again ahead of backward
        again = [costs.at("forward", s) + costs.at("backward_input", s) for s in range(run.owned.num_stages)]
        costs = attrs.evolve(costs, backward_input=again)
    line = plans.simulate(run.plan.plan, costs)
    return line.makespan - line.busy[run.owned.index]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let a rank take what others would tell it for what it says itself."""
    token = dry.set(ALIKE)
    try:
        yield
    finally:
        dry.reset(token)


def time_calls(step: Step, state: State, batch: Any, seconds: float, agree: Callable[[int], int] = int) -> float:
    """Return the seconds of a call: the median of blocks of at least `seconds`, after calls that learn and warm up.

    `agree` makes of the number of calls that this rank would time the one that all of them do.
    """
    metrics: Mapping[str, Tensor] = {}

    def run(calls: int) -> float:
        nonlocal state, metrics
        begin = time.perf_counter()
        for _ in range(calls):
            state, metrics = step(state, batch)
        tree.values_of(metrics["loss"])  # which waits for the device
        return (time.perf_counter() - begin) / calls

    run(2)
    calls = agree(math.ceil(seconds / max(run(1), 1e-6)))
    return statistics.median(run(calls) for _ in range(BLOCKS))
