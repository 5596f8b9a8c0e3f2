"""Distillation: losses between a student and a teacher, and a teacher that is neither trained nor saved."""

from typing import TYPE_CHECKING

from fds.lazy import lazily

if TYPE_CHECKING:
    from fds.distill._logits import logits, top_k
    from fds.distill._states import attention, hidden, relations
    from fds.distill._teacher import Teacher, teacher

__getattr__, __dir__ = lazily(
    __name__,
    {
        "fds.distill._logits": "logits top_k",
        "fds.distill._states": "attention hidden relations",
        "fds.distill._teacher": "Teacher teacher",
    },
)

__all__ = ["Teacher", "attention", "hidden", "logits", "relations", "teacher", "top_k"]
