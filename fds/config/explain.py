"""Explain a configuration as Python: the composition, ready to paste, and comments on the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fds.config.auto import auto_paths
from fds.config.field import AUTO, Key
from fds.config.keys.groups import Groups
from fds.config.meaning import Argument, Elsewhere, NotApplicable, NotYet, PartOf
from fds.config.record import Config
from fds.config.translate.composition import compose_supported, data_ranks
from fds.config.translate.function_call import FunctionCall
from fds.config.translate.memory import rank_memory
from fds.config.translate.optimizer import optimizer_call, schedule_call
from fds.config.translate.unsupported import unsupported_keys
from fds.errors import ConfigError


def explain(config: Groups, axes: Mapping[str, int], num_parameters: int | None) -> str:
    """Return the explanation. Raises `ConfigError` for batch sizes that do not multiply."""
    calls, resolved = compose_supported(config, axes)
    parts = [
        _program(calls, axes, resolved),
        _section("batch", [*_batch(resolved, axes), *_casts(calls)]),
        _section("not supported yet: these keys are refused, and left out above", _unsupported(config)),
        _section(
            f"bytes on each rank, P parameters{' of its stage' * (axes.get('pp', 1) > 1)}",
            _memory(resolved, calls, axes, num_parameters),
        ),
        _section(f"defaults in force, of edition {config.defaults}", _defaults(resolved)),
        _section('"auto" without a value: the default', auto_paths(config.to_dict())),
        _section("given, without effect here", _without_effect(config, calls, axes)),
        _section("taken by other calls", _given_of(config, Elsewhere)),
        _section("not applicable", _given_of(config, NotApplicable)),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _program(calls: tuple[FunctionCall, ...], axes: Mapping[str, int], config: Groups) -> str:
    lines = ["import torch", ""] if any("torch." in str(call) for call in calls) else []
    sizes = ", ".join(f"{name}={size}" for name, size in axes.items())
    lines = ["import fds", *lines, *([""] if not lines else []), f"mesh = fds.mesh({sizes})", "step = fds.compose("]
    lines += [f"    {call}," for call in calls] + [")(loss_fn)"]
    if optimizer_call(config) is None:
        lines += ["# an optimizer of your own goes last; its learning rate:", f"# {_schedule(config)}"]
    return "\n".join([*lines, ""])


def _schedule(config: Groups) -> str:
    call = schedule_call(config)
    return "a number or a schedule" if call is None else str(call)


def _section(title: str, lines: Any) -> str:
    lines = list(lines)
    return "\n".join([f"# {title}", *(f"#   {line}" for line in lines), ""]) if lines else ""


def _batch(config: Groups, axes: Mapping[str, int]) -> Iterator[str]:
    batch, ranks = config.batch, data_ranks(axes)
    assert batch.train_batch_size is not None
    yield (
        f"train_batch_size {batch.train_batch_size} = {batch.train_micro_batch_size_per_gpu} rows "
        f"x {batch.gradient_accumulation_steps} microbatches x {ranks} data ranks"
    )
    yield f"a rank passes {batch.train_batch_size // ranks} rows to each call of the step"


def _memory(
    config: Groups, calls: tuple[FunctionCall, ...], axes: Mapping[str, int], num_parameters: int | None
) -> Iterator[str]:
    parts = rank_memory(config, calls, axes)
    for part in parts:
        numbers = "" if num_parameters is None else f" = {part.num_bytes(num_parameters // axes.get('pp', 1)):,}"
        yield f"{part.what}: {part.formula()}{numbers}"


def _unsupported(config: Groups) -> Iterator[str]:
    for path, feature in unsupported_keys(config):
        yield f"{path}: {feature}"


def _casts(calls: tuple[FunctionCall, ...]) -> Iterator[str]:
    if any(call.path == "precision" and call.args[0] != torch.float32 for call in calls):
        yield "float32 leaves of the batch are cast, targets too: fds.precision(..., inputs=...) names those to cast"


def _defaults(config: Groups) -> Iterator[str]:
    """Yield defaults that affect the training."""
    for path, value, key, given in config.walk():
        is_argument = isinstance(key.meaning, Argument) and not isinstance(value, Config)
        if not given and is_argument and _has_effect(config, path, value):
            yield f"{path} = {_json(value)}{_other_default(config, key)}"


def _other_default(config: Groups, key: Key) -> str:
    """Return the default of the other edition, if it differs, in parentheses."""
    if not key.differs:
        return ""
    source, other = ("the documentation says", "docs") if config.defaults == "0.19.6" else ("0.19.6 has", "0.19.6")
    return f" ({source} {_json(key.of(other))})"


def _has_effect(config: Groups, path: str, value: Any) -> bool:
    """Return whether a default has an effect: its group is enabled, and the value does not switch it off."""
    group = path.rpartition(".")[0]
    if (value in (None, False, 0) and not group.endswith("params")) or path == "gradient_predivide_factor":
        return False
    if group in ("fp16", "bf16", "amp", "torch_autocast"):
        return bool(config[f"{group}.enabled"])
    if path.startswith("zero_optimization.stage3_"):
        return config.zero_optimization.stage == 3 and path.endswith("param_persistence_threshold")
    return group in ("", "optimizer.params", "scheduler.params") and path != "scheduler"


def _given_of(config: Groups, meaning: type) -> Iterator[str]:
    """Yield the given keys with this kind of meaning."""
    for path, value, key, given in config.walk():
        if given and isinstance(key.meaning, meaning) and not isinstance(value, Config):
            yield f"{path} = {_json(value)}: {key.meaning}".replace(": not applicable:", ":").replace("`", "")


def _without_effect(config: Groups, calls: tuple[FunctionCall, ...], axes: Mapping[str, int]) -> Iterator[str]:
    """Yield given keys without which the calls would be the same here, though not in every configuration."""
    unsupported = {path for path, _ in unsupported_keys(config)}
    for path, value, key, given in config.walk():
        relevant = isinstance(key.meaning, Argument | NotYet | PartOf) and not isinstance(value, Config | Mapping)
        if not given or not relevant or path in unsupported or value in (AUTO, key.of(config.defaults)):
            continue
        try:
            if compose_supported(_without(config, path), axes)[0] == calls:
                yield f"{path} = {_json(value)}"
        except ConfigError:
            pass  # the key is required


def _without(config: Groups, path: str) -> Groups:
    """Return the configuration without a key. Raises `ConfigError` if that is not a valid configuration."""
    data = group = config.to_dict()
    *names, last = path.split(".")
    for name in names:
        group = group[name]
    del group[last]
    return type(config).from_dict(data, defaults=config.defaults)


def _json(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)
