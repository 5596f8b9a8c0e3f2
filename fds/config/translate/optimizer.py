"""From a configuration to the optimizer and its schedule, as calls of fds."""

from __future__ import annotations

from typing import Any

from fds.config.keys.groups import Groups
from fds.config.keys.optimizer import NOT_YET, PARAMETERS
from fds.config.translate.function_call import Call
from fds.errors import ConfigError

_TAKEN = {  # function -> the parameters that it takes under their own names
    "adamw": ("betas", "eps", "bias_correction"),
    "adam": ("betas", "eps", "bias_correction"),
    "lamb": ("betas", "eps", "weight_decay", "min_coeff", "max_coeff", "bias_correction", "eps_inside_sqrt"),
    "lion": ("betas", "weight_decay"),
    "adagrad": ("lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
    "sgd": ("momentum", "weight_decay", "dampening", "nesterov"),
}


def optimizer(config: Groups) -> Call | None:
    """Return the call of the optimizer; None where the JSON has none that fds has."""
    if config.optimizer is None or (kind := str(config.optimizer.kind)) not in PARAMETERS or kind in NOT_YET:
        return None
    given = config.optimizer.arguments
    function = "adamw" if kind == "adam" and given.adam_w_mode else kind.lower()
    kwargs = {name: given[name] for name in _TAKEN[function]}
    if function in ("adamw", "adam"):
        kwargs["weight_decay"] = _weight_decay(given, function)
    if "betas" in kwargs:
        kwargs["betas"] = _cycled_betas(config) or given.betas
    return Call.of(function, schedule(config) or given.lr, **kwargs)


def schedule(config: Groups) -> Call | None:
    """Return the call of the schedule, one update late as DeepSpeed's is; None where the JSON has none that fds has."""
    if config.scheduler is None or config.scheduler.type not in _FORMULAS:
        return None
    made = _FORMULAS[config.scheduler.type](config, config.scheduler.arguments)
    return Call("schedules.delayed", (made,))


def _weight_decay(given: Any, function: str) -> float:
    torchs = given.torch_adam and function == "adamw" and "weight_decay" not in given.given
    return 0.01 if torchs else given.weight_decay


def _base_lr(config: Groups) -> float:
    """Return the learning rate that a scheduler finds in the optimizer."""
    if config.optimizer is None or config.optimizer.kind not in PARAMETERS:
        raise ConfigError("the scheduler takes its peak from the optimizer, and the JSON has none",
                          where="scheduler.params, optimizer.params.lr", got="no optimizer that is known",
                          want="an optimizer with lr, or scheduler.params.warmup_max_lr")
    return config.optimizer.arguments.lr


def _warmup(config: Groups, p: Any) -> Call:
    peak = _base_lr(config) if p.warmup_max_lr is None else p.warmup_max_lr
    return Call.of("schedules.warmup", peak, warmup_steps=p.warmup_num_steps, start=p.warmup_min_lr, kind=p.warmup_type)


def _warmup_decay(config: Groups, p: Any) -> Call:
    return Call.of("schedules.warmup_decay", p.warmup_max_lr, total_steps=p.total_num_steps,
                   warmup_steps=p.warmup_num_steps, start=p.warmup_min_lr, kind=p.warmup_type)


def _warmup_cosine(config: Groups, p: Any) -> Call:
    return Call.of("schedules.warmup_cosine", _base_lr(config), total_steps=p.total_num_steps,
                   warmup_steps=p.warmup_num_steps, start_ratio=p.warmup_min_ratio, end_ratio=p.cos_min_ratio,
                   kind=p.warmup_type)


def _one_cycle(config: Groups, p: Any) -> Call:
    return Call.of("schedules.one_cycle", p.cycle_min_lr, p.cycle_max_lr, **_shape(p), decay_rate=p.decay_lr_rate)


def _cycled_betas(config: Groups) -> tuple | None:
    """Return the betas that go against the learning rate; before its first step DeepSpeed has the lower one."""
    if config.scheduler is None or config.scheduler.type != "OneCycle":
        return None
    p = config.scheduler.arguments
    if not p.cycle_momentum:
        return None
    momentum = Call.of("schedules.one_cycle_momentum", p.cycle_min_mom, p.cycle_max_mom, **_shape(p),
                       decay_rate=p.decay_mom_rate)
    return (Call.of("schedules.delayed", momentum, before=float(p.cycle_min_mom)), 0.99)


def _range_test(config: Groups, p: Any) -> Call:
    return Call.of("schedules.lr_range_test", p.lr_range_test_min_lr, steps=p.lr_range_test_step_size,
                   rate=p.lr_range_test_step_rate, staircase=p.lr_range_test_staircase)


def _shape(p: Any) -> dict[str, Any]:
    return {
        "first_steps": p.cycle_first_step_size, "second_steps": p.cycle_second_step_size,
        "first_stairs": p.cycle_first_stair_count, "second_stairs": p.cycle_second_stair_count,
        "decay_steps": p.decay_step_size,
    }


_FORMULAS = {
    "WarmupLR": _warmup, "WarmupDecayLR": _warmup_decay, "WarmupCosineLR": _warmup_cosine, "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}
