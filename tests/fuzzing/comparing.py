"""What two runs of a case differ in, field by field, and which of it is a listed difference.

Rounding: of float32 every number of a step is made by at most N additions, each of which rounds by eps to either side;
an update adds as much again. Of 16 bits a share d / ulp of the numbers differs by ulp where two are d apart: in the
2-norm sqrt(d ulp) (tests/peers/rounding.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import attrs

from tests.fuzzing.cases import Case
from tests.fuzzing.training import CLASSES, INPUTS, WIDTH, Run

FLOAT32, BFLOAT16, FLOAT16 = 2.0**-23, 2.0**-7, 2.0**-10
ADDITIONS = INPUTS + WIDTH + CLASSES


@attrs.frozen
class Listed:
    """A difference that `fds.config.decisions` lists.

    A loss, a rate and a scale are known before the update of their step: what strikes there changes later ones only.

    Attributes:
        name: in a few words; those of `decisions` begin an entry of it.
        strikes: the steps at which a case, run as DeepSpeed ran it, meets it.
        fields: what it changes, from the first of them on.
        lasting: whether steps after it differ too; or else only those that it strikes.
    """

    name: str
    strikes: Callable[[Case, Run], Iterable[int]]
    fields: frozenset[str]
    lasting: bool = True

    def excuses(self, case: Case, run: Run, field: str, step: int) -> bool:
        """Say whether a field may differ at a step; the parameters at the end are those of step `case.steps`."""
        if field not in self.fields:
            return False
        strikes = [one for one in self.strikes(case, run) if field != "import" or one >= case.saved]
        if not strikes or not self.lasting:
            return step in strikes
        return step >= min(strikes) + (field not in ("norms", "skipped"))


def differences(case: Case, here: Run, there: Run, listed: tuple[Listed, ...]) -> Iterator[str]:
    """Yield the fields in which two runs differ, with the first numbers that do, but for what is listed."""

    def excused(field: str, step: int = case.steps) -> bool:
        return any(one.excuses(case, there, field, step) for one in listed)

    if here.error or there.error:
        if bool(here.error) != bool(there.error) and not excused("error"):
            yield f"fds: {here.error or 'trains'}\n    DeepSpeed: {there.error or 'trains'}"
        return
    limits = bounds(case)
    for field, limit in limits.items():
        least = _least_norm(case, there) if field == "norms" else 1e-3
        pairs = enumerate(zip(getattr(here, field), getattr(there, field), strict=True))
        apart = [
            (step, a, b)
            for step, (a, b) in pairs
            if a is not None
            and b is not None
            and not close(a, b, limit, least)
            and not (field == "norms" and _has_no_norm(there, step))
            and not excused(field, step)
        ]
        if apart:
            yield f"{field} from step {apart[0][0]}: fds {apart[0][1]!r}, DeepSpeed {apart[0][2]!r}"
    for field, limit, behind, oracle in (
        ("import", limits["losses"], here.resumed.get("deepspeed", []), there.losses[case.saved :]),
        ("resume", 0.0, here.resumed.get("fds", []), here.losses[case.saved :]),
    ):
        pairs = enumerate(zip(behind, oracle, strict=True), case.saved) if behind else ()
        if any(not close(a, b, limit) and not excused(field, step) for step, (a, b) in pairs):
            yield f"{field}: {behind}, and without stopping {oracle}"
    if not excused("params"):
        yield from _parameters(case, here, there)


def _has_no_norm(there: Run, step: int) -> bool:
    """Say whether DeepSpeed's norm is that of an earlier step, or of parameters that are not finite any more."""
    return there.skipped[step] or not math.isfinite(there.losses[step])


def bounds(case: Case) -> dict[str, float]:
    """Return how far two runs may be apart by rounding, by field."""
    ulp = FLOAT16 if "fp16" in case.json else BFLOAT16
    one = (2 * ADDITIONS + case.rows * case.ranks * case.microbatches) ** 0.5 * FLOAT32
    of_a_step = (one * ulp) ** 0.5 * 2 if in_sixteen_bits(case) else 4 * one
    several = case.steps**0.5 * of_a_step * 8
    return {"losses": several, "norms": several * 4, "lrs": 1e-12, "scales": 0.0, "skipped": 0.0}


def in_sixteen_bits(case: Case) -> bool:
    """Say whether anything is rounded to 16 bits."""
    sent = case.json.get("communication_data_type", "fp32")
    return bool({"fp16", "bf16", "torch_autocast"} & case.json.keys()) or sent != "fp32"


def close(a: float, b: float, bound: float, least: float = 1e-3) -> bool:
    """Say whether two numbers are the same but for rounding, that of numbers of at least this size.

    What is not finite is so for both.
    """
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) == math.isfinite(b)
    return abs(a - b) <= bound * max(abs(a), abs(b), least)


def _least_norm(case: Case, there: Run) -> float:
    """Return the size of gradients before they cancel in their mean: the largest norm of a step that is not loud.

    Gradients of microbatches and ranks are rounded to 16 bits one by one, and their mean is as inexact as they are.
    Where the number of microbatches is no power of two, the two do not even round the same numbers: DeepSpeed divides
    each loss by it, fds their sum.
    """
    quiet = [norm for step, norm in enumerate(there.norms) if norm is not None and step not in case.loud]
    return max(filter(math.isfinite, quiet), default=1e-3) if in_sixteen_bits(case) else 1e-3


def _parameters(case: Case, here: Run, there: Run) -> Iterator[str]:
    bound = bounds(case)["losses"] * 4
    for name, others in there.params.items():
        ours = here.params[name]
        size = max(math.hypot(*ours), math.hypot(*others), 0.5)
        apart = math.hypot(*(a - b for a, b in zip(ours, others, strict=True)))
        if not apart <= bound * size and math.isfinite(math.hypot(*others)):
            yield f"parameter {name}: {apart:.3g} of {size:.3g} apart, at most {bound * size:.3g}"
