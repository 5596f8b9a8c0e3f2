"""`"auto"`: values that are filled in by another program, as in Hugging Face's integration.

Source: the documentation of transformers' DeepSpeed integration: which keys it fills in, and from what.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fds.config.field import AUTO, is_comment
from fds.config.rows import MissingKeyError
from fds.errors import ConfigError

_OWN_VALUE = {"pipeline.stages"}  # paths where "auto" is a value of its own

_OF_ARGUMENTS = {  # JSON path -> attribute of transformers' TrainingArguments
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "adam_epsilon",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
_NOT_OF_ARGUMENTS = {  # may differ from the JSON, whose value then stays
    "scheduler.params.warmup_min_lr",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
}


def training_arguments(
    arguments: Any, *, hidden_size: int | None = None, num_training_steps: int | None = None
) -> dict[str, Any]:
    """Return the values that transformers would fill in for `"auto"`: JSON path -> value.

    Args:
        arguments: transformers' `TrainingArguments`, or an object with some of their attributes.
        hidden_size: of the model, in elements, from which the sizes of ZeRO's messages are computed.
        num_training_steps: updates of the whole training, if `max_steps` is not set.
    """
    values = {path: getattr(arguments, name) for path, name in _OF_ARGUMENTS.items() if hasattr(arguments, name)}
    if hasattr(arguments, "adam_beta1"):
        values["optimizer.params.betas"] = [arguments.adam_beta1, arguments.adam_beta2]
    total = max(getattr(arguments, "max_steps", 0), 0) if num_training_steps is None else num_training_steps
    steps = _warmup_steps(arguments, total)
    counts = {"scheduler.params.total_num_steps": total or None, "scheduler.params.warmup_num_steps": steps}
    values |= {path: count for path, count in counts.items() if count is not None}
    values["scheduler.params.warmup_min_lr"] = 0.0
    return values | ({} if hidden_size is None else of_hidden_size(hidden_size))


def _warmup_steps(arguments: Any, total: int) -> int | None:
    """Return the updates of the warm-up, from a number or a share of all, at least 1; None if unknown."""
    steps = getattr(arguments, "warmup_steps", None) or getattr(arguments, "warmup_ratio", None)
    if steps and steps < 1:
        return max(1, math.ceil(total * steps)) if total else None
    return max(1, int(steps or 0)) if hasattr(arguments, "warmup_steps") else None


def of_hidden_size(hidden_size: int) -> dict[str, int]:
    """Return the sizes of ZeRO's messages for a model of this width: JSON path -> elements."""
    return {
        "zero_optimization.reduce_bucket_size": hidden_size * hidden_size,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
    }


def with_batch_size(data: Mapping[str, Any], values: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Add `train_batch_size` to the values, computed as transformers does from the other two sizes and the ranks.

    If it is `"auto"`, a size without a value is the JSON's; the accumulation is then 1 by default.
    """
    whole, micro, steps = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    in_json = {name: data.get(name) if data.get(name) != AUTO else None for name in (micro, steps)}
    rows, count = (values.get(name) for name in (micro, steps))
    if data.get(whole) == AUTO:
        rows, count = rows or in_json[micro], count or in_json[steps] or 1
    if whole in values or not isinstance(rows, int) or not isinstance(count, int) or type(world_size) is not int:
        return dict(values)
    return {**values, whole: rows * count * world_size}


def explained(error: ConfigError, data: Mapping[str, Any], values: Mapping[str, Any]) -> ConfigError:
    """Return an error of the configuration that says which `"auto"` has no value, if that may be the reason."""
    missing = [path for path in auto_paths(data) if path not in values]
    hint = error.hint or (_hint(missing, error.where) if missing else "")
    needed = [path for path in error.where.split(", ") if path in missing and path.rpartition(".")[2] in error.want]
    if not needed or not isinstance(error, MissingKeyError):
        return ConfigError(error.what, where=error.where, got=error.got, want=error.want, hint=hint)
    what = 'a value is "auto", and nobody gave it'
    return ConfigError(what, where=", ".join(needed), got=error.what, want=f"a value for {error.want}", hint=hint)


def _hint(missing: list[str], where: str) -> str:
    steps = "num_training_steps=" if "total_num_steps" in where else "..."
    return (
        f'"auto" without a value: {", ".join(missing)}; pass auto={{{missing[0]!r}: ..., ...}}, or of '
        f"transformers' arguments auto=fds.config.training_arguments(arguments, {steps})"
    )


def fill(data: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON in which every `"auto"` is replaced by its value, or left out, so that the default applies.

    Values of absent keys are not used. Raises `ConfigError` if the JSON has another value.
    """
    for path, value in values.items():
        in_json = _value_at(data, path.split("."))
        if in_json not in (None, AUTO, value) and path not in _NOT_OF_ARGUMENTS:
            raise ConfigError(
                'a key that is not "auto" has another value',
                where=path,
                got=repr(in_json)[:80],
                want=f'{value!r:.80}, or "auto"',
            )
    return _fill(data, values, "")


def _value_at(data: Any, names: list[str]) -> Any:
    for name in names:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def auto_paths(data: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the JSON paths of every `"auto"` to be filled in."""
    paths = []
    for name, value in data.items():
        if is_comment(name):
            continue
        if isinstance(value, Mapping):
            paths += auto_paths(value, f"{path}{name}.")
        elif isinstance(value, str) and value == AUTO and path + name not in _OWN_VALUE:
            paths.append(path + name)
    return paths


def _fill(data: Mapping[str, Any], values: Mapping[str, Any], path: str) -> dict[str, Any]:
    out = {}
    for name, value in data.items():
        here = path + name
        if isinstance(value, Mapping):
            out[name] = _fill(value, values, f"{here}.")
        elif not (isinstance(value, str) and value == AUTO) or here in _OWN_VALUE:
            out[name] = value
        elif here in values:
            out[name] = values[here]
    return out
