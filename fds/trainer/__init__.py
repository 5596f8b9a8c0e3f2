"""transformers' `Trainer` over a step of fds; transformers is imported when `Trainer` is first used, and not before."""

from typing import Any

from fds.trainer._trainer import StepTrainer, trainer_class

__all__ = ["StepTrainer"]


def __getattr__(name: str) -> Any:
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, trainer_class())
