"""What a configuration comes to, in words that are also a program: Python to paste, and comments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fds.config.auto import autos
from fds.config.keys.groups import Groups
from fds.config.meaning import Argument, Elsewhere, NotApplicable, NotYet, Part
from fds.config.record import AUTO, Config, Key
from fds.config.translate.composition import composed, data_ranks
from fds.config.translate.function_call import Call
from fds.config.translate.memory import held
from fds.config.translate.optimizer import optimizer, schedule
from fds.config.translate.unsupported import not_there
from fds.errors import ConfigError


def explain(config: Groups, axes: Mapping[str, int], num_parameters: int | None) -> str:
    """Return the explanation. Raises `ConfigError` for batch sizes that do not multiply."""
    calls, resolved = composed(config, axes)
    parts = [
        _program(calls, axes, resolved),
        _section("batch", [*_batch(resolved, axes), *_casts(calls)]),
        _section("not there yet: these keys are refused, and what is above leaves them out", _lacking(config)),
        _section(f"bytes on each rank, P parameters{' of its stage' * (axes.get('pp', 1) > 1)}",
                 _memory(resolved, calls, axes, num_parameters)),
        _section(f"defaults in force, of edition {config.defaults}", _defaults(resolved)),
        _section('"auto", and nobody said what: defaults', autos(config.to_dict())),
        _section("given, and without effect here", _idle(config, calls, axes)),
        _section("taken by other calls", _given(config, Elsewhere)),
        _section("not applicable", _given(config, NotApplicable)),
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _program(calls: tuple[Call, ...], axes: Mapping[str, int], config: Groups) -> str:
    lines = ["import torch", ""] if any("torch." in str(call) for call in calls) else []
    named = ", ".join(f"{name}={size}" for name, size in axes.items())
    lines = ["import fds", *lines, *([""] if not lines else []), f"mesh = fds.mesh({named})", "step = fds.compose("]
    lines += [f"    {call}," for call in calls] + [")(loss_fn)"]
    if optimizer(config) is None:
        lines += ["# an optimizer of your own goes last; its learning rate:", f"# {_schedule(config)}"]
    return "\n".join([*lines, ""])


def _schedule(config: Groups) -> str:
    call = schedule(config)
    return "a number or a schedule" if call is None else str(call)


def _section(title: str, lines: Any) -> str:
    lines = list(lines)
    return "\n".join([f"# {title}", *(f"#   {line}" for line in lines), ""]) if lines else ""


def _batch(config: Groups, axes: Mapping[str, int]) -> Iterator[str]:
    batch, ranks = config.batch, data_ranks(axes)
    assert batch.train_batch_size is not None
    yield (f"train_batch_size {batch.train_batch_size} = {batch.train_micro_batch_size_per_gpu} rows "
           f"x {batch.gradient_accumulation_steps} microbatches x {ranks} data ranks")
    yield f"a rank passes {batch.train_batch_size // ranks} rows to each call of the step"


def _memory(
    config: Groups, calls: tuple[Call, ...], axes: Mapping[str, int], num_parameters: int | None
) -> Iterator[str]:
    parts = held(config, calls, axes)
    for part in parts:
        numbers = "" if num_parameters is None else f" = {part.num_bytes(num_parameters // axes.get('pp', 1)):,}"
        yield f"{part.what}: {part.formula()}{numbers}"


def _lacking(config: Groups) -> Iterator[str]:
    for path, feature in not_there(config):
        yield f"{path}: {feature}"


def _casts(calls: tuple[Call, ...]) -> Iterator[str]:
    if any(call.path == "precision" and call.args[0] != torch.float32 for call in calls):
        yield "float32 leaves of the batch are cast, targets too: fds.precision(..., inputs=...) names those to cast"


def _defaults(config: Groups) -> Iterator[str]:
    """Yield what nobody said and yet shapes the training: defaults of switches that are on."""
    told = {path: (value, known) for path, value, known, given in config.walk() if not given}
    for path, (value, known) in told.items():
        if isinstance(known.meaning, Argument) and not isinstance(value, Config) and _counts(config, path, value):
            yield f"{path} = {_json(value)}{_otherwise(config, known)}"


def _otherwise(config: Groups, known: Key) -> str:
    if not known.differs:
        return ""
    who, other = ("the documentation says", "docs") if config.defaults == "0.19.6" else ("0.19.6 has", "0.19.6")
    return f" ({who} {_json(known.of(other))})"


def _counts(config: Groups, path: str, value: Any) -> bool:
    """Return whether a default does anything: its section is on, and it is not itself off."""
    group = path.rpartition(".")[0]
    if (value in (None, False, 0) and not group.endswith("params")) or path == "gradient_predivide_factor":
        return False
    if group in ("fp16", "bf16", "amp", "torch_autocast"):
        return bool(config[f"{group}.enabled"])
    if path.startswith("zero_optimization.stage3_"):
        return config.zero_optimization.stage == 3 and path.endswith("param_persistence_threshold")
    return group in ("", "optimizer.params", "scheduler.params") and path != "scheduler"


def _given(config: Groups, kind: type) -> Iterator[str]:
    for path, value, known, given in config.walk():
        if given and isinstance(known.meaning, kind) and not isinstance(value, Config):
            yield f"{path} = {_json(value)}: {known.meaning}".replace(": not applicable:", ":").replace("`", "")


def _idle(config: Groups, calls: tuple[Call, ...], axes: Mapping[str, int]) -> Iterator[str]:
    """Yield keys that would count elsewhere, and whose default would give the same here."""
    lacking = {path for path, _ in not_there(config)}
    for path, value, known, given in config.walk():
        told = isinstance(known.meaning, Argument | NotYet | Part) and not isinstance(value, Config | Mapping)
        if not given or not told or path in lacking or value in (AUTO, known.of(config.defaults)):
            continue
        try:
            if composed(_without(config, path), axes)[0] == calls:
                yield f"{path} = {_json(value)}"
        except ConfigError:
            pass  # it is needed


def _without(config: Groups, path: str) -> Groups:
    """Return the configuration without a key. Raises `ConfigError` where it is no more one."""
    data = group = config.to_dict()
    *names, last = path.split(".")
    for name in names:
        group = group[name]
    del group[last]
    return type(config).from_dict(data, defaults=config.defaults)


def _json(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)
