"""Explain a configuration: the composition as Python, ready to paste, and the rest in comments, or as values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from fds.config.composition import EMBEDDINGS, compose_supported, data_ranks, embeddings_of
from fds.config.compression import asks_for_modules, parts_of, sums_scores
from fds.config.elasticity import BATCH, search
from fds.config.field import AUTO, Argument, Elsewhere, Key, NotApplicable, NotYet, PartOf
from fds.config.function_call import SUMS, FunctionCall, optimizer_call, schedule_call
from fds.config.keys import Groups
from fds.config.memory import RankMemory, rank_memory
from fds.config.modules import Parts
from fds.config.reading import auto_paths
from fds.config.record import Config, walk
from fds.config.unsupported import unsupported_keys
from fds.errors import ConfigError
from fds.loss import Layers

_BATCH = ("train_batch_size", "rows", "microbatches", "data_ranks")


@attrs.frozen
class Explanation:
    """What a configuration comes to on a mesh; `str()` of it is a program, and the rest as its comments.

    Attributes:
        program: Python that composes the step.
        axes: sizes of the mesh.
        batch: `train_batch_size`, and the `rows`, `microbatches` and `data_ranks` whose product it is.
        elastic: of `elasticity`, the `rows` of the batch that all these numbers of `data_ranks` share; None without.
        casts: whether floating-point leaves of the batch are cast.
        unsupported: path -> feature that fds does not have yet; the program leaves these keys out.
        memory: what each rank holds.
        num_parameters: of the model, or None.
        edition: whose defaults are in force.
        defaults: path -> those that affect the training.
        other_defaults: path -> the default of the other edition, where it is another.
        auto: paths of the keys that are "auto" without a value.
        without_effect: path -> given value, without which the program would be the same.
        elsewhere: path -> given value, which another call takes.
        not_applicable: path -> given value that has no meaning here.
        reasons: path -> which call takes it, or why it has no meaning.
    """

    program: str
    axes: Mapping[str, int]
    batch: dict[str, int]
    elastic: dict[str, Any] | None
    casts: bool
    unsupported: dict[str, str]
    memory: tuple[RankMemory, ...]
    num_parameters: int | None
    edition: str
    defaults: dict[str, Any]
    other_defaults: dict[str, Any]
    auto: tuple[str, ...]
    without_effect: dict[str, Any]
    elsewhere: dict[str, Any]
    not_applicable: dict[str, Any]
    reasons: dict[str, str]

    def __str__(self) -> str:
        of_stage = " of its stage" * (self.axes.get("pp", 1) > 1) + " of its pieces" * (self.axes.get("tp", 1) > 1)
        lines = lambda values: (f"{path} = {_json(value)}" for path, value in values.items())
        because = lambda values: (f"{path} = {_json(value)}: {self.reasons[path]}" for path, value in values.items())
        unsupported = (f"{path}: {feature}" for path, feature in self.unsupported.items())
        parts = [
            self.program,
            _section("batch", self._batch()),
            _section("not supported yet: these keys are refused, and left out above", unsupported),
            _section(f"bytes on each rank, P parameters{of_stage}", self._memory()),
            _section(f"defaults in force, of edition {self.edition}", self._defaults()),
            _section('"auto" without a value: the default', self.auto),
            _section("given, without effect here", lines(self.without_effect)),
            _section("taken by other calls", because(self.elsewhere)),
            _section("not applicable", because(self.not_applicable)),
        ]
        return "\n".join(part for part in parts if part) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Return it as values that JSON has."""
        stage = self._stage_parameters()
        memory = [
            {
                "what": part.what,
                "bytes_per_parameter": part.per_parameter,
                "at_most_bytes": part.most,
                "bytes": None if stage is None else part.num_bytes(stage),
            }
            for part in self.memory
        ]
        return {**attrs.asdict(self, recurse=False), "axes": dict(self.axes), "memory": memory}

    def _batch(self) -> Iterator[str]:
        whole, rows, microbatches, ranks = (self.batch[name] for name in _BATCH)
        yield f"train_batch_size {whole} = {rows} rows x {microbatches} microbatches x {ranks} data ranks"
        of_rows = "its tokens of " * (self.axes.get("sp", 1) > 1)
        yield f"a rank passes {of_rows}{whole // ranks} rows to each call of the step"
        if self.elastic is not None:
            shared, numbers = self.elastic["rows"], ", ".join(map(str, self.elastic["data_ranks"]))
            yield f"elastic: {shared} rows on {numbers} data ranks" + "; here others" * (whole != shared)
        if self.casts:
            yield (
                "float32 leaves of the batch are cast, targets too: fds.precision(..., inputs=...) names those to cast"
            )

    def _memory(self) -> Iterator[str]:
        stage = self._stage_parameters()
        for part in self.memory:
            numbers = "" if stage is None else f" = {part.num_bytes(stage):,}"
            yield f"{part.what}: {part.formula()}{numbers}"

    def _stage_parameters(self) -> int | None:
        num_parts = self.axes.get("pp", 1) * self.axes.get("tp", 1)
        return None if self.num_parameters is None else self.num_parameters // num_parts

    def _defaults(self) -> Iterator[str]:
        source = "the documentation says" if self.edition == "0.19.6" else "0.19.6 has"
        for path, value in self.defaults.items():
            other = f" ({source} {_json(self.other_defaults[path])})" if path in self.other_defaults else ""
            yield f"{path} = {_json(value)}{other}"


def explanation(
    config: Groups, axes: Mapping[str, int], num_parameters: int | None, model: nn.Module | Layers | None = None
) -> Explanation:
    """Return the explanation. Raises `ConfigError` for batch sizes that do not multiply, and groups without modules."""
    embeddings = embeddings_of(model) if isinstance(model, nn.Module) else (EMBEDDINGS,)
    mesh = _Composed(axes, tuple(embeddings), parts_of(config, model))
    calls, resolved = mesh.of(config)
    batch = resolved.batch
    sizes = (batch.train_batch_size, batch.train_micro_batch_size_per_gpu, batch.gradient_accumulation_steps)
    defaults = dict(_defaults(resolved, axes))
    other = "docs" if config.defaults == "0.19.6" else "0.19.6"
    elsewhere, not_applicable = _given_of(config, Elsewhere), _given_of(config, NotApplicable)
    overruled = {}
    if resolved.elasticity.enabled:
        overruled = {path: elsewhere.pop(path)[0] for path in BATCH if path in elsewhere}
    values_of = lambda entries: {path: value for path, (value, _) in entries.items()}
    return Explanation(
        program=_program(calls, axes, resolved, guessed=model is None),
        axes=axes,
        batch=dict(zip(_BATCH, (*map(_resolved, sizes), data_ranks(axes)), strict=True)),
        elastic=_elastic(resolved),
        casts=any(call.path == "precision" and call.args[0] != torch.float32 for call in calls),
        unsupported=dict(unsupported_keys(config)),
        memory=rank_memory(resolved, calls, axes),
        num_parameters=num_parameters,
        edition=config.defaults,
        defaults={path: value for path, (value, _) in defaults.items()},
        other_defaults={path: key.of(other) for path, (_, key) in defaults.items() if key.differs},
        auto=tuple(auto_paths(config.to_dict())),
        without_effect=overruled | dict(_without_effect(config, calls, mesh)),
        elsewhere=values_of(elsewhere),
        not_applicable=values_of(not_applicable),
        reasons={path: reason for path, (_, reason) in {**elsewhere, **not_applicable}.items()},
    )


def _elastic(config: Groups) -> dict[str, Any] | None:
    if not config.elasticity.enabled:
        return None
    batches = search(config.elasticity)
    return {"rows": batches.rows, "data_ranks": batches.data_ranks}


def _resolved(size: int | None) -> int:
    assert size is not None
    return size


@attrs.frozen
class _Composed:
    """What a configuration is composed for: the sizes of a mesh, and what is known of a model."""

    axes: Mapping[str, int]
    embeddings: tuple[str, ...]
    parts: Parts | None

    def of(self, config: Groups) -> tuple[tuple[FunctionCall, ...], Groups]:
        """Return the calls of a configuration, and it, resolved."""
        return compose_supported(config, self.axes, self.embeddings, self.parts)

    def calls(self, config: Groups, data: Mapping[str, Any]) -> tuple[FunctionCall, ...] | None:
        """Return the calls of a configuration like another one, with these values; None of one that is refused."""
        try:
            return self.of(type(config).from_dict(data, defaults=config.defaults))[0]
        except ConfigError:
            return None


def _program(calls: tuple[FunctionCall, ...], axes: Mapping[str, int], config: Groups, *, guessed: bool) -> str:
    lines = ["import torch", ""] if any("torch." in str(call) for call in calls) else []
    sizes = ", ".join(f"{name}={size}" for name, size in axes.items())
    lines = ["import fds", *lines, *([""] if not lines else []), f"mesh = fds.mesh({sizes})", "step = fds.compose("]
    lines += [f"    {call}," for call in calls] + [")(loss_fn)"]
    if optimizer_call(config) is None:
        lines += ["# an optimizer of your own goes last; its learning rate:", f"# {_schedule(config)}"]
        lines += (
            [f"# as fds.by_name({{{SUMS!r}: fds.compression.sensitivity(), '*': it}})"] if sums_scores(config) else []
        )
    if any(EMBEDDINGS in str(call) for call in calls):
        lines += [f"# {EMBEDDINGS!r} is for the names of embeddings, which fds.initialize reads from the module"]
    if any(call.kwargs.get("method") in ("topk", "snip_momentum") for call in calls):
        lines += ["# scores are parameters: of config.with_scores(module), which fds.initialize trains"]
    if guessed and asks_for_modules(config):
        lines += ["# patterns of compressed modules are guessed; config.explain(mesh, model=module) reads them from it"]
    return "\n".join([*lines, ""])


def _schedule(config: Groups) -> str:
    call = schedule_call(config)
    return "a number or a schedule" if call is None else str(call)


def _section(title: str, lines: Iterable[str]) -> str:
    lines = list(lines)
    return "\n".join([f"# {title}", *(f"#   {line}" for line in lines), ""]) if lines else ""


def _defaults(config: Groups, axes: Mapping[str, int]) -> Iterator[tuple[str, tuple[Any, Key]]]:
    """Yield defaults that affect the training, and their keys."""
    for path, value, key, is_given in config.walk():
        is_argument = isinstance(key.meaning, Argument) and not isinstance(value, Config)
        if not is_given and is_argument and _has_effect(config, path, value, axes):
            yield path, (value, key)


def _has_effect(config: Groups, path: str, value: Any, axes: Mapping[str, int]) -> bool:
    """Return whether a default has an effect: its group is enabled, and the value does not switch it off."""
    group = path.rpartition(".")[0]
    if (value in (None, False, 0) and not group.endswith("params")) or path == "gradient_predivide_factor":
        return False
    if group in ("fp16", "bf16", "amp", "torch_autocast"):
        return bool(config[f"{group}.enabled"])
    if path == "seq_parallel_communication_data_type":
        return axes.get("sp", 1) > 1
    if path.startswith("zero_optimization.stage3_"):
        return config.zero_optimization.stage == 3 and path.endswith("param_persistence_threshold")
    return group in ("", "optimizer.params", "scheduler.params") and path != "scheduler"


def _given_of(config: Groups, meaning: type) -> dict[str, tuple[Any, str]]:
    """Return the given keys with this kind of meaning: path -> value, and the meaning in words."""
    return {
        path: (value, str(key.meaning).removeprefix("not applicable: ").replace("`", ""))
        for path, value, key, is_given in config.walk()
        if is_given and isinstance(key.meaning, meaning) and not isinstance(value, Config)
    }


_Names = tuple[str, ...]  # of a key, from the top level on: a group's own name may have dots


def _without_effect(config: Groups, calls: tuple[FunctionCall, ...], mesh: _Composed) -> Iterator[tuple[str, Any]]:
    """Yield given keys without which the calls would be the same here, though not in every configuration.

    Of keys of which each could be left out, but not all together, as of three batch sizes that agree, none is yielded.
    One that must be there, but may have any value, is.
    """
    unsupported = {path for path, _ in unsupported_keys(config)}
    dispensable: dict[_Names, Any] = {}
    for names, value, key in _given_keys(config):
        relevant = isinstance(key.meaning, Argument | NotYet | PartOf) and not isinstance(value, Config | Mapping)
        if not relevant or ".".join(names) in unsupported or value in (AUTO, key.of(config.defaults)):
            continue
        without = mesh.calls(config, _without(config, {names}))
        if without == calls:
            dispensable[names] = value
        elif without is None and not _has_effect_as_number(config, names, value, mesh):
            yield ".".join(names), value
    of_none = mesh.calls(config, _without(config, dispensable))
    for names, value in dispensable.items():
        if of_none == calls or mesh.calls(config, _without(config, dispensable.keys() - {names})) == of_none:
            yield ".".join(names), value


def _given_keys(config: Groups) -> Iterator[tuple[_Names, Any, Key]]:
    """Yield all keys that were given, with those of groups that have a name of their own."""
    for path, value, key, is_given in config.walk():
        names = tuple(path.split("."))
        if is_given:
            yield names, value, key
        for name, group in value.items() if isinstance(value, Mapping) else ():
            for below, item, its_key, is_given_there in walk(group) if isinstance(group, Config) else ():
                if is_given_there:
                    yield (*names, name, *below.split(".")), item, its_key


def _has_effect_as_number(config: Groups, names: _Names, value: Any, mesh: _Composed) -> bool:
    """Say whether other numbers in the place of one change what is composed, or the batch; True for no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    composed = mesh.of(config)
    results: list[bool] = []
    for other in (value + 1, value * 2, value // 2 if isinstance(value, int) else value / 2):
        data = config.to_dict()
        _group_of(data, names)[names[-1]] = other
        with contextlib.suppress(ConfigError):
            calls, resolved = mesh.of(type(config).from_dict(data, defaults=config.defaults))
            results.append(calls == composed[0] and resolved.batch == composed[1].batch)
    return not results or not all(results)


def _without(config: Groups, keys: Iterable[_Names]) -> dict[str, Any]:
    """Return the values of a configuration without some keys."""
    data = config.to_dict()
    for names in keys:
        del _group_of(data, names)[names[-1]]
    return data


def _group_of(data: dict[str, Any], names: _Names) -> dict[str, Any]:
    """Return the values among which a key is."""
    for name in names[:-1]:
        data = data[name]
    return data


def _json(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)
