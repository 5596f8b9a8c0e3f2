"""What may fill a station: forms that say it, and errors that show it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import attrs
import torch

from fds import tree
from fds.errors import ComposeError
from fds.loss import Buffered
from fds.optim import Optimizer
from fds.step.gradients import Measure
from fds.step.sharding.transport import Transport
from fds.step.structure import AllBut
from fds.step.topology import Dimension


def takes(number: int) -> Callable[[Any], bool]:
    """Return a function that says whether its argument can be called with so many arguments."""

    def good(x: Any) -> bool:
        if not callable(x):
            return False
        try:
            inspect.signature(x).bind(*range(number))
        except TypeError:
            return False
        except ValueError:  # a function that is not written in Python has no signature
            return True
        return True

    return good


def binds(*names: str) -> Callable[[Any], bool]:
    """Return a function that says whether its argument can be called with these arguments, by position.

    A parameter with a default is meant for something else, which would be replaced, unless it has the argument's name.
    """

    def good(x: Any) -> bool:
        if not takes(len(names))(x):
            return False
        try:
            parameters = inspect.signature(x).parameters.values()
        except ValueError:
            return True
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return all(p.default is p.empty or p.name == name for p, name in zip(positional, names, strict=False))

    return good


_RESIDES = (
    'a residency: `kinds`, some of "params", "opt", "slots" and "gradients"; `updates_on`, "device" or "host"; '
    "holds(leaf), medium(leaf), chunks(structure), make(x, leaf), read(old, device) and write(worked, new); "
    "see `fds.step.Residency`"
)
_KINDS = ("params", "opt", "slots", "gradients")
_METHODS = {
    "holds": "(leaf)",
    "medium": "(leaf)",
    "chunks": "(structure)",
    "make": "(x, leaf)",
    "read": "(old, device)",
    "write": "(worked, new)",
}


def _has_kinds(x: Any) -> bool:
    """Say whether a residency names the kinds of its leaves."""
    kinds = getattr(x, "kinds", None)
    return (tree.is_sequence(kinds) or tree.is_set(kinds)) and set(kinds) <= set(_KINDS)


def _has_place(x: Any) -> bool:
    """Say whether a residency says where its leaves are updated."""
    return getattr(x, "updates_on", None) in ("device", "host")


def is_encoding(view: object) -> bool:
    """Say whether an entry of the station `view` says too what a state holds of a parameter."""
    return hasattr(view, "encode")


def is_reading(view: object) -> bool:
    """Say whether an entry of the station `view` reads other parameters than the one that it is a view of."""
    return hasattr(view, "reads")


def looks_at_shapes(view: object) -> bool:
    """Say whether an entry of the station `view` looks at the shapes of all parameters before a state is made."""
    return hasattr(view, "check")


def _is_view(x: Any) -> bool:
    names = ("x", "leaf", "call", *(["read"] if is_reading(x) else ()))
    methods = (("encode", 2), ("reads", 2), ("check", 1), ("summary", 2))
    return binds(*names)(x) and all(not hasattr(x, name) or takes(n)(getattr(x, name)) for name, n in methods)


def is_around(context: object) -> bool:
    """Say whether an entry of the station `context` is entered around each call of a layer, made again ones too."""
    return hasattr(context, "around_layer")


def writes_params(after: object) -> bool:
    """Say whether an entry of the station `after` writes parameters."""
    return getattr(after, "writes", None) == "params"


_EXECUTES = ("agreement", "reads", "draws", "dtypes", "pieces", "messages", "train", "agree", "evaluate")
FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "topology": (lambda x: isinstance(x, Dimension), "fds.step.Dimension(axis, role, placement)"),
    "batch": (binds("batch", "call"), "a function (batch, call) -> batch"),
    "split": (binds("batch"), "a function (batch) -> list of microbatches"),
    "frozen": (lambda x: isinstance(x, str | AllBut), "a pattern of parameter names, or AllBut"),
    "added": (
        lambda x: (
            has(x, "check", "beside", "lie") and all(takes(n)(f) for n, f in ((1, x.check), (3, x.beside), (1, x.lie)))
        ),
        "an object with check(shapes), beside(name, x, key) and lie(lies)",
    ),
    "view": (
        _is_view,
        "a function (x, leaf, call) -> tensor, of one parameter; it may have encode(x, leaf) and check(shapes); with "
        "reads(leaf, call), names of other parameters, it is (x, leaf, call, read)",
    ),
    "context": (
        lambda x: takes(2)(x.around_layer) if is_around(x) else binds("call")(x),
        "a function (call) -> context manager, or an object with around_layer(number of the layer, what it is given)",
    ),
    "kernels": (takes(0), "a function () -> context manager"),
    "modules": (binds("module", "root"), "a function (copy of a module, its root) -> None, which changes it in place"),
    "layer": (binds("calls", "call"), "a function (list of LayerCalls, call) -> list of LayerCalls"),
    "scale": (lambda x: has(x, "scale", "metrics"), "an object with scale(slots, device) and metrics(slots, device)"),
    "measure": (lambda x: isinstance(x, Measure), "fds.step.Measure(norm=True)"),
    "condition": (binds("gradients", "call"), "a function (Gradients, call) -> Gradients"),
    "execute": (lambda x: hasattr(x, "together") and has(x, *_EXECUTES), "an executor, as `fds.step.InTurn` is one"),
    "optimizer": (lambda x: isinstance(x, Optimizer), "an fds.Optimizer"),
    "after": (
        lambda x: (
            callable(x) and has(x, "init", "owns", "agrees", "bytes_sent", "messages")
            if writes_params(x)
            else binds("slot", "params", "skip", "call")(x) and isinstance(getattr(x, "slot", None), str)
        ),
        "a function (slot, params, skip, call) -> slot whose attribute `slot` is the slot's name; or an object, "
        'whose `writes` is "params", (structure, params, opt, skip, call), with init, owns, agrees, bytes_sent and '
        "messages",
    ),
    "run": (
        lambda x: binds("program", "state", "held", "batch")(x) and has(x, "refuse"),
        "an object, (program, state, held, batch) -> (state, metrics), as program.work is, with refuse(step)",
    ),
    "memory": (
        lambda x: hasattr(x, "slot") and hasattr(x, "lies"),
        "fds.step.Memory(slot, init, lies, merge=None, accept=None), "
        "lies='parameters', 'named', 'replicated', 'partial'",
    ),
    "slots": (
        lambda x: tree.is_dict(x) and all(map(takes(2), x.values())),
        "a dict: name -> function (params, device) -> slot",
    ),
}
_LEGS = {
    "reduce": "(axis, whole, out, kept)",
    "spread": "(axis, own, whole, kept)",
    "combine": "(axis, own, kept)",
    "gather": "(axis, part, whole)",
    "bytes_sent": "(leg, numel, dtype, size)",
}


def form(station: str, value: Any, current: object) -> None:
    """Raise `ComposeError` for what cannot fill a station; a record, such as is held where nobody fills it, can."""
    kind = type(current)
    is_record: Callable[[Any], bool] = lambda x: isinstance(x, kind) or not attrs.has(kind)
    good, want = FORMS.get(station, (is_record, f"a dict of the fields that it sets, or a {kind.__name__}"))
    if not good(value):
        got, hint = written(value), "" if station in FORMS else _as_field(station, value, kind)
        if station == "after" and isinstance(getattr(value, "slot", None), str) and callable(value):
            got = _signature_of(value, "__call__")
        raise ComposeError(
            "this cannot fill the station", where=f"station {station!r}", got=got[:120], want=want, hint=hint
        )
    if station in ("loss", "eval_loss"):
        loss(station, value)
    if station == "topology" and not takes(1)(value.placement.lies):
        raise _misshapen(f"station {station!r}", value.placement, "lies", "(name) -> SplitDim, Replicated or Owned")
    for attribute in attrs.fields(kind) if attrs.has(kind) and isinstance(value, kind) else ():
        field(station, attribute.name, getattr(value, attribute.name))


def field(station: str, name: str, value: Any) -> None:
    """Raise `ComposeError` for what cannot fill a field of a station."""
    where, hint = f"station {station!r}, {name}", "an object of it, not the class" if isinstance(value, type) else ""
    if (station, name) == ("place", "residency"):
        if hint or not any(hasattr(value, method) for method in _METHODS):
            raise ComposeError(
                "this cannot fill the station", where=where, got=written(value)[:120], want=_RESIDES, hint=hint
            )
        _check_methods(where, value, _METHODS)
        for attribute, good in (("kinds", _has_kinds(value)), ("updates_on", _has_place(value))):
            if not good:
                raise ComposeError(
                    "this cannot fill the station",
                    where=where,
                    want=_RESIDES,
                    got=f"{attribute}: {getattr(value, attribute, 'missing')!r}",
                )
    if name == "transport":
        if not isinstance(value, Transport):
            legs = ", ".join(f"{leg}{takes_these}" for leg, takes_these in _LEGS.items())
            raise ComposeError(
                "this cannot fill the station",
                where=where,
                got=written(value)[:120],
                hint=hint,
                want=f"a subclass of fds.step.Transport, with {legs}, keeps, bound",
            )
        _check_methods(where, value, _LEGS)
        for field, kind in (("keeps", bool), ("bound", (int, float))):
            if not isinstance(option := getattr(value, field), kind):
                raise ComposeError(
                    "this cannot fill the station",
                    where=where,
                    got=f"{field}: {option!r}"[:120],
                    want="keeps: bool" if field == "keeps" else "bound: float",
                )


def _check_methods(where: str, value: Any, methods: dict[str, str]) -> None:
    """Raise `ComposeError` where a method is missing, or takes other arguments than these."""
    for method, takes_these in methods.items():
        if not takes(takes_these.count(",") + 1)(getattr(value, method, None)):
            raise _misshapen(where, value, method, takes_these)


def _signature_of(value: Any, method: str) -> str:
    """Return a method as text: its class, its name and its arguments."""
    function, name = getattr(value, method, None), f"{type(value).__name__}.{method}"
    if not callable(function):
        return f"{type(value).__name__} without {method}"
    try:
        return f"{name}{inspect.signature(function)}"
    except (TypeError, ValueError):
        return name


def _as_field(station: str, value: object, kind: type) -> str:
    """Return what to write for a value that is one of a record's fields; "" where it is none of them."""
    guesses: dict[type, str] = {bool: "donate", torch.dtype: "dtype"}
    guess = guesses.get(type(value), "")
    if isinstance(value, Transport):
        guess = "transport"
    elif any(hasattr(value, method) for method in _METHODS):
        guess = "residency"
    fields = [attribute.name for attribute in attrs.fields(kind)]
    text = f"{type(value).__name__}(...)" if repr(value).startswith("<") else repr(value)
    return f"{station}={{{guess!r}: {text}}}" if guess in fields else f"the fields are {', '.join(fields)}"


def _misshapen(where: str, value: Any, method: str, takes_these: str) -> ComposeError:
    return ComposeError(
        "a method of this cannot be called as it must",
        where=where,
        got=_signature_of(value, method)[:120],
        want=f"{method}{takes_these}",
    )


def loss(role: str, function: Any) -> None:
    """Raise `ComposeError` for a loss of other arguments than it is called with."""
    words, inner = ["params", "batch"], function
    if isinstance(function, Buffered):
        words, inner = [*words, "buffers"], function.loss_fn
    if not takes(len(words))(inner):
        raise ComposeError(
            "a loss takes other arguments",
            where=role,
            got=written(inner)[:120],
            want=f"a function of ({', '.join(words)})",
        )


def written(x: Any) -> str:
    """Return a filler as text; of a function its name and arguments, whatever its address is."""
    if not inspect.isfunction(x):
        return repr(x)
    return f"{x.__name__}{inspect.signature(x)}"


def has(x: Any, *names: str) -> bool:
    """Say whether an object has these methods."""
    return all(callable(getattr(x, name, None)) for name in names)
