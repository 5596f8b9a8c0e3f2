"""What two runs of a case differ in, field by field, and which of it is a listed difference.

Rounding: of float32 every number of a step is made by at most N additions, each of which rounds by eps to either side;
an update adds as much again. Of 16 bits a share d / ulp of the numbers differs by ulp where two are d apart: in the
2-norm sqrt(d ulp) (tests/peers/rounding.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import attrs

from tests.fuzzing.cases import Case
from tests.fuzzing.training import CLASSES, INPUTS, WIDTH, Run

FLOAT32, BFLOAT16, FLOAT16 = 2.0**-23, 2.0**-7, 2.0**-10
ADDITIONS = INPUTS + WIDTH + CLASSES
ALL = frozenset(("losses", "norms", "scales", "skipped", "params", "import"))
EVERYTHING = ALL | {"lrs", "error"}


@attrs.frozen
class Listed:
    """A difference that `fds.config.decisions` lists, or that torch's own rounding makes.

    Attributes:
        name: in a few words; those of `decisions` begin an entry of it.
        when: whether a case, run as DeepSpeed ran it, meets it.
        fields: what then need not agree.
        since: the first step that need not.
    """

    name: str
    when: Callable[[Case, Run], bool]
    fields: frozenset[str] = ALL
    since: Callable[[Case, Run], int] = lambda case, run: 0


def differences(case: Case, here: Run, there: Run, listed: tuple[Listed, ...]) -> Iterator[str]:
    """Yield the fields in which two runs differ, with the first numbers that do, but for what is listed."""
    met = [one for one in listed if one.when(case, there)]
    if here.error or there.error:
        if bool(here.error) != bool(there.error) and not any("error" in one.fields for one in met):
            yield f"fds: {here.error or 'trains'}\n    DeepSpeed: {there.error or 'trains'}"
        return
    for field, bound in bounds(case).items():
        end = min((one.since(case, there) for one in met if field in one.fields), default=case.steps)
        end += field == "scales" and end == case.steps  # they have one more
        ours, others = values(field, here)[:end], values(field, there)[:end]
        apart = [(step, a, b) for step, (a, b) in enumerate(zip(ours, others, strict=True))
                 if a is not None and b is not None and not close(a, b, bound)
                 and not (field == "norms" and _has_no_norm(there, step))]
        if apart:
            yield f"{field} from step {apart[0][0]}: fds {apart[0][1]!r}, DeepSpeed {apart[0][2]!r}"
    for field, behind, oracle in (
        ("import", here.resumed.get("deepspeed", []), there.losses[case.saved :]),
        ("resume", here.resumed.get("fds", []), here.losses[case.saved :]),
    ):
        bound = bounds(case)["losses"] if field == "import" else 0.0
        excused = min((one.since(case, there) for one in met if field in one.fields), default=case.steps) < case.steps
        if behind and not excused and not all(close(a, b, bound) for a, b in zip(behind, oracle, strict=True)):
            yield f"{field}: {behind}, and without stopping {oracle}"
    end = min((one.since(case, there) for one in met if "params" in one.fields), default=case.steps)
    if end == case.steps:
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


def values(field: str, run: Run) -> list:
    """Return the numbers of a field, one a step."""
    return getattr(run, field)


def close(a: float, b: float, bound: float) -> bool:
    """Say whether two numbers are the same but for rounding; what is not finite is so for both."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.isfinite(a) == math.isfinite(b)
    return abs(a - b) <= bound * max(abs(a), abs(b), 1e-3)


def _parameters(case: Case, here: Run, there: Run) -> Iterator[str]:
    bound = bounds(case)["losses"] * 4
    for name, others in there.params.items():
        ours = here.params[name]
        size = max(math.hypot(*ours), math.hypot(*others), 0.5)
        apart = math.hypot(*(a - b for a, b in zip(ours, others, strict=True)))
        if not apart <= bound * size and math.isfinite(math.hypot(*others)):
            yield f"parameter {name}: {apart:.3g} of {size:.3g} apart, at most {bound * size:.3g}"
