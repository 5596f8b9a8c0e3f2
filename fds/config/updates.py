"""From a configuration to the calls of its optimizer and of its learning rate's schedule."""

from __future__ import annotations

from typing import Any

from fds.config.function_call import FunctionCall
from fds.config.keys import Groups
from fds.config.keys.optimizer import NOT_YET, OPTIMIZERS
from fds.errors import ConfigError

_SAME_NAMES = {  # function -> parameters whose names are the same in the JSON
    "adamw": ("betas", "eps", "bias_correction"),
    "adam": ("betas", "eps", "bias_correction"),
    "lamb": ("betas", "eps", "weight_decay", "min_coeff", "max_coeff", "bias_correction", "eps_inside_sqrt"),
    "lion": ("betas", "weight_decay"),
    "adagrad": ("lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
    "sgd": ("momentum", "weight_decay", "dampening", "nesterov"),
    "onebit_adam": ("betas", "eps", "weight_decay"),
    "onebit_lamb": (
        *("betas", "eps", "weight_decay", "max_coeff", "min_coeff", "coeff_beta"),
        *("factor_max", "factor_min", "factor_threshold"),
    ),
    "zero_one_adam": (
        *("var_update_scaler", "local_step_scaler", "local_step_clipper"),
        *("betas", "eps", "weight_decay"),
    ),
}
_SPELLED = {"onebitadam": "onebit_adam", "onebitlamb": "onebit_lamb", "zerooneadam": "zero_one_adam"}


def optimizer_call(config: Groups) -> FunctionCall | None:
    """Return the call of the optimizer, or None if the JSON has none that is supported."""
    if config.optimizer is None or (kind := str(config.optimizer.kind)) not in OPTIMIZERS or kind in NOT_YET:
        return None
    parameters = config.optimizer.arguments
    function = "adamw" if kind == "adam" and parameters.adam_w_mode else kind.lower()
    function = _SPELLED.get(function, function)
    kwargs = {name: parameters[name] for name in _SAME_NAMES[function]}
    if function in ("adamw", "adam"):
        kwargs["weight_decay"] = _weight_decay(parameters, function)
    if function in ("onebit_adam", "onebit_lamb"):
        kwargs["freeze_step"] = max(parameters.freeze_step - 1, 1)  # DeepSpeed's first call updates nothing
    if function == "zero_one_adam":
        kwargs["var_freeze_step"] = max(parameters.var_freeze_step, 1)  # where the first update always is
    if "betas" in kwargs:
        kwargs["betas"] = _cycled_betas(config) or parameters.betas
    return FunctionCall.of(function, schedule_call(config) or parameters.lr, **kwargs)


def schedule_call(config: Groups) -> FunctionCall | None:
    """Return the call of the schedule, one update late as in DeepSpeed, or None if there is none."""
    if config.scheduler is None or config.scheduler.type not in _FORMULAS:
        return None
    curve = _FORMULAS[config.scheduler.type](config, config.scheduler.arguments)
    return FunctionCall("schedules.delayed", (curve,))


def _weight_decay(parameters: Any, function: str) -> float:
    default_of_torch = parameters.torch_adam and function == "adamw" and "weight_decay" not in parameters.given
    return 0.01 if default_of_torch else parameters.weight_decay


def _base_lr(config: Groups) -> float:
    """Return the learning rate that a scheduler takes from the optimizer."""
    if config.optimizer is None or config.optimizer.kind not in OPTIMIZERS:
        raise ConfigError(
            "the scheduler takes its peak from the optimizer, and the JSON has none",
            where="scheduler.params, optimizer.params.lr",
            got="no known optimizer",
            want="an optimizer with lr, or scheduler.params.warmup_max_lr",
        )
    return config.optimizer.arguments.lr


def _warmup_steps(p: Any) -> int:
    return max(2, p.warmup_num_steps)  # as DeepSpeed, also where the warm-up rises linearly


def _warmup(config: Groups, p: Any) -> FunctionCall:
    peak = _base_lr(config) if p.warmup_max_lr is None else p.warmup_max_lr
    return FunctionCall.of(
        "schedules.warmup", peak, warmup_steps=_warmup_steps(p), start=p.warmup_min_lr, kind=p.warmup_type
    )


def _warmup_decay(config: Groups, p: Any) -> FunctionCall:
    return FunctionCall.of(
        "schedules.warmup_decay",
        p.warmup_max_lr,
        total_steps=p.total_num_steps,
        warmup_steps=_warmup_steps(p),
        start=p.warmup_min_lr,
        kind=p.warmup_type,
    )


def _warmup_cosine(config: Groups, p: Any) -> FunctionCall:
    return FunctionCall.of(
        "schedules.warmup_cosine",
        _base_lr(config),
        total_steps=p.total_num_steps,
        warmup_steps=_warmup_steps(p),
        start_ratio=p.warmup_min_ratio,
        end_ratio=p.cos_min_ratio,
        kind=p.warmup_type,
    )


def _one_cycle(config: Groups, p: Any) -> FunctionCall:
    return FunctionCall.of(
        "schedules.one_cycle", p.cycle_min_lr, p.cycle_max_lr, **_shape(p), decay_rate=p.decay_lr_rate
    )


def _cycled_betas(config: Groups) -> tuple | None:
    """Return betas that move opposite to the learning rate; before its first step DeepSpeed uses the lower one."""
    if config.scheduler is None or config.scheduler.type != "OneCycle":
        return None
    p = config.scheduler.arguments
    if not p.cycle_momentum:
        return None
    momentum = FunctionCall.of(
        "schedules.one_cycle_momentum", p.cycle_min_mom, p.cycle_max_mom, **_shape(p), decay_rate=p.decay_mom_rate
    )
    return (FunctionCall.of("schedules.delayed", momentum, before=float(p.cycle_min_mom)), 0.99)


def _range_test(config: Groups, p: Any) -> FunctionCall:
    return FunctionCall.of(
        "schedules.lr_range_test",
        p.lr_range_test_min_lr,
        steps=p.lr_range_test_step_size,
        rate=p.lr_range_test_step_rate,
        staircase=p.lr_range_test_staircase,
    )


def _shape(p: Any) -> dict[str, Any]:
    return {
        "first_steps": p.cycle_first_step_size,
        "second_steps": p.cycle_second_step_size,
        "first_stairs": p.cycle_first_stair_count,
        "second_stairs": p.cycle_second_stair_count,
        "decay_steps": p.decay_step_size,
    }


_FORMULAS = {
    "WarmupLR": _warmup,
    "WarmupDecayLR": _warmup_decay,
    "WarmupCosineLR": _warmup_cosine,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}
