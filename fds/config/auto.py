"""`"auto"`: values that another program knows, as in Hugging Face's integration.

Source: the documentation of transformers' DeepSpeed integration: which keys it fills, and from what.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fds.config.record import AUTO, is_comment
from fds.errors import ConfigError

MEANT = {"pipeline.stages"}  # paths where "auto" is a value of its own

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
_NOT_OF_ARGUMENTS = {  # only filled in: another value in the JSON contradicts nothing
    "scheduler.params.warmup_min_lr", "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold",
}


def training_arguments(
    arguments: Any, *, hidden_size: int | None = None, num_training_steps: int | None = None
) -> dict[str, Any]:
    """Return the values of `"auto"` keys that transformers would fill in: JSON path -> value.

    Args:
        arguments: transformers' `TrainingArguments`, or anything with their attributes; those it lacks stay unknown.
        hidden_size: of the model, in elements: the sizes of ZeRO's messages follow it.
        num_training_steps: updates of the whole training, where `max_steps` does not say it.
    """
    found = {path: getattr(arguments, name) for path, name in _OF_ARGUMENTS.items() if hasattr(arguments, name)}
    if hasattr(arguments, "adam_beta1"):
        found["optimizer.params.betas"] = [arguments.adam_beta1, arguments.adam_beta2]
    total = max(getattr(arguments, "max_steps", 0), 0) if num_training_steps is None else num_training_steps
    steps = _warmup_steps(arguments, total)
    counts = {"scheduler.params.total_num_steps": total or None, "scheduler.params.warmup_num_steps": steps}
    found |= {path: count for path, count in counts.items() if count is not None}
    found["scheduler.params.warmup_min_lr"] = 0.0
    return found | ({} if hidden_size is None else of_hidden_size(hidden_size))


def _warmup_steps(arguments: Any, total: int) -> int | None:
    """Return the updates of the warm-up, a number or a share of all; None where nobody knows. DeepSpeed takes no 0."""
    steps = getattr(arguments, "warmup_steps", None) or getattr(arguments, "warmup_ratio", None)
    if steps and steps < 1:
        return max(1, math.ceil(total * steps)) if total else None
    return max(1, int(steps or 0)) if hasattr(arguments, "warmup_steps") else None


def of_hidden_size(hidden_size: int) -> dict[str, int]:
    """Return the sizes of ZeRO's messages for a model whose layers are so wide, in elements."""
    return {
        "zero_optimization.reduce_bucket_size": hidden_size * hidden_size,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
    }


def with_batch_size(data: Mapping[str, Any], values: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Return the values with that of `train_batch_size`, which transformers makes of the other two and of the ranks.

    Where it is `"auto"`, what the values lack of the two is the JSON's, and one microbatch where nobody says it.
    """
    whole, micro, steps = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    said = {name: data.get(name) if data.get(name) != AUTO else None for name in (micro, steps)}
    rows, count = (values.get(name) for name in (micro, steps))
    if data.get(whole) == AUTO:
        rows, count = rows or said[micro], count or said[steps] or 1
    if whole in values or not isinstance(rows, int) or not isinstance(count, int) or type(world_size) is not int:
        return dict(values)
    return {**values, whole: rows * count * world_size}


def hint(data: Mapping[str, Any], values: Mapping[str, Any], where: str) -> str:
    """Return how to give the `"auto"`s of a JSON their values, where some have none; nothing where all have one."""
    open_ = [path for path in autos(data) if path not in values]
    if not open_:
        return ""
    steps = "num_training_steps=" if "total_num_steps" in where else "..."
    return (f'"auto" and without a value: {", ".join(open_)}; pass auto={{{open_[0]!r}: ..., ...}}, or of '
            f"transformers' arguments auto=fds.config.training_arguments(arguments, {steps})")


def filled(data: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON in which every `"auto"` has its value, or is gone where none is known, so that the default holds.

    A value whose key is absent is not needed. Raises `ConfigError` where the JSON says another value than that.
    """
    for path, value in values.items():
        said = _said(data, path.split("."))
        if said not in (None, AUTO, value) and path not in _NOT_OF_ARGUMENTS:
            raise ConfigError('a key that is not "auto" has another value', where=path, got=repr(said)[:80],
                              want=f'{value!r:.80}, or "auto"')
    return _filled(data, values, "")


def _said(data: Any, names: list[str]) -> Any:
    for name in names:
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def autos(data: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the JSON paths of all `"auto"` that are to be filled in."""
    found = []
    for name, value in data.items():
        if is_comment(name):
            continue
        if isinstance(value, Mapping):
            found += autos(value, f"{path}{name}.")
        elif isinstance(value, str) and value == AUTO and path + name not in MEANT:
            found.append(path + name)
    return found


def _filled(data: Mapping[str, Any], values: Mapping[str, Any], path: str) -> dict[str, Any]:
    out = {}
    for name, value in data.items():
        here = path + name
        if isinstance(value, Mapping):
            out[name] = _filled(value, values, f"{here}.")
        elif not (isinstance(value, str) and value == AUTO) or here in MEANT:
            out[name] = value
        elif here in values:
            out[name] = values[here]
    return out
