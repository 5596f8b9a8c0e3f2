"""The errors and warnings of fds, and the checks of arguments that all rooms share."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from types import CodeType, UnionType
from typing import Any, ParamSpec, TypeGuard, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class FdsError(ValueError):
    """The base class of all errors of fds. The message is rendered from its five fields.

    Attributes:
        what: what is wrong, one sentence.
        where: key path, rank, step, JSON path or file; empty where there is none.
        got: the value that was passed or found.
        want: what would have been accepted.
        hint: how to fix it.

    >>> print(FdsError("the batch does not divide", where="inputs", got="10 rows", want="a multiple of 4"))
    the batch does not divide
      where: inputs
      got:   10 rows
      want:  a multiple of 4
    """

    def __init__(self, what: str, *, where: str = "", got: str = "", want: str = "", hint: str = ""):
        self.what, self.where, self.got, self.want, self.hint = what, where, got, want, hint
        fields = (("where", where), ("got", got), ("want", want), ("hint", hint))
        lines = [f"  {name + ':':<6} {_indent(text)}" for name, text in fields if text]
        super().__init__("\n".join([what, *lines]))

    def __reduce__(self) -> tuple:
        return (_rebuild, (type(self), self.what, self.where, self.got, self.want, self.hint))


class ComposeError(FdsError):
    """Refuse a composition of transforms."""


class CallError(ComposeError, TypeError):
    """Refuse a call with arguments that a function does not take: a transform, an optimizer, a sink, a timer."""


class StateError(FdsError):
    """Refuse parameters or a state."""


class DonatedStateError(StateError):
    """Refuse a state whose buffers a donating step has already written over."""


class BatchError(FdsError):
    """Refuse a batch."""


class LossError(FdsError):
    """Refuse what a loss returned, or how it is built."""


class LossWarning(UserWarning):
    """Warn of a loss that is allowed but probably not intended."""


class ScheduleError(FdsError):
    """Refuse the arguments of a schedule."""


class OptimizerError(FdsError):
    """Refuse the arguments of an optimizer, or parameters that it cannot update."""


class KernelError(FdsError):
    """Refuse the arguments of a kernel, or of a layer built on kernels, before anything is launched."""


class StorageError(FdsError):
    """Refuse to save to, or to load from, a directory."""


class DiskError(FdsError):
    """Refuse a directory for leaves on disk, or report that reading or writing them failed."""


class DiskFullError(DiskError):
    """Refuse leaves for which a disk has no room."""


class StorageWarning(UserWarning):
    """Report the differences between a save and a step that `load(..., strict=False)` tolerated.

    Attributes:
        missing: key paths of the state that the save lacks; they have the values of `step.init`.
        unexpected: key paths of the save that the state lacks; they were not read.
        mismatched: key paths of both, of different shapes or dtypes; they have the values of `step.init`.
    """

    def __init__(self, where: str, missing: list[str], unexpected: list[str], mismatched: list[str]):
        self.where, self.missing, self.unexpected, self.mismatched = where, missing, unexpected, mismatched
        kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape or dtype", mismatched))
        lines = [f"  {what}: {_grouped(names)}" for what, names in kinds if names]
        super().__init__("\n".join([f"{where} does not match the step", *lines]))


class DataError(FdsError):
    """Refuse a data set, or the way in which batches are drawn from it."""


class ConfigError(FdsError):
    """Refuse a configuration: an unknown key, a value of a wrong type, keys that contradict each other."""


class ElasticityError(ConfigError):
    """Refuse an elastic configuration: one without a batch, a number of ranks that has none, a changed environment."""


class NotSupportedError(ConfigError):
    """Refuse a configuration that asks for what fds does not have yet."""


class MeshError(FdsError):
    """Refuse a mesh, an axis, or the environment that the ranks were started in."""


class PlanError(FdsError):
    """Refuse a pipeline schedule or plan: missing or repeated actions, a deadlock, too much memory."""


class AttentionLayoutError(FdsError):
    """Refuse a layout of sparse attention: its parameters, or layouts that do not combine."""


class RankError(FdsError):
    """Report ranks that died, hung, or started different collectives."""


class ResizeError(RankError):
    """End a call of `fds.elastic.run`: ranks were lost, or are to come or go. The next start goes on."""


def _grouped(names: list[str]) -> str:
    """Return names as text, long groups below one slot as their number."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(".".join(name.split(".")[: 2 if name.startswith(("opt.", "slots.")) else 1]), []).append(name)
    parts = (
        f"{group}.* ({len(members)})" if len(members) > 8 else ", ".join(members) for group, members in groups.items()
    )
    return ", ".join(parts)


RETIRED = {  # a function and an argument that it had -> what to write
    ("disk", "backend"): "leave backend out: threads read and write, as many as queue_depth says"
}


def is_a(value: object, kind: type | UnionType) -> bool:
    """Return whether an argument is of the type that it is annotated with, which type checkers take for granted."""
    return isinstance(value, kind)


def is_int(value: object, least: int | None = None) -> TypeGuard[int]:
    """Return whether an argument is an integer and at least `least`; booleans do not count.

    >>> is_int(1), is_int(True), is_int(0, 1)
    (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether an argument is an integer or a float; booleans do not count."""
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class Rule:
    """What an argument must be, declared with its function: `@transform(every=count(": {name} counts layers"))`.

    Attributes:
        holds: says of a value whether it is that.
        what: of the error, "{name}" being the argument's; the function's name stands before it.
        want: of the error.
        where: of the error.
    """

    holds: Callable[[object], object]
    what: str
    want: str
    where: str = ""

    def check(self, function: str, name: str, value: Any, error: type[FdsError]) -> None:
        """Raise `error` for a value that is something else."""
        if not self.holds(value):
            what = f"{function}{self.what.format(name=name)}"
            raise error(what, where=self.where, got=repr(value)[:80], want=self.want)

    def or_none(self) -> Rule:
        """Return the rule of an argument that may be None too."""
        return dataclasses.replace(self, holds=lambda value: value is None or self.holds(value))


def count(what: str = ": {name} is a count", least: int = 1, *, where: str = "") -> Rule:
    """Return the rule of an integer, `least` or more."""
    return Rule(lambda value: is_int(value, least), what, f"an int >= {least}", where)


def positive(what: str, want: str) -> Rule:
    """Return the rule of a number above 0."""
    return Rule(lambda value: isinstance(value, int | float) and value > 0, what, want)


def instance(kind: type, what: str, want: str, *, where: str = "") -> Rule:
    """Return the rule of an object of a class."""
    return Rule(lambda value: isinstance(value, kind), what, want, where)


def slot_name(example: str) -> Rule:
    """Return the rule of the name of a slot that a transform takes."""
    return Rule(
        lambda x: isinstance(x, str) and x.isidentifier(), ": the name of a slot is a word", f'say, "{example}"'
    )


FLAG = instance(bool, ": {name} is a flag", "True or False")


def bound(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: type[FdsError]
) -> inspect.BoundArguments:
    """Return the arguments of a call by name. Raises `error` where the function does not take them.

    >>> bound(nearest, ["liner"], {"knwon": []}, FdsError)
    Traceback (most recent call last):
    fds.errors.FdsError: nearest: missing a required argument: 'known'
      where: nearest
      want:  nearest(word, known)
      hint:  did you mean 'known'?
    """
    name, signature = function.__name__, inspect.signature(function)
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as wrong:
        unknown = [argument for argument in kwargs if argument not in signature.parameters]
        plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
        by_name = [parameter.name for parameter in plain if parameter.kind is parameter.KEYWORD_ONLY]
        hint = (RETIRED.get((name, unknown[0])) or nearest(unknown[0], signature.parameters)) if unknown else ""
        if not hint and "positional" in str(wrong) and by_name:
            hint = f"by name: {', '.join(by_name)}"
        raise error(f"{name}: {wrong}", where=name, want=f"{name}{inspect.Signature(plain)}", hint=hint) from None


def checked_call(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function, or an `__init__`, whose calls raise `CallError` for arguments that it does not take."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if function.__name__ == "__init__":
            bound(type(args[0]), args[1:], kwargs, CallError)
        else:
            bound(function, args, kwargs, CallError)
        return function(*args, **kwargs)

    return call


def expanded(path: str | os.PathLike[str]) -> str:
    """Return a path of the user's with `~` as the home that it stands for."""
    return os.path.expanduser(os.fspath(path))


def outside(*libraries: str) -> str:
    """Return file, line and function of the innermost caller of neither fds, torch, Python nor these; "" for none."""
    frame = inspect.currentframe()
    while frame is not None and is_of_library(frame.f_globals.get("__name__", ""), libraries):
        frame = frame.f_back
    return "" if frame is None else line_of(frame.f_code, frame.f_lineno)


def is_of_library(module: str, more: Sequence[str] = ()) -> bool:
    """Say whether a module is of fds, torch, Python or these libraries, rather than a user's."""
    name = module.partition(".")[0]
    return name in ("fds", "torch", "triton", *more) or name in sys.stdlib_module_names


def line_of(code: CodeType, line: int) -> str:
    """Return a line of code as text."""
    return f"{os.path.basename(code.co_filename)}:{line}, in {code.co_name}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint that names the known word nearest to `word`, or the known words.

    >>> did_you_mean("liner", ["log", "linear"])
    "did you mean 'linear'?"
    """
    words = list(known)
    return nearest(word, words) or "known: " + ", ".join(words[:20])


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint that names the known word nearest to `word`; empty if none is near, for errors that list them.

    A word is near if six tenths of the letters agree in order, in the parts between dots that differ, or if it begins
    or ends the other: "pin" and "pin_memory", "0.weight" and "params.0.weight".

    >>> nearest("liner", ["log", "linear"]), nearest("cosine", ["log", "linear"])
    ("did you mean 'linear'?", '')
    """
    part = lambda other: other.startswith(f"{word}_") or other.endswith(f".{word}")
    ratios = [(max(_agreement(word, other), 0.6 * part(other)), other) for other in known]
    near = [other for ratio, other in sorted(ratios, key=lambda pair: -pair[0]) if ratio >= 0.6]
    return f"did you mean {max(near, key=lambda other: SequenceMatcher(None, other, word).ratio())!r}?" if near else ""


def _agreement(word: str, other: str) -> float:
    """Return the share of letters that agree in order, without the parts between dots in which both begin or end."""
    parts, others = word.split("."), other.split(".")
    for end in (0, -1):
        while len(parts) > 1 and len(others) > 1 and parts[end] == others[end]:
            del parts[end], others[end]
    return SequenceMatcher(None, ".".join(others), ".".join(parts)).ratio()


def escaped(text: str) -> str:
    """Return text with unprintable characters escaped, for a terminal."""
    return text if text.isprintable() else ascii(text)[1:-1]


def _indent(text: str) -> str:
    return str(text).replace("\n", "\n         ")


def _rebuild(cls: type[FdsError], what: str, where: str, got: str, want: str, hint: str) -> FdsError:
    return cls(what, where=where, got=got, want=want, hint=hint)
