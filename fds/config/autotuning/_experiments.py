"""The experiments of a JSON with the section `autotuning`: JSON without it, and without lists of values to try.

A list where a key takes none is the values to try of it. The product of all lists is tried in their order, the keys of
`zero_optimization` first, the last key fastest.

Source: DeepSpeed 0.19.6, `autotuning/autotuner.py`, `constants.py` and `config_templates/`.
"""

from __future__ import annotations

import itertools
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import attrs

from fds.config import reading
from fds.config.field import AUTO, flat_keys
from fds.config.record import Config, is_union, record_of
from fds.config.training import TrainingConfig
from fds.errors import ConfigError, is_int

MICRO, STEPS, WHOLE = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
_SIZES = [50_000_000, 500_000_000, 1_000_000_000]  # elements
_SPACES: dict[int, dict[str, list]] = {  # stage -> values to try of keys of `zero_optimization`, in order
    0: {},
    1: {"reduce_bucket_size": _SIZES, "allgather_bucket_size": _SIZES},
    2: {
        "overlap_comm": [True, False],
        "reduce_scatter": [False, True],
        "reduce_bucket_size": _SIZES,
        "allgather_bucket_size": _SIZES,
        "contiguous_gradients": [False, True],
    },
    3: {
        "overlap_comm": [True, False],
        "reduce_scatter": [False, True],
        "reduce_bucket_size": _SIZES,
        "allgather_partitions": [True, False],
        "allgather_bucket_size": _SIZES,
        "contiguous_gradients": [False, True],
    },
}
_OF_STAGE_2 = {
    "allgather_partitions": True,
    "allgather_bucket_size": 500_000_000,
    "overlap_comm": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 500_000_000,
    "contiguous_gradients": False,
}
_OF_STAGE_3 = {
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_prefetch_bucket_size": 500_000_000,
    "stage3_param_persistence_threshold": 1_000_000,
    "stage3_gather_16bit_weights_on_model_save": False,
    "sub_group_size": 1_000_000_000_000,
}
_TEMPLATES: dict[int, dict[str, Any]] = {  # stage -> what else an experiment says, in the order of its name
    0: {"stage": 0},
    1: {"stage": 1, "reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000},
    2: {"stage": 2, **_OF_STAGE_2},
    3: {"stage": 3, **_OF_STAGE_2, **_OF_STAGE_3},
}
STAGES = tuple(_SPACES)
ALL = "all"  # in the place of a stage
_LARGE = 9000  # above it a name has a number as 5.0e+07


@attrs.frozen
class Experiment:
    """A configuration to measure.

    Attributes:
        name: as DeepSpeed names its folder of results: the stage, and initials and values of the keys that are tried.
        config: the JSON.
    """

    name: str
    config: Mapping[str, Any]

    @property
    def rows(self) -> int:
        """The microbatch of a rank, in rows."""
        return self.config[MICRO]


@attrs.frozen
class Autotuning:
    """What a JSON with the section `autotuning` asks to be tried, on a number of ranks.

    Attributes:
        data: the JSON, without the section.
        section: the section, `AutotuningConfig`.
        ranks: that each experiment runs on.
    """

    data: Mapping[str, Any]
    section: Config
    ranks: int

    @classmethod
    def of(
        cls, source: Mapping[str, Any] | str | os.PathLike[str], *, ranks: int, unknown: reading.Unknown = "error"
    ) -> Self:
        """Read a JSON, in which keys that take no list may have lists of values to try.

        Args:
            source: a dict, the path of a JSON file, or JSON in base64.
            ranks: of an experiment.
            unknown: as `TrainingConfig.of` takes it.

        Raises `ConfigError` for a JSON whose first values are no configuration, and one without autotuning; for values
        that cannot be tried, and ranks that `mp_size` does not divide.
        """
        data = reading.read(source)
        if not is_int(ranks, 1):
            raise ConfigError("not a number of ranks", where="ranks", got=repr(ranks)[:80], want="1 or more")
        _check_values(data)
        section = TrainingConfig.of(_first(data, TrainingConfig), unknown=unknown).autotuning
        if section.enabled is not True:
            raise ConfigError("autotuning is not enabled", where="autotuning.enabled", got="false", want="true")
        if ranks % section.mp_size:
            raise ConfigError(
                "the ranks cannot be divided into copies of the model",
                where="ranks, autotuning.mp_size",
                got=f"{ranks}, {section.mp_size}",
                want=f"a multiple of {section.mp_size}",
            )
        return cls({name: value for name, value in data.items() if name != "autotuning"}, section, ranks)

    @property
    def stages(self) -> tuple[int, ...]:
        """ZeRO's stages that are tried, in order: that of the JSON, those of a list, or all with `"all"`."""
        stages = _listed(self.zero.get("stage", 0))
        return STAGES if ALL in stages else tuple(sorted(set(stages)))

    @property
    def zero(self) -> Mapping[str, Any]:
        """The section `zero_optimization`, whose keys are those of all experiments, and whose lists are tried."""
        return self.data.get("zero_optimization", {})

    @property
    def accumulation(self) -> int:
        """The microbatches of an update with which the largest microbatch is looked for."""
        steps = self.data.get(STEPS, 1)
        return steps if is_int(steps) else 1

    @property
    def largest_rows(self) -> int:
        """The largest microbatch that may be tried, in rows."""
        most, whole = self.section.max_train_micro_batch_size_per_gpu, self.section.max_train_batch_size
        return min(most, whole * self.section.mp_size // self.ranks) if whole else most

    def state_bytes(self, num_params: int, stage: int) -> float:
        """Return the bytes of parameters, gradients and Adam's state of a rank, as DeepSpeed predicts them.

        In 16 bit 2, 2 and 16 a parameter, else 4, 4 and 8; what a stage shares is divided by the data ranks.
        """
        half = any(self.data.get(name, {}).get("enabled") is True for name in ("fp16", "bf16"))
        sizes = (16, 2, 2) if half else (8, 4, 4)  # shared from stage 1, 2 and 3 on
        data_ranks = self.ranks // self.section.mp_size
        per_parameter = sum(size / data_ranks if stage > i else size for i, size in enumerate(sizes))
        return num_params * per_parameter / self.section.mp_size

    def microbatches(self, least: int, most: int) -> tuple[list[int], int]:
        """Return microbatches to try between two that run, in rows, and the rows of a rank in an update.

        The most, and below it, down to its half, `num_tuning_micro_batch_sizes` in equal steps, without those that
        need as many microbatches for the rows as the most does. A list in the JSON is tried as it is.
        """
        if isinstance(listed := self.data.get(MICRO), list):
            return sorted(listed), max(listed) * self.accumulation
        if least < 1 or most < 1:
            return [], 0
        model, whole = self.section.mp_size, self.section.max_train_batch_size
        rows = whole * model // self.ranks if whole else most * self.accumulation
        least = max(least, most // 2)
        stride = max((most - least) // self.section.num_tuning_micro_batch_sizes, 1)
        return [n for n in range(least, most, stride) if rows // n != rows // most] + [most], rows

    def experiment(self, stage: int, microbatch: int, accumulation: int) -> Experiment:
        """Return the experiment of a stage and a microbatch, with the first of all other values."""
        first = _first(self.data, TrainingConfig)
        config = {**first, "zero_optimization": {**first.get("zero_optimization", {}), "stage": stage}}
        return Experiment(
            f"z{stage}_gas{accumulation}_tmbspg{microbatch}", self._sized(config, microbatch, accumulation)
        )

    def experiments(
        self, stage: int, microbatches: Sequence[int], rows: int, *, hidden_size: int | None = None
    ) -> list[Experiment]:
        """Return the experiments of a stage: the product of all values to try.

        Args:
            stage: of ZeRO.
            microbatches: to try, in rows.
            rows: of a rank in an update; microbatches are as many as fit.
            hidden_size: of the model, from which sizes of messages of stage 3 follow.
        """
        zero = {"stage": stage, **_SPACES[stage], **{k: v for k, v in self.zero.items() if k != "stage"}}
        others = {k: v for k, v in self.data.items() if k not in ("zero_optimization", MICRO)}
        space = {"zero_optimization": zero, MICRO: list(microbatches), **others}
        template = dict(_TEMPLATES[stage])
        if stage == 3 and hidden_size is not None:
            sizes = reading.of_hidden_size(hidden_size)
            template |= {path.rpartition(".")[2]: size for path, size in sizes.items()}
        names = {MICRO, STEPS, *_tried(space, TrainingConfig)}
        out = []
        for values in _combinations(space, TrainingConfig):
            config = {**values, "zero_optimization": {**template, **values["zero_optimization"]}}
            config = self._sized(config, config[MICRO], rows // config[MICRO])
            out.append(Experiment(f"z{stage}_{_name(config, names)}", config))
        return out

    def _sized(self, config: Mapping[str, Any], microbatch: int, accumulation: int) -> dict[str, Any]:
        whole = microbatch * accumulation * self.ranks // self.section.mp_size
        sizes = {MICRO: microbatch, STEPS: accumulation, WHOLE: whole}
        return {**{k: v for k, v in config.items() if k != "autotuning"}, **sizes}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_values(data: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for stages and batch sizes that cannot be tried."""
    zero = data.get("zero_optimization", {})
    stages = zero.get("stage", 0) if isinstance(zero, Mapping) else zero
    micro = data.get(MICRO, AUTO)
    for path, values, want, holds in (
        ("zero_optimization.stage", stages, '0 to 3, a list of them, or "all"', lambda x: x == ALL or _is_stage(x)),
        (MICRO, 1 if micro == AUTO else micro, 'rows, a list of them, or "auto"', lambda x: is_int(x, 1)),
        (STEPS, [data.get(STEPS)], "a number", lambda x: not isinstance(x, list)),
        (WHOLE, [data.get(WHOLE)], "a number", lambda x: not isinstance(x, list)),
    ):
        if not _listed(values) or not all(map(holds, _listed(values))):
            raise ConfigError("values that cannot be tried", where=path, got=repr(values)[:80], want=want)


def _is_stage(value: Any) -> bool:
    return is_int(value) and value in STAGES


def _children(data: Mapping[str, Any], cls: type[Config]) -> Iterator[tuple[str, Any, type[Config] | None, bool]]:
    """Yield (name, value, record of a group, whether the value is a list of values to try) of a group's keys."""
    keys = flat_keys(cls).items()
    types = {spelling: type_ for name, (type_, key) in keys for spelling in (*key.old, name)}
    for name, value in data.items():
        record = record_of(types.get(name)) if isinstance(value, dict) else None
        yield name, value, record, isinstance(value, list) and _takes_one(types.get(name))


def _takes_one(type_: Any) -> bool:
    """Return whether a key takes no list itself."""
    options = typing.get_args(type_) if is_union(type_) else (type_,)
    return not any(option in (None, Any) or typing.get_origin(option) in (tuple, dict) for option in options)


def _first(data: Mapping[str, Any], cls: type[Config], path: str = "") -> dict[str, Any]:
    """Return JSON with the first of each list of values to try. Raises `ConfigError` for an empty list."""
    out = {}
    for name, value, record, is_tried in _children(data, cls):
        if is_tried and not value:
            raise ConfigError("there are no values to try", where=path + name, got="[]", want="a list of values")
        if record:
            out[name] = _first(value, record, f"{path}{name}.")
            continue
        out[name] = value[0] if is_tried else value
        if out[name] == ALL and path + name == "zero_optimization.stage":
            out[name] = STAGES[0]
    return out


def _combinations(data: Mapping[str, Any], cls: type[Config]) -> Iterator[dict[str, Any]]:
    """Yield JSON with each combination of the values to try."""
    choices = [
        _combinations(value, record) if record else value if is_tried else [value]
        for _, value, record, is_tried in _children(data, cls)
    ]
    for values in itertools.product(*choices):
        yield dict(zip(data, values, strict=True))


def _tried(data: Mapping[str, Any], cls: type[Config]) -> Iterator[str]:
    """Yield the names of keys of which several values are tried."""
    for name, value, record, is_tried in _children(data, cls):
        if is_tried and len(value) > 1:
            yield name
        if record:
            yield from _tried(value, record)


def _name(config: Mapping[str, Any], names: set[str]) -> str:
    """Return initials and values of these keys, in the order of the JSON: `rbs5.0e+07_tmbspg4`."""
    parts = []
    for name, value in config.items():
        if isinstance(value, dict):
            parts.append(_name(value, names))
        elif name in names:
            parts.append("".join(word[0] for word in name.split("_")) + _text(value))
    return "_".join(filter(None, parts))


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "FT"[value]
    return f"{value:.1e}" if isinstance(value, int | float) and value > _LARGE else str(value)
