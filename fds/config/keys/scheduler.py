"""The learning rate's scheduler, and the parameters of each type.

Source: the constructors that DeepSpeed 0.19.6 calls. An update uses the learning rate that the formula has for an
earlier update, which is why compositions contain `fds.schedules.delayed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from fds.config.contradiction import MissingKeyError
from fds.config.field import key
from fds.config.meaning import NotYet, argument
from fds.config.record import Config, within
from fds.errors import ConfigError

Rise = Literal["log", "linear"]


def _steps(of: str, default: int | None = 1000) -> Any:
    return key(default, "updates of the warm-up", argument(of, name="warmup_steps"), unit="steps", over=0)


def _total(of: str) -> Any:
    return key(
        None, "updates of the whole training; it must be given", argument(of, name="total_steps"), unit="steps", over=0
    )


def _rise(of: str) -> Any:
    return key("log", "how the warm-up rises", argument(of, name="kind"))


def _last() -> Any:
    return key(-1, "the update to begin with", NotYet("a schedule that begins later on", nothing=(-1,)))


@attrs.frozen
class WarmupLRConfig(Config):
    """Parameters of `WarmupLR`: warm-up, then constant."""

    warmup_min_lr: float = key(0.0, "learning rate to begin with", argument("schedules.warmup", name="start"), low=0)
    warmup_max_lr: float | None = key(
        None,
        "learning rate to stay at; null: the optimizer's",
        argument("schedules.warmup", name="peak"),
        documented=0.001,
        low=0,
    )
    warmup_num_steps: int = _steps("schedules.warmup")
    warmup_type: Rise = _rise("schedules.warmup")
    last_batch_iteration: int = _last()


@attrs.frozen
class WarmupDecayLRConfig(Config):
    """Parameters of `WarmupDecayLR`: warm-up, then linear decay to 0."""

    total_num_steps: int | None = _total("schedules.warmup_decay")
    warmup_min_lr: float = key(
        0.0, "learning rate to begin with", argument("schedules.warmup_decay", name="start"), low=0
    )
    warmup_max_lr: float = key(0.001, "highest learning rate", argument("schedules.warmup_decay", name="peak"), low=0)
    warmup_num_steps: int = _steps("schedules.warmup_decay")
    warmup_type: Rise = _rise("schedules.warmup_decay")
    last_batch_iteration: int = _last()


@attrs.frozen
class WarmupCosineLRConfig(Config):
    """Parameters of `WarmupCosineLR`: warm-up to the optimizer's learning rate, then cosine decay."""

    total_num_steps: int | None = _total("schedules.warmup_cosine")
    warmup_min_ratio: float = key(
        0.0,
        "share of the optimizer's rate to begin with",
        argument("schedules.warmup_cosine", name="start_ratio"),
        low=0,
    )
    warmup_num_steps: int = _steps("schedules.warmup_cosine")
    cos_min_ratio: float = key(
        1e-4, "share of the optimizer's rate to end with", argument("schedules.warmup_cosine", name="end_ratio"), low=0
    )
    warmup_type: Rise = _rise("schedules.warmup_cosine")
    last_batch_iteration: int = _last()


_CYCLE = ("schedules.one_cycle", "schedules.one_cycle_momentum")


@attrs.frozen
class OneCycleConfig(Config):
    """Parameters of `OneCycle`: one cycle up and down, with the momentum opposite, then a slow decay."""

    cycle_min_lr: float | None = key(
        None, "learning rate at both ends; it must be given", argument("schedules.one_cycle", name="min_lr"), low=0
    )
    cycle_max_lr: float | None = key(
        None, "learning rate at the peak; it must be given", argument("schedules.one_cycle", name="max_lr"), low=0
    )
    decay_lr_rate: float = key(
        0.0, "decay of the learning rate after the cycle", argument("schedules.one_cycle", name="decay_rate"), low=0
    )
    cycle_first_step_size: int = key(
        2000, "updates of the climb", argument(*_CYCLE, name="first_steps"), unit="steps", over=0
    )
    cycle_second_step_size: int | None = key(
        None, "updates of the descent; null: as many", argument(*_CYCLE, name="second_steps"), unit="steps", low=0
    )
    cycle_first_stair_count: int = key(0, "stairs of the climb; 0: none", argument(*_CYCLE, name="first_stairs"), low=0)
    cycle_second_stair_count: int | None = key(
        None, "stairs of the descent; null: as many", argument(*_CYCLE, name="second_stairs"), low=0
    )
    decay_step_size: int = key(
        0, "updates per unit of the decay; 0: no decay", argument(*_CYCLE, name="decay_steps"), unit="steps", low=0
    )
    cycle_momentum: bool = key(
        True,
        "let beta1 go against the learning rate, and beta2 be 0.99, where the optimizer has betas",
        argument("adamw", "adam", "lamb", "lion", name="betas"),
    )
    cycle_min_mom: float = key(
        0.8, "beta1 at the peak", argument("schedules.one_cycle_momentum", name="min_momentum"), low=0, under=1
    )
    cycle_max_mom: float = key(
        0.9, "beta1 at both ends", argument("schedules.one_cycle_momentum", name="max_momentum"), low=0, under=1
    )
    decay_mom_rate: float = key(
        0.0, "growth of beta1 after the cycle", argument("schedules.one_cycle_momentum", name="decay_rate"), low=0
    )
    last_batch_iteration: int = _last()


@attrs.frozen
class LRRangeTestConfig(Config):
    """Parameters of `LRRangeTest`: an unbounded increase, to find where training diverges."""

    lr_range_test_min_lr: float = key(
        1e-3, "learning rate to begin with", argument("schedules.lr_range_test", name="start"), low=0
    )
    lr_range_test_step_size: int = key(
        2000, "updates per unit of the climb", argument("schedules.lr_range_test", name="steps"), unit="steps", over=0
    )
    lr_range_test_step_rate: float = key(
        1.0, "how much a unit adds, in units of the first rate", argument("schedules.lr_range_test", name="rate")
    )
    lr_range_test_staircase: bool = key(False, "climb in stairs", argument("schedules.lr_range_test", name="staircase"))
    last_batch_iteration: int = _last()


PARAMETERS: dict[str, type[Config]] = {
    "WarmupLR": WarmupLRConfig,
    "WarmupDecayLR": WarmupDecayLRConfig,
    "WarmupCosineLR": WarmupCosineLRConfig,
    "OneCycle": OneCycleConfig,
    "LRRangeTest": LRRangeTestConfig,
}
_BY_GROUP = (
    "warmup_min_lr",
    "warmup_max_lr",
    "cycle_min_lr",
    "cycle_max_lr",
    "cycle_min_mom",
    "cycle_max_mom",
    "lr_range_test_min_lr",
)
REQUIRED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}


@attrs.frozen
class SchedulerConfig(Config):
    """`scheduler`: its type and parameters."""

    type: str | None = key(
        None,
        "its name",
        argument(
            "schedules.warmup",
            "schedules.warmup_decay",
            "schedules.warmup_cosine",
            "schedules.one_cycle",
            "schedules.lr_range_test",
            note="which of them",
        ),
    )
    params: dict[str, Any] = key(
        dict, "what it is made with; below, per type", argument("schedules.warmup", note="below")
    )

    def check(self) -> None:
        """Raise `ConfigError` for unknown or missing parameters, or parameters without a scheduler."""
        if self.type is None and self.params:
            raise ConfigError(
                "parameters without a scheduler",
                where="type, params",
                got=f"null, {self.params!r:.60}",
                want=f"type: one of {', '.join(PARAMETERS)}",
            )
        if self.type in PARAMETERS:
            if not isinstance(self.params, Mapping):
                raise ConfigError(
                    "a group of keys is a JSON object", where="params", got=repr(self.params)[:80], want="{...}"
                )
            missing = [name for name in REQUIRED.get(self.type, ()) if self.params.get(name) is None]
            if missing:
                raise MissingKeyError(
                    "the scheduler lacks required parameters",
                    where=", ".join(f"params.{name}" for name in missing),
                    got=", ".join(f"{name}={self.params[name]!r}" for name in self.params) or "nothing",
                    want=", ".join(missing),
                )
            self.arguments  # noqa: B018 (evaluated for its checks)

    @property
    def arguments(self) -> Any:
        """The parameters, as a record of the scheduler's type, which must be in `PARAMETERS`."""
        with within("params."):
            params = {name: _of_only_group(name, value) for name, value in self.params.items()}
            return PARAMETERS[str(self.type)].from_dict(params, defaults=self.defaults)


def _of_only_group(name: str, value: Any) -> Any:
    """Return the only item of a list with one value per parameter group, other values unchanged."""
    if name not in _BY_GROUP or not isinstance(value, list | tuple):
        return value
    if len(value) != 1:
        raise ConfigError(
            "a list has one number per parameter group, and a JSON has one group",
            where=name,
            got=f"{len(value)} numbers",
            want="a number",
            hint="groups with rates of their own: optimizer=fds.by_name({...})",
        )
    return value[0]
