"""Explain a configuration: the composition as Python, ready to paste, and the rest in comments, or as values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch

from fds.config.composition import EMBEDDINGS, compose_supported, data_ranks, unsupported_keys
from fds.config.elasticity import BATCH, search
from fds.config.field import AUTO, Argument, Elsewhere, Key, NotApplicable, NotYet, PartOf
from fds.config.function_call import FunctionCall, optimizer_call, schedule_call
from fds.config.keys import Groups
from fds.config.reading import auto_paths
from fds.config.record import Config
from fds.errors import ConfigError
from fds.layout import MOST_BYTES

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


def explanation(config: Groups, axes: Mapping[str, int], num_parameters: int | None) -> Explanation:
    """Return the explanation. Raises `ConfigError` for batch sizes that do not multiply."""
    calls, resolved = compose_supported(config, axes)
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
        program=_program(calls, axes, resolved),
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
        without_effect=overruled | dict(_without_effect(config, calls, axes)),
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


def _program(calls: tuple[FunctionCall, ...], axes: Mapping[str, int], config: Groups) -> str:
    lines = ["import torch", ""] if any("torch." in str(call) for call in calls) else []
    sizes = ", ".join(f"{name}={size}" for name, size in axes.items())
    lines = ["import fds", *lines, *([""] if not lines else []), f"mesh = fds.mesh({sizes})", "step = fds.compose("]
    lines += [f"    {call}," for call in calls] + [")(loss_fn)"]
    if optimizer_call(config) is None:
        lines += ["# an optimizer of your own goes last; its learning rate:", f"# {_schedule(config)}"]
    if any(EMBEDDINGS in str(call) for call in calls):
        lines += [f"# {EMBEDDINGS!r} is for the names of embeddings, which fds.initialize reads from the module"]
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


def _without_effect(
    config: Groups, calls: tuple[FunctionCall, ...], axes: Mapping[str, int]
) -> Iterator[tuple[str, Any]]:
    """Yield given keys without which the calls would be the same here, though not in every configuration.

    Of keys of which each could be left out, but not all together, as of three batch sizes that agree, none is yielded.
    """
    unsupported = {path for path, _ in unsupported_keys(config)}
    dispensable: dict[str, Any] = {}
    for path, value, key, is_given in config.walk():
        relevant = isinstance(key.meaning, Argument | NotYet | PartOf) and not isinstance(value, Config | Mapping)
        if not is_given or not relevant or path in unsupported or value in (AUTO, key.of(config.defaults)):
            continue
        if _calls_without(config, {path}, axes) == calls:
            dispensable[path] = value
    of_none = _calls_without(config, dispensable, axes)
    for path, value in dispensable.items():
        if of_none == calls or _calls_without(config, dispensable.keys() - {path}, axes) == of_none:
            yield path, value


def _calls_without(config: Groups, paths: Iterable[str], axes: Mapping[str, int]) -> tuple[FunctionCall, ...] | None:
    """Return the calls of the configuration without some keys, or None if it needs one of them."""
    data = config.to_dict()
    for path in paths:
        *names, last = path.split(".")
        group = data
        for name in names:
            group = group[name]
        del group[last]
    try:
        return compose_supported(type(config).from_dict(data, defaults=config.defaults), axes)[0]
    except ConfigError:
        return None


def _json(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value)


_WHERE = {"device": "", "host": ", on the host", "disk": ", on a disk"}
_NUM_SLOTS = {"adamw": 2, "adam": 2, "lamb": 2, "lion": 1, "adagrad": 1}  # float32 tensors of the parameters' size


@attrs.frozen
class RankMemory:
    """The memory of one kind of tensors on a rank.

    Attributes:
        what: the kind, in words.
        per_parameter: bytes per parameter of the rank's pipeline stage, and of its pieces along a tensor axis.
        most: upper bound in bytes, or None.
    """

    what: str
    per_parameter: float
    most: int | None = None

    def num_bytes(self, num_parameters: int) -> int:
        """Return the bytes for a stage with this number of parameters."""
        whole = round(self.per_parameter * num_parameters)
        return whole if self.most is None else min(whole, self.most)

    def formula(self) -> str:
        """Return the bytes for P parameters as text."""
        return f"{self.per_parameter:g} P" + ("" if self.most is None else f", at most {self.most:,}")


def rank_memory(config: Groups, calls: tuple[FunctionCall, ...], axes: Mapping[str, int]) -> tuple[RankMemory, ...]:
    """Return the memory of every rank, between steps and within one."""
    by_path = {call.path: call for call in calls}
    shard, precision = by_path["shard_optimizer"], by_path.get("precision")
    stage, bucket = shard.argument("stage"), shard.argument("bucket_bytes") or MOST_BYTES
    in_node = axes["dp"] * axes.get("sp", 1)
    ranks = in_node * axes.get("node", 1)
    num_shards = ranks if stage else 1
    compute = accumulated = reduced = 4  # bytes per element
    if precision is not None:
        accumulate = precision.argument("accumulate")
        compute, accumulated = precision.args[0].itemsize, accumulate.itemsize
        reduced = (precision.argument("reduce") or accumulate).itemsize
    alone = ranks * axes.get("replicate", 1) == 1
    out = list(_state(by_path.get("offload"), _num_slots(config), num_shards))
    if alone or stage == 0:
        out += [RankMemory("16-bit parameters", compute)] if compute < 4 else []
    elif stage < 3:
        out += [RankMemory("whole parameters", compute)]
    else:
        live = (2 + shard.argument("prefetch")) * (bucket * compute // 4)
        out += [RankMemory("parameters that are whole at once, beside small ones", compute, live)]
        if shard.argument("secondary") is not None:
            out += [RankMemory(f"second slices of parameters{_among(in_node)}", compute / in_node)]
    reduces_slices = stage > 1 and not alone
    num_sums = ranks if reduces_slices else 1
    for place, share in _shares(by_path.get("offload"), "gradients").items():
        out += [RankMemory(f"sums of gradients{_among(num_sums)}{place}", share * accumulated / num_sums)]
    if reduces_slices:
        out += [RankMemory("two buckets of gradients", reduced, 2 * bucket * reduced // 4)]
    return tuple(out)


def _state(offload: FunctionCall | None, num_slots: int, num_shards: int) -> Iterator[RankMemory]:
    """Yield the memory of the state: of each place in which some of it lives, the one of the device first."""
    places: dict[str, dict[str, float]] = {"": {}}
    for what, argument, size in (("master weights", "masters", 4), ("optimizer state", "moments", 4 * num_slots)):
        for place, share in _shares(offload, argument).items():
            places.setdefault(place, {})[what] = share * size / num_shards
    for place, sizes in places.items():
        if sizes:
            yield RankMemory(f"{' and '.join(sizes)}{_among(num_shards)}{place}", sum(sizes.values()))


def _shares(offload: FunctionCall | None, argument: str) -> dict[str, float]:
    """Return the places of a kind of leaves, in words, and the part of them that lives there."""
    where = _WHERE[_name(None if offload is None else offload.argument(argument))]
    part = 0.0 if offload is None else float(offload.argument("ratio"))
    return {where: part, "": 1 - part} if where and part < 1 else {where: 1.0}


def _name(where: str | FunctionCall | None) -> str:
    return where.path if isinstance(where, FunctionCall) else where or "device"


def _among(ranks: int) -> str:
    return f", among {ranks} ranks" if ranks > 1 else ""


def _num_slots(config: Groups) -> int:
    if config.optimizer is None or config.optimizer.kind is None:
        return 2
    if config.optimizer.kind == "SGD":
        return 1 if config.optimizer.arguments.momentum else 0
    return _NUM_SLOTS.get(config.optimizer.kind, 2)
