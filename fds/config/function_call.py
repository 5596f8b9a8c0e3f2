"""Calls of functions of fds as data, which print as Python and can be executed; those of optimizers and schedules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import attrs

from fds import compression, optim, plans, schedules, transports
from fds.collectives import Mesh
from fds.config.keys import Groups
from fds.config.keys.optimizer import NOT_YET, OPTIMIZERS
from fds.errors import ConfigError
from fds.media import disk
from fds.transforms.accumulate import accumulate
from fds.transforms.checkpoint_activations import checkpoint_activations
from fds.transforms.clip import clip_by_global_norm
from fds.transforms.context_parallel import context_parallel
from fds.transforms.curriculum import curriculum
from fds.transforms.freeze import quantize_frozen
from fds.transforms.layer_drop import layer_drop
from fds.transforms.loss_scale import loss_scale, skip_nonfinite, static_loss_scale
from fds.transforms.offload import offload
from fds.transforms.pipeline import pipeline
from fds.transforms.precision import autocast, precision
from fds.transforms.profiled import profiled
from fds.transforms.prune_structures import prune_channels, prune_heads, prune_rows
from fds.transforms.prune_weights import prune_weights
from fds.transforms.quantize_activations import quantize_activations
from fds.transforms.quantize_weights import quantize_weights
from fds.transforms.random_ltd import random_ltd
from fds.transforms.shard_optimizer import shard_optimizer
from fds.transforms.tensor_parallel import tensor_parallel

FUNCTIONS = {  # path below fds -> function; everything that a configuration may call or pass
    **{
        f.__name__: f
        for f in (
            accumulate,
            autocast,
            checkpoint_activations,
            clip_by_global_norm,
            context_parallel,
            curriculum,
            disk,
            layer_drop,
            loss_scale,
            offload,
            pipeline,
            precision,
            profiled,
            prune_channels,
            prune_heads,
            prune_rows,
            prune_weights,
            quantize_activations,
            quantize_frozen,
            quantize_weights,
            random_ltd,
            shard_optimizer,
            skip_nonfinite,
            static_loss_scale,
            tensor_parallel,
            optim.adam,
            optim.adamw,
            optim.lamb,
            optim.lion,
            optim.adagrad,
            optim.by_name,
            optim.sgd,
            optim.onebit_adam,
            optim.onebit_lamb,
            optim.zero_one_adam,
        )
    },
    **{f"schedules.{name}": getattr(schedules, name) for name in schedules.__all__},
    **{f"transports.{name}": getattr(transports, name) for name in ("hierarchical", "quantized", "rows")},
    "plans.one_f_one_b": plans.one_f_one_b,
    "compression.sensitivity": compression.sensitivity,
}


@attrs.frozen
class AxisOf:
    """An axis of the mesh by its name, which for several, flattened, has commas: "node,dp"."""

    name: str

    def __str__(self) -> str:
        return "mesh[" + ", ".join(f'"{name}"' for name in self.name.split(",")) + "]"


@attrs.frozen
class Name:
    """A function below `fds` that is passed, not called."""

    path: str

    def __str__(self) -> str:
        return f"fds.{self.path}"


@attrs.frozen
class FunctionCall:
    """A call of the function at a path below `fds`. Arguments may be calls, axes and names.

    >>> print(FunctionCall("adamw", (FunctionCall("schedules.warmup", (3e-4,)),), {"weight_decay": 0.1}))
    fds.adamw(fds.schedules.warmup(0.0003), weight_decay=0.1)
    """

    path: str
    args: tuple = ()
    kwargs: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def of(cls, path: str, *args: Any, **kwargs: Any) -> FunctionCall:
        """Return the call, without the keywords that equal the function's defaults, but with the kind of a schedule."""
        shown = {name: value for name, value in kwargs.items() if name == "kind" or value != default(path, name)}
        return cls(path, args, shown)

    def argument(self, name: str) -> Any:
        """Return the value of a keyword, or the function's default."""
        return self.kwargs.get(name, default(self.path, name))

    def build(self, mesh: Mesh | None) -> Any:
        """Execute the call; `mesh` is needed if it has axes among its arguments."""
        args = [_build(value, mesh) for value in self.args]
        return FUNCTIONS[self.path](*args, **{name: _build(value, mesh) for name, value in self.kwargs.items()})

    def __str__(self) -> str:
        arguments = [*map(_source, self.args), *(f"{name}={_source(value)}" for name, value in self.kwargs.items())]
        return f"fds.{self.path}({', '.join(arguments)})"


@functools.cache
def default(path: str, name: str) -> Any:
    """Return the default of an argument of the function at a path below `fds`."""
    return inspect.signature(FUNCTIONS[path]).parameters[name].default


def _build(value: Any, mesh: Mesh | None) -> Any:
    if isinstance(value, FunctionCall):
        return value.build(mesh)
    if isinstance(value, AxisOf):
        assert mesh is not None
        return mesh[tuple(value.name.split(","))]
    if isinstance(value, Name):
        return FUNCTIONS[value.path]
    if isinstance(value, dict):
        return {name: _build(item, mesh) for name, item in value.items()}
    return tuple(_build(item, mesh) for item in value) if isinstance(value, tuple) else value


def _source(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_source, value))}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {_source(item)}" for name, item in value.items()) + "}"
    return str(value) if isinstance(value, FunctionCall | AxisOf | Name) else repr(value)


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


SUMS = "*weight_scores"  # and not scores of rows and heads, which are learned


def beside_sums(optimizer: Any) -> dict[str, Any]:
    """Return the optimizers of parameters, by patterns, where an own one sums up scores."""
    return {SUMS: FunctionCall("compression.sensitivity"), "*": optimizer}


def with_schedule(optimizer: FunctionCall, schedule: Any) -> FunctionCall:
    """Return the call of an optimizer, or of one beside others, with another schedule."""
    if optimizer.path != "by_name":
        return attrs.evolve(optimizer, args=(schedule,))
    (by_pattern,) = optimizer.args
    return attrs.evolve(optimizer, args=({**by_pattern, "*": with_schedule(by_pattern["*"], schedule)},))


def schedule_call(config: Groups) -> FunctionCall | None:
    """Return the call of the schedule, one update late as in DeepSpeed, or None if there is none."""
    if config.scheduler is None or config.scheduler.type not in _FORMULAS:
        return None
    curve = _FORMULAS[config.scheduler.type](config, config.scheduler.arguments)
    asked = config.data_efficiency.data_routing.random_ltd
    if asked.enabled and asked.layer_token_lr_schedule.enabled:
        counts = {"layers": len(asked.random_ltd_layer_id), "total": asked.total_layer_num}
        kept, full = kept_tokens_call(config), asked.random_ltd_schedule.max_value
        curve = FunctionCall("schedules.by_layer_tokens", (curve, kept, full), counts)
    return FunctionCall("schedules.delayed", (curve,))


def kept_tokens_call(config: Groups) -> FunctionCall | None:
    """Return the call of the schedule of the tokens that layers keep, or None where they keep all."""
    asked = config.data_efficiency.data_routing.random_ltd
    kept, numbers = asked.random_ltd_schedule, asked.random_ltd_schedule.schedule_config
    if not asked.enabled:
        return None
    sizes = (kept.min_value, kept.max_value, numbers.require_steps)
    return FunctionCall.of("schedules.fixed_linear", *sizes, difficulty_step=numbers.seq_per_step)


def random_ltd_call(config: Groups) -> FunctionCall | None:
    """Return the call that has layers compute some of the tokens, or None."""
    asked, kept = config.data_efficiency.data_routing.random_ltd, kept_tokens_call(config)
    if kept is None:
        return None
    order = "seq_batch" if asked.hidden_state_order == "seq_batch_dim" else "batch_seq"
    return FunctionCall.of("random_ltd", asked.random_ltd_layer_id, kept, order=order)


def difficulty_call(config: Groups) -> FunctionCall | None:
    """Return the call of the schedule of the curriculum by length, or None if the JSON has none that composes."""
    asked = config.curriculum_learning
    if not asked.enabled or asked.curriculum_type != "seqlen" or asked.schedule_type == "custom":
        return None
    return schedule_of_difficulty(asked)


def schedule_of_difficulty(asked: Any) -> FunctionCall:
    """Return the call of a schedule of difficulty, of a group with its keys."""
    least, greatest, numbers = asked.min_difficulty, asked.max_difficulty, asked.schedule_config
    if asked.schedule_type == "fixed_discrete":
        if least == greatest:  # where DeepSpeed never asks
            return FunctionCall("schedules.fixed_discrete", ((greatest,), ()))
        call = FunctionCall("schedules.fixed_discrete", (numbers.difficulty, numbers.max_step))
        early = any(difficulty >= greatest for difficulty in numbers.difficulty[:-1])
        return FunctionCall("schedules.stay_at", (call, greatest)) if early else call
    sizes = (f"schedules.{asked.schedule_type}", least, greatest, numbers.total_curriculum_step)
    root = {"degree": numbers.root_degree} if asked.schedule_type == "fixed_root" else {}
    return FunctionCall.of(*sizes, **root, difficulty_step=numbers.difficulty_step)


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
