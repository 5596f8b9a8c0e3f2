"""The keys of a configuration that ask for what fds does not do, and the error that names them."""

from __future__ import annotations

from collections.abc import Iterator

from fds.config.field import AUTO, NotYet
from fds.config.keys import Groups, optimizer
from fds.config.keys.zero import STAGE_3
from fds.config.record import Config
from fds.errors import NotSupportedError, did_you_mean


def unsupported_keys(config: Groups) -> Iterator[tuple[str, str]]:
    """Yield (JSON path, feature) of every key that asks for a feature that is not supported."""
    off = set[str]()
    for path, value, key, _ in config.walk():
        if isinstance(value, Config) and getattr(value, "enabled", True) is False:
            off.add(path)
        if path in STAGE_3 and config.zero_optimization.stage in (0, 1, 2):
            continue
        group, _, name = path.rpartition(".")
        match key.meaning:
            case NotYet(feature, nothing) if value != AUTO and not _in(value, nothing):
                if name == "enabled" or group not in off:
                    yield path, feature
    curriculum = config.curriculum_learning
    if curriculum.enabled and curriculum.schedule_type == "custom":
        feature = "a function of the program: transforms=[fds.curriculum('seqlen', function)] instead of these keys"
        yield "curriculum_learning.schedule_type", feature
    kind = config.optimizer.kind if config.optimizer is not None else None
    if kind in optimizer.NOT_YET:
        yield "optimizer.type", optimizer.NOT_YET[kind]
    elif kind is not None and kind not in optimizer.OPTIMIZERS:
        near = did_you_mean(str(config["optimizer.type"]), optimizer.SPELLED.values())
        yield "optimizer.type", f"the optimizer {config['optimizer.type']!r} ({near}; or pass an Optimizer of your own)"
    type_ = config.scheduler.type if config.scheduler is not None else None
    if type_ is not None and type_ not in optimizer.SCHEDULERS:
        near = did_you_mean(type_, optimizer.SCHEDULERS)
        yield "scheduler.type", f"the scheduler {type_!r} ({near}; or pass a schedule f(t) of your own)"


def check_supported(config: Groups) -> None:
    """Raise `NotSupportedError`, with the paths of all keys that ask for a feature that is not supported."""
    unsupported = list(unsupported_keys(config))
    if unsupported:
        raise NotSupportedError(
            "the configuration asks for features that fds does not support yet",
            where=", ".join(path for path, _ in unsupported),
            got="; ".join(f"{path} ({feature})" for path, feature in unsupported),
            want="a configuration without these keys",
            hint="config.explain(mesh) shows the rest",
        )


def _in(value: object, values: tuple) -> bool:
    """Return whether a value is one of these, where 0 is not False."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)
