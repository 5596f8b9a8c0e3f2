"""The differences that are known: which case meets which entry of `fds.config.decisions.INTENDED`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from tests.fuzzing.cases import Case
from tests.fuzzing.comparing import Listed
from tests.fuzzing.training import Run


def stage(case: Case) -> int:
    return case.json["zero_optimization"]["stage"]


def kind(case: Case) -> str:
    return next((one for one in ("fp16", "bf16", "torch_autocast") if one in case.json), "fp32")


def of_a_microbatch(case: Case) -> bool:
    """Say whether sums have another dtype than the parameters in the step."""
    return "grad_accum_dtype" in case.json.get("data_types", {})


def in_autocast_float16(case: Case) -> bool:
    return case.json.get("torch_autocast", {}).get("dtype") in ("float16", "half")


def clips(case: Case) -> bool:
    return case.json.get("gradient_clipping", 1.0) > 0


def every(case: Case, run: Run) -> range:
    return range(case.steps)


def doublings(case: Case, run: Run) -> list[int]:
    """Return the steps whose updates DeepSpeed halves: those after which the scale is doubled."""
    scales = [one or 0.0 for one in run.scales]
    return [step for step in range(len(scales) - 1) if 0 < scales[step] < scales[step + 1]]


def ruined(case: Case, run: Run) -> list[int]:
    """Return the loud steps after which DeepSpeed's parameters are not finite."""
    ends = [math.isfinite(math.fsum(map(math.fsum, run.params.values())))]
    finite = [math.isfinite(loss) for loss in run.losses[1:]] + ends
    return [step for step in case.loud if not finite[step]]


def unchecked(case: Case, run: Run) -> bool:
    return case.json.get("bf16", {}).get("check_grad_overflow") is False


def norms_of_1(case: Case, run: Run) -> list[int]:
    return [step for step in case.loud if abs(run.norms[step] or 0.0) == 1]


def where(holds: Callable[[Case, Run], bool], steps: Callable[[Case, Run], Iterable[int]] = every) -> Callable:
    """Return the steps of a case for which this holds, and none of others."""
    return lambda case, run: steps(case, run) if holds(case, run) else ()


def loud(case: Case, run: Run) -> tuple[int, ...]:
    return case.loud


def skips(case: Case, run: Run) -> list[int]:
    return [step for step, skipped in enumerate(run.skipped) if skipped]


def failed(holds: Callable[[Case, Run], bool]) -> Callable:
    """Return that DeepSpeed ended, where this holds."""
    return where(lambda case, run: bool(run.error) and holds(case, run))


UPDATES = frozenset(("losses", "norms", "params", "import"))
SKIPS = frozenset(("skipped", "lrs"))
NORMS, SCALES = frozenset(("norms",)), frozenset(("scales",))
PARAMS, ERROR = frozenset(("params",)), frozenset(("error",))

LISTED: tuple[Listed, ...] = (
    Listed(
        "float16 at stage 0: an overflow halves the dynamic scale",
        where(
            lambda case, run: (
                kind(case) == "fp16"
                and stage(case) == 0
                and not case.json["fp16"].get("loss_scale")
                and case.json["fp16"].get("hysteresis", 2) > 1
            ),
            skips,
        ),
        UPDATES | SKIPS | SCALES,
    ),
    Listed(
        "float16: on the update where the dynamic scale doubles",
        where(lambda case, run: kind(case) == "fp16", doublings),
        UPDATES | SKIPS | SCALES,
    ),
    Listed(
        "`gradient_predivide_factor` at stage 3",
        where(lambda case, run: stage(case) == 3 and case.json.get("gradient_predivide_factor") == case.ranks > 1),
        UPDATES,
    ),
    Listed(
        "`bf16.check_grad_overflow` skips no update at stage 3",
        where(lambda case, run: kind(case) == "bf16" and stage(case) == 3, ruined),
        UPDATES | SKIPS,
    ),
    Listed(
        "bfloat16 with float32 sums at stage 1",
        failed(
            lambda case, run: (
                kind(case) == "bf16"
                and stage(case) == 1
                and of_a_microbatch(case)
                and bool(case.loud)
                and run.error.startswith("AssertionError")
            )
        ),
        ERROR,
    ),
    Listed(
        "saves that cannot be made or loaded again",
        failed(
            lambda case, run: (
                kind(case) in ("fp16", "bf16")
                and case.json["optimizer"]["type"] == "Adagrad"
                and (stage(case) == 0 or of_a_microbatch(case))
                and bool(case.saved)
                and run.error.startswith("KeyError")
            )
        ),
        ERROR,
    ),
    Listed("`bf16.check_grad_overflow` false", where(unchecked, norms_of_1), NORMS, lasting=False),
    Listed(
        "`bf16.check_grad_overflow` false",  # a gradient of zero, clipped by NaN, is none
        where(lambda case, run: unchecked(case, run) and clips(case) and case.unused, norms_of_1),
        PARAMS,
    ),
    Listed(
        "`torch_autocast` in float16: at stages 1 to 3",
        where(lambda case, run: in_autocast_float16(case) and stage(case) > 0),
        NORMS,
    ),
    Listed(
        "`torch_autocast` in float16: at stages 1 to 3",
        where(lambda case, run: in_autocast_float16(case) and stage(case) > 0 and clips(case)),
        UPDATES - NORMS,
    ),
    Listed(
        "`torch_autocast` in float16: an update that is skipped",
        where(lambda case, run: in_autocast_float16(case), loud),
        NORMS | {"skipped"},
        lasting=False,
    ),
    Listed(
        "`torch_autocast` in float16: an update that is skipped",
        where(lambda case, run: in_autocast_float16(case) and "scheduler" in case.json, loud),
        UPDATES | SKIPS,
    ),
    Listed(
        "float16 with `reduce_scatter` false at stages 1 and 2",
        where(
            lambda case, run: (
                kind(case) == "fp16"
                and stage(case) in (1, 2)
                and case.ranks > 1
                and case.json["zero_optimization"].get("reduce_scatter") is False
            ),
            skips,
        ),
        UPDATES | SKIPS | SCALES,
    ),
    Listed(
        "float16: an overflow at the least scale ends the training",
        failed(lambda case, run: kind(case) == "fp16" and "already at minimum" in run.error),
        ERROR,
    ),
    Listed(
        "`grad_accum_dtype` float32 under bfloat16 does nothing at stage 2",
        where(lambda case, run: of_a_microbatch(case) and stage(case) == 2 and case.microbatches > 1),
        UPDATES,
    ),
    Listed(
        "stages 2 and 3 in bfloat16 with float32 messages",
        where(
            lambda case, run: (
                kind(case) == "bf16"
                and stage(case) > 1
                and case.ranks > 1
                and case.microbatches > 1
                and case.json.get("communication_data_type") == "fp32"
            )
        ),
        frozenset(("norms", "params")),
    ),
)
