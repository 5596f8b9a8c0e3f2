"""Partition layers into stages, as boundaries `[0, ..., num_layers]`; stage i has the layers b[i] to b[i + 1] - 1."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from fds.errors import PlanError, did_you_mean, nearest
from fds.plans.measuring import LayerCosts

NAMES = ("uniform", "parameters", "type:REGEX")
_WANTED = ", ".join(map(repr, NAMES))


def boundaries_of(
    partition: Any, num_stages: int, *, types: Sequence[str] = (), parameters: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the `num_stages + 1` boundaries of a user's `partition=`; every stage has at least one layer.

    Args:
        partition: `"uniform"` (sizes differ by at most one, larger stages first); `"parameters"` (minimizes the largest
            number of trainable parameters of a stage); `"type:REGEX"` (the same for the number of layers whose class
            name contains the pattern, ignoring case); a `LayerCosts` (the same for time); or boundaries.
        num_stages: number of stages.
        types: the class name of every layer; not needed with `LayerCosts` or `"parameters"`.
        parameters: number of trainable parameters of every layer; not needed with `LayerCosts`.

    Among the partitions with the smallest largest stage, the most even one is taken. Raises `PlanError`.

    >>> boundaries_of("type:block", 2, types=["Embedding", "Block", "Block", "Head"], parameters=[8, 1, 1, 8])
    (0, 2, 4)
    """
    if isinstance(partition, LayerCosts) and not types and not parameters:
        types, parameters = [""] * len(partition), [0] * len(partition)
    by_parameters = isinstance(partition, str) and partition == "parameters"
    if by_parameters and not parameters:
        raise PlanError(
            "the numbers of parameters of the layers are missing",
            where="partition",
            got=repr(partition),
            want="parameters=, one number per layer",
            hint="LayerCosts, as plans.measure returns them, do not need them",
        )
    if by_parameters and not types:
        types = [""] * len(parameters)
    num_layers = len(types)
    if len(parameters) != num_layers:
        raise PlanError("types and parameters differ in length", got=f"{len(parameters)} counts", want=f"{num_layers}")
    if num_stages < 1:
        raise PlanError("num_stages is not positive", where="num_stages", got=str(num_stages), want="1 or more")
    if num_layers < num_stages:
        raise PlanError(
            "there are fewer layers than stages",
            got=f"{num_layers} layers, {num_stages} stages",
            want="a layer for every stage",
            hint="fewer ranks or chunks, or smaller layers",
        )
    if isinstance(partition, LayerCosts):
        return _of_costs(partition.seconds, num_layers, num_stages)
    if not isinstance(partition, str):
        return _of_the_user(partition, num_layers, num_stages)
    if partition == "uniform":
        return tuple(partition_uniform(num_layers, num_stages))
    if partition == "parameters":
        return smallest_largest(parameters, num_stages)
    if partition.startswith("type:"):
        return smallest_largest(_matches(partition, types), num_stages)
    raise PlanError(
        "unknown partition",
        where="partition",
        got=repr(partition),
        want=f"{_WANTED}, LayerCosts or boundaries",
        hint=nearest(partition, NAMES),
    )


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return boundaries of parts whose sizes differ by at most one, larger ones first, as DeepSpeed 0.19.6 does.

    With fewer items than parts the last parts are empty. Raises `PlanError`.

    >>> partition_uniform(10, 4)
    [0, 3, 6, 8, 10]
    """
    _check_num_parts(num_parts)
    size, larger = divmod(num_items, num_parts)
    return [part * size + min(part, larger) for part in range(num_parts + 1)]


def partition_balanced(
    weights: Sequence[float], num_parts: int, *, minimise: Literal["bottleneck", "spread"] = "spread"
) -> list[int]:
    """Return the boundaries of DeepSpeed's `partition_balanced`, which are not always optimal.

    `"spread"` is that of 0.12.5 to 0.19.6: item by item it keeps the division with the smallest difference between the
    largest and the smallest part. `"bottleneck"` is that of earlier versions: it searches for the smallest largest part
    to a precision of 0.001. Either may leave a part empty. Pipelines need a layer in every stage: they use
    `smallest_largest`, and accept these as explicit boundaries. Raises `PlanError`.

    >>> partition_balanced([5, 1, 1, 1, 1, 1], 2), partition_balanced([5, 1, 1, 1, 1, 1], 2, minimise="bottleneck")
    ([0, 1, 6], [0, 1, 6])
    """
    _check_num_parts(num_parts)
    _check_weights(weights)
    if minimise not in _EDITIONS:
        raise PlanError("unknown objective", where="minimise", got=repr(minimise), want=" or ".join(_EDITIONS))
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return _EDITIONS[minimise](weights, num_parts)


def smallest_largest(weights: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Return boundaries of non-empty parts that minimize the weight of the heaviest part.

    Ties are broken by the smallest sum of squares, then by the latest last boundaries, so that equal weights are
    divided as by `partition_uniform`. O(parts * items * log items) + O(parts * items * items per part).
    Raises `PlanError`.

    >>> smallest_largest([5, 1, 1, 1, 1, 1], 3)
    (0, 1, 4, 6)
    """
    _check_num_parts(num_parts)
    _check_weights(weights)
    num_items = len(weights)
    if num_items < num_parts:
        raise PlanError("there are fewer items than parts", got=f"{num_items} items", want=f"{num_parts} or more")
    total = [0, *itertools.accumulate(weights)]
    limit = _smallest_limit(total, num_parts)
    # least[i]: the smallest sum of squares of the parts so far, of items 0 to i
    least = [0.0] + [math.inf] * num_items
    chosen: list[list[int]] = []
    for part in range(num_parts):
        now, start = [math.inf] * (num_items + 1), [0] * (num_items + 1)
        for end in range(part + 1, num_items + 1):
            for begin in range(end - 1, part - 1, -1):
                if (weight := total[end] - total[begin]) > limit:
                    break
                if (squares := least[begin] + float(weight) ** 2) < now[end]:
                    now[end], start[end] = squares, begin
        least = now
        chosen.append(start)
    boundaries = [num_items]
    for start in reversed(chosen):
        boundaries.append(start[boundaries[-1]])
    return tuple(reversed(boundaries))


def _smallest_limit(total: list, num_parts: int) -> float:
    """Return the smallest possible weight of the heaviest part; `total[i]` is the weight of the items before i."""
    best = [math.inf if i == 0 else total[i] for i in range(len(total))]  # of one part, up to i
    for part in range(2, num_parts + 1):
        # best[b] grows with the last boundary b and what follows it shrinks: the best b is where the two meet
        now = [math.inf] * len(total)
        for end in range(part, len(total)):
            begins = range(part - 1, end)
            meet = bisect.bisect_left(begins, True, key=lambda b, end=end, best=best: best[b] >= total[end] - total[b])
            near = [b for b in (part - 2 + meet, part - 1 + meet) if b in begins]
            now[end] = min(max(best[b], total[end] - total[b]) for b in near)
        best = now
    return best[-1]


def _least_spread(weights: Sequence[float], num_parts: int) -> list[int]:
    """Divide item by item, keeping for the items before each boundary only the division with the least spread."""
    total = [0.0, *map(float, itertools.accumulate(weights))]
    # of the parts so far, up to item i: (spread, the heaviest, the lightest, where the last begins)
    table = [[(0.0, 0.0, math.inf, 0)] + [(math.inf, math.inf, math.inf, 0)] * len(weights)]
    for part in range(1, num_parts + 1):
        before, now = table[-1], [(math.inf, math.inf, math.inf, 0)] * part
        for end in range(part, len(total)):
            best = (math.inf, math.inf, math.inf, 0)
            for begin in range(part - 1, end):
                weight = total[end] - total[begin]
                heaviest, lightest = max(before[begin][1], weight), min(before[begin][2], weight)
                if heaviest - lightest <= best[0]:  # of equals, the last
                    best = (heaviest - lightest, heaviest, lightest, begin)
            now.append(best)
        table.append(now)
    boundaries = [len(weights)]
    for row in reversed(table[1:]):
        boundaries.append(row[boundaries[-1]][3])
    return boundaries[::-1]


_STEP = 1e-3  # precision of the search


def _least_bottleneck(weights: Sequence[float], num_parts: int) -> list[int]:
    """Fill part after part to just below a limit, and halve the interval in which the limit lies."""
    total = list(itertools.accumulate(weights))
    low, high = total[-1] / num_parts, total[-1]
    while high > low + _STEP:
        middle = low + (high - low) / 2
        interval = (low, high)
        low, high = (low, middle) if _fill(total, num_parts, middle)[1] else (middle + _STEP, high)
        if (low, high) == interval:  # above 1e13 adding a thousandth changes nothing
            break
    return _fill(total, num_parts, high)[0]


def _fill(total: list, num_parts: int, limit: float) -> tuple[list[int], bool]:
    """Return the boundaries of parts each lighter than `limit`, and whether they hold all items.

    `total[i]` is the weight up to and including item i. If the first item alone reaches the limit, `total[end - 1]` is
    the last entry of the list, as in DeepSpeed: the first part is empty, the second has all items, and the result may
    be True.
    """
    num_items, boundaries, fence = len(total), [0], limit
    for _ in range(num_parts - 1):
        end = bisect.bisect_left(total, fence)
        if end == num_items:
            left = total[-1] - total[boundaries[-1]]
            return boundaries + [end] * (num_parts + 1 - len(boundaries)), left < limit
        boundaries.append(end)
        fence = total[end - 1] + limit
    return [*boundaries, num_items], fence >= total[-1]


_EDITIONS: dict[str, Callable[[Sequence[float], int], list[int]]] = {
    "bottleneck": _least_bottleneck,
    "spread": _least_spread,
}


def _matches(partition: str, types: Sequence[str]) -> list[int]:
    pattern = partition.removeprefix("type:")
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise PlanError("not a regular expression", where="partition", got=repr(partition), hint=str(error)) from None
    matches = [int(compiled.search(name) is not None) for name in types]
    if not pattern or not any(matches):
        raise PlanError(
            "the pattern matches no layer type",
            where="partition",
            got=repr(partition),
            want="type:REGEX",
            hint=did_you_mean(pattern, dict.fromkeys(types)),
        )
    return matches


def _of_costs(seconds: Sequence[float], num_layers: int, num_stages: int) -> tuple[int, ...]:
    if len(seconds) != num_layers:
        raise PlanError(
            "the costs have another number of layers",
            where="partition",
            got=f"{len(seconds)} layers",
            want=f"{num_layers}",
            hint="measure the layers that are trained",
        )
    return smallest_largest(seconds, num_stages)


def _of_the_user(partition: Any, num_layers: int, num_stages: int) -> tuple[int, ...]:
    want = f"{num_stages + 1} increasing numbers from 0 to {num_layers}, or {_WANTED}"
    error = lambda what: PlanError(what, where="partition", got=repr(partition)[:200], want=want)
    try:
        # not `int`: it would round 1.5, and read '12'
        boundaries = tuple(operator.index(b) for b in partition)
    except TypeError:
        raise error("a partition is a name, LayerCosts, or integer boundaries") from None
    if len(boundaries) != num_stages + 1:
        raise error(f"{num_stages} stages need {num_stages + 1} boundaries")
    if (boundaries[0], boundaries[-1]) != (0, num_layers):
        raise error("boundaries begin with 0 and end with the number of layers")
    if empty := [stage for stage, (a, b) in enumerate(itertools.pairwise(boundaries)) if a >= b]:
        raise error(f"stage {empty[0]} would have no layer")
    return boundaries


def _check_num_parts(num_parts: int) -> None:
    if num_parts < 1:
        raise PlanError("num_parts is not positive", where="num_parts", got=str(num_parts), want="1 or more")


def _check_weights(weights: Sequence[float]) -> None:
    for i, weight in enumerate(weights):
        if not 0 <= weight < math.inf:
            raise PlanError("a weight is negative or not finite", where=f"weights[{i}]", got=repr(weight))
