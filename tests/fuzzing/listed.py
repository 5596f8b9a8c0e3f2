"""The differences that are known: which case meets which entry of `fds.config.decisions.INTENDED`."""

from __future__ import annotations

from tests.fuzzing.cases import Case
from tests.fuzzing.comparing import EVERYTHING, Listed
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


def first_doubling(case: Case, run: Run) -> int:
    """Return the step whose update DeepSpeed halves: the one after which the scale is doubled."""
    scales = [one or 0.0 for one in run.scales]
    found = (i - 1 for i in range(1, len(scales)) if scales[i] > scales[i - 1])
    return next(found, case.steps)


LISTED: tuple[Listed, ...] = (
    Listed("float16 at stage 0, 0.18 to 0.19.8", lambda case, run: kind(case) == "fp16" and stage(case) == 0,
           EVERYTHING),
    Listed("float16: on the update where the dynamic scale doubles",
           lambda case, run: kind(case) == "fp16" and first_doubling(case, run) < case.steps, EVERYTHING,
           first_doubling),
    Listed("`gradient_predivide_factor` at stage 3",
           lambda case, run: stage(case) == 3 and case.json.get("gradient_predivide_factor") == case.ranks > 1),
    Listed("`contiguous_gradients` false at stages 1 and 2 on several ranks",
           lambda case, run: case.json["zero_optimization"].get("contiguous_gradients") is False
           and stage(case) in (1, 2) and case.ranks > 1),
    Listed("`round_robin_gradients` on several ranks",
           lambda case, run: case.json["zero_optimization"].get("round_robin_gradients") is True
           and stage(case) in (1, 2) and case.ranks > 1, frozenset(("params", "import"))),
    Listed("`bf16.check_grad_overflow` skips no update at stage 3",
           lambda case, run: kind(case) == "bf16" and stage(case) == 3 and bool(case.loud), EVERYTHING,
           lambda case, run: case.loud[0]),
    Listed("bfloat16 with float32 sums at stage 1",
           lambda case, run: kind(case) == "bf16" and stage(case) == 1 and of_a_microbatch(case) and bool(case.loud)
           and run.error.startswith("AssertionError"), EVERYTHING),
    Listed("saves that cannot be made or loaded again",
           lambda case, run: kind(case) == "bf16" and case.json["optimizer"]["type"] == "Adagrad"
           and run.error.startswith("KeyError"), EVERYTHING),
    Listed("`bf16.check_grad_overflow` false",
           lambda case, run: case.json.get("bf16", {}).get("check_grad_overflow") is False and bool(case.loud),
           frozenset(("norms",)), lambda case, run: case.loud[0]),
    Listed("`torch_autocast` in float16: at stages 1 to 3",
           lambda case, run: in_autocast_float16(case) and stage(case) > 0, EVERYTHING),
    Listed("`torch_autocast` in float16: at stage 0",
           lambda case, run: in_autocast_float16(case) and stage(case) == 0 and bool(case.loud), EVERYTHING,
           lambda case, run: case.loud[0]),
    Listed("float16 with `reduce_scatter` false at stages 1 and 2",
           lambda case, run: kind(case) == "fp16" and stage(case) in (1, 2) and case.ranks > 1 and any(run.skipped)
           and case.json["zero_optimization"].get("reduce_scatter") is False, EVERYTHING,
           lambda case, run: run.skipped.index(True)),
    Listed("float16: an overflow at the least scale ends the training",
           lambda case, run: kind(case) == "fp16" and "already at minimum" in run.error, EVERYTHING),
    Listed("`grad_accum_dtype` float32 under bfloat16 does nothing at stage 2",
           lambda case, run: of_a_microbatch(case) and stage(case) == 2),
    Listed("stages 2 and 3 in bfloat16 with float32 messages",
           lambda case, run: kind(case) == "bf16" and stage(case) > 1 and case.ranks > 1
           and case.json.get("communication_data_type") == "fp32", frozenset(("norms", "params"))),
)  # fmt: skip
