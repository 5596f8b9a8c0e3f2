"""The contracts of fillers: errors that name the filler, before what it returned is used."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from torch import Tensor

from fds import tree
from fds.errors import ComposeError
from fds.loss import Buffered
from fds.optim import Optimizer
from fds.optim.returned import in_words
from fds.step.gradients import Gradients, Measure
from fds.step.sharding.transport import Transport
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


def given(*names: str) -> Callable[[Any], bool]:
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


_RESIDES = ('a residency: `kinds`, some of "params", "opt" and "slots"; chunks(structure), make(x, kind), '
            "read(old, device) and write(worked, new); see `fds.step.Residency`")  # fmt: skip
_KINDS = ("params", "opt", "slots")
_METHODS = {"chunks": "(structure)", "make": "(x, kind)", "read": "(old, device)", "write": "(worked, new)"}


def _has_kinds(x: Any) -> bool:
    """Say whether a residency names the kinds of its leaves."""
    kinds = getattr(x, "kinds", None)
    return isinstance(kinds, list | tuple | set | frozenset) and set(kinds) <= set(_KINDS)


_MERGED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32,
           torch.int64}  # fmt: skip
_EXECUTES = ("agreement", "reads", "draws", "dtypes", "pieces", "train", "agree", "evaluate")
FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "topology": (lambda x: isinstance(x, Dimension), "fds.step.Dimension(axis, role, placement)"),
    "batch": (given("batch", "call"), "a function (batch, call) -> batch"),
    "split": (given("batch"), "a function (batch) -> list of microbatches"),
    "frozen": (lambda x: isinstance(x, str), "a pattern of parameter names"),
    "view": (given("x", "leaf", "call"), "a function (x, leaf, call) -> tensor, of one parameter"),
    "context": (given("call"), "a function (call) -> context manager"),
    "kernels": (takes(0), "a function () -> context manager"),
    "layer": (given("calls", "call"), "a function (list of LayerCalls, call) -> list of LayerCalls"),
    "scale": (lambda x: _has(x, "scale", "metrics"), "an object with scale(slots, device) and metrics(slots, device)"),
    "measure": (lambda x: isinstance(x, Measure), "fds.step.Measure(norm=True)"),
    "condition": (given("gradients", "call"), "a function (Gradients, call) -> Gradients"),
    "execute": (lambda x: hasattr(x, "together") and _has(x, *_EXECUTES), "an executor, as `fds.step.InTurn` is one"),
    "optimizer": (lambda x: isinstance(x, Optimizer), "an fds.Optimizer"),
    "commit": (given("slots", "skip"), "a function (slots, skip) -> slots"),
    "after": (lambda x: given("slot", "params", "skip", "call")(x) and isinstance(getattr(x, "slot", None), str),
              "a function (slot, params, skip, call) -> slot whose attribute `slot` is the slot's name"),
    "memory": (lambda x: hasattr(x, "slot") and hasattr(x, "lies"),
               "fds.step.Memory(slot, init, lies, merge=None, accept=None), "
               "lies='parameters', 'named', 'replicated', 'partial'"),
    "slots": (lambda x: isinstance(x, dict) and all(map(takes(2), x.values())),
              "a dict: name -> function (params, device) -> slot"),
}  # fmt: skip


_LEGS = {"reduce": "(axis, whole, out, kept)", "spread": "(axis, own, whole)", "combine": "(axis, own)",
         "gather": "(axis, part, whole)", "bytes_sent": "(leg, numel, dtype, size)"}  # fmt: skip


def form(station: str, value: Any, held: Any) -> None:
    """Raise `ComposeError` for what cannot fill a station; a record, such as is held where nobody fills it, can."""
    kind = type(held)
    record = lambda x: isinstance(x, kind) or not attrs.has(kind)
    good, want = FORMS.get(station, (record, f"a dict of the fields that it sets, or a {kind.__name__}"))
    if not good(value):
        got, hint = written(value), "" if station in FORMS else _as_field(station, value, kind)
        if station == "after" and isinstance(getattr(value, "slot", None), str) and callable(value):
            got = _signature_of(value, "__call__")
        raise ComposeError("this cannot fill the station", where=f"station {station!r}", got=got[:120], want=want,
                           hint=hint)  # fmt: skip
    if station in ("loss", "eval_loss"):
        loss(station, value)
    if station == "topology" and not takes(1)(value.placement.lies):
        raise _misshapen(station, "", value.placement, "lies", "(name) -> SplitDim, Replicated or Owned")
    for one in attrs.fields(kind) if attrs.has(kind) and isinstance(value, kind) else ():
        field(station, one.name, getattr(value, one.name))


def field(station: str, name: str, value: Any) -> None:
    """Raise `ComposeError` for what cannot fill a field of a station."""
    where, hint = f"station {station!r}, {name}", "an object of it, not the class" if isinstance(value, type) else ""
    if (station, name) == ("place", "residency"):
        if hint or not any(hasattr(value, method) for method in _METHODS):
            raise ComposeError("this cannot fill the station", where=where, got=written(value)[:120], want=_RESIDES,
                               hint=hint)  # fmt: skip
        _check_methods(where, value, _METHODS)
        if not _has_kinds(value):
            raise ComposeError("this cannot fill the station", where=where, want=_RESIDES,
                               got=f"kinds: {getattr(value, 'kinds', 'missing')!r}")  # fmt: skip
    if name == "transport":
        if not isinstance(value, Transport):
            legs = ", ".join(f"{leg}{takes_these}" for leg, takes_these in _LEGS.items())
            raise ComposeError("this cannot fill the station", where=where, got=written(value)[:120], hint=hint,
                               want=f"a subclass of fds.step.Transport, with {legs}, keeps, bound")  # fmt: skip
        _check_methods(where, value, _LEGS)
        for field, kind in (("keeps", bool), ("bound", (int, float))):
            if not isinstance(found := getattr(value, field), kind):
                raise ComposeError("this cannot fill the station", where=where, got=f"{field}: {found!r}"[:120],
                                   want="keeps: bool" if field == "keeps" else "bound: float")  # fmt: skip


def _check_methods(where: str, value: Any, methods: dict[str, str]) -> None:
    """Raise `ComposeError` where a method is missing, or takes other arguments than these."""
    for method, takes_these in methods.items():
        if not takes(takes_these.count(",") + 1)(getattr(value, method, None)):
            raise ComposeError("a method of this cannot be called as it must", where=where,
                               got=_signature_of(value, method)[:120], want=f"{method}{takes_these}")  # fmt: skip


def _signature_of(value: Any, method: str) -> str:
    """Return a method as text: its class, its name and its arguments."""
    own, name = getattr(value, method, None), f"{type(value).__name__}.{method}"
    if not callable(own):
        return f"{type(value).__name__} without {method}"
    try:
        return f"{name}{inspect.signature(own)}"
    except (TypeError, ValueError):
        return name


def _as_field(station: str, value: Any, kind: type) -> str:
    """Return what to write for a value that is one of a record's fields; "" where it is none of them."""
    guess = {bool: "donate", torch.dtype: "dtype"}.get(type(value), "")
    if isinstance(value, Transport):
        guess = "transport"
    elif any(hasattr(value, method) for method in _METHODS):
        guess = "residency"
    fields = [one.name for one in attrs.fields(kind)]
    text = f"{type(value).__name__}(...)" if repr(value).startswith("<") else repr(value)
    return f"{station}={{{guess!r}: {text}}}" if guess in fields else f"the fields are {', '.join(fields)}"


def _misshapen(station: str, at: str, value: Any, method: str, want: str) -> ComposeError:
    return ComposeError("a method of this cannot be called as it must", where=f"station {station!r}{at}",
                        got=_signature_of(value, method)[:120], want=f"{method}{want}")  # fmt: skip


def not_sent(found: Any, transport: Transport, leg: str) -> ComposeError:
    """Return the error of a leg of a transport that returned nothing to wait for."""
    want = f"{leg}(axis, ...) -> Work: what a started collective returns, or an fds.step.Pending(work, then)"
    return _broken("gather" if leg == "gather" else "reduce", transport, in_words(found), want)


def loss(role: str, function: Any) -> None:
    """Raise `ComposeError` for a loss of other arguments than it is called with."""
    words, inner = ["params", "batch"], function
    if isinstance(function, Buffered):
        words, inner = [*words, "buffers"], function.loss_fn
    if not takes(len(words))(inner):
        raise ComposeError("a loss takes other arguments", where=role, got=written(inner)[:120],
                           want=f"a function of ({', '.join(words)})")  # fmt: skip


def batch(found: Any, given: Any, one: Any) -> Any:
    """Return what a batch map returned. Raises `ComposeError` for nothing, unless it was given nothing."""
    if found is None and given is not None:
        raise _broken("batch", one, "None", "the batch")
    return found


def written_rows(one: Any, where: str) -> ComposeError:
    """Return the error of a batch map that writes into the rows that it is given."""
    return ComposeError(
        "what fills a station writes over the batch that it is given", where=f"station 'batch', {_called(one)}",
        got=f"an in-place operation on {where}", want="(batch, call) -> batch, a new one where it differs",
        hint="look for methods that end in _; what was written stays",
    )  # fmt: skip


def viewed(found: Any, view: Any) -> Tensor:
    """Return what a view returned. Raises `ComposeError` for anything but a tensor."""
    if not isinstance(found, Tensor):
        raise _broken("view", view, in_words(found), "a tensor in the place of the parameter")
    return found


def first_slot(found: Any, name: str, make: Any) -> Any:
    """Return a slot as a filler made it. Raises `ComposeError` for anything but a tree of tensors."""
    for path, x in tree.paths(found).items():
        if not isinstance(x, Tensor):
            at = ".".join(filter(None, (name, path)))
            raise _broken("memory", make, f"{at}: {in_words(x)}", "a tree of tensors, which a state can hold")
    return found


def named_slot(found: Any, name: str, make: Any, among: Iterable[str] | None = None) -> None:
    """Raise `ComposeError` for a slot that is anything but a dict of tensors by strings, or by those `among` some."""
    if not (isinstance(found, dict) and all(isinstance(k, str) and isinstance(x, Tensor) for k, x in found.items())):
        raise _broken("memory", make, f"{name}: {in_words(found)}", "a dict: name -> tensor")
    other = next((k for k in found if among is not None and k not in among), None)
    if other is not None:
        raise _broken("memory", make, f"{name}.{other}", "a dict: name of a trained parameter -> tensor")


def merged_slot(found: Any, name: str, make: Any, device: torch.device) -> None:
    """Raise `ComposeError` for a slot of which entries cannot be merged with what is noted on a device."""
    for path, x in tree.paths(found).items():
        elsewhere = x.device.type != device.type != "meta"
        if x.dtype not in _MERGED or elsewhere:
            at, want = ".".join(filter(None, (name, path))), f"floating or signed integer numbers on {device}"
            raise _broken("memory", make, f"{at}: {x.dtype} on {x.device}", want)


def reported(scale: Any, slots: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Return what a scale, where there is one, reports. Raises `ComposeError` for anything but a dict of tensors."""
    found = {} if scale is None else scale.metrics(slots, device)
    if not (isinstance(found, dict) and all(isinstance(x, Tensor) for x in found.values())):
        raise _broken("scale", scale, in_words(found), "metrics(slots, device): a dict of 0-d tensors")
    return found


def gradients(found: Any, known: Gradients, one: Any) -> Gradients:
    """Return what a gradient map returned, knowing where it lies. Raises `ComposeError` for other leaves."""
    if not isinstance(found, Gradients):
        raise _broken("condition", one, in_words(found), "Gradients(leaves, scale), of as many leaves as it was given")
    for name, x in (("scale", found.scale), ("norm", found.norm)):
        if not (x is None or (isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point())):
            raise _broken("condition", one, f"{name}: {in_words(x)}",
                          f"{name}: None or a floating-point () tensor, as `grads.{name}` is")  # fmt: skip
    if found.leaves is not known.leaves:
        leaves = _alike("condition", one, found.leaves, known.leaves)
        found = attrs.evolve(found, leaves=[x.contiguous() for x in leaves])
    return attrs.evolve(found, segments=known.segments, axes=known.axes, norm_of=known.norm_of,
                        counted=known.counted)  # fmt: skip


def remembered(found: Any, given: Any, one: Any, station: str = "after") -> Any:
    """Return a slot as a filler of `after`, or a memory, returned it. Raises `ComposeError` for another structure."""
    if found is given:
        return found
    (new, spec), (old, known) = tree.parts(found), tree.parts(given)
    if spec != known:
        raise _broken(station, one, in_words(found), f"the slot {one.slot!r}, of the structure that it has")
    _alike(station, one, new, old, dtypes=True)
    return found


def overwritten(memory: Any) -> ComposeError:
    """Return the error of a rule that writes into the slot of the old state."""
    return ComposeError("what fills a station writes over the state", where=f"station 'memory', {memory}",
                        got="accept wrote into the slot", want="accept: (slot, noted, call) -> a new slot")  # fmt: skip


def written_slot() -> ComposeError:
    """Return the error of a filler that writes into the slots that a call shows."""
    return ComposeError(
        "a filler writes into the slots of a state", where="call.slots", got="an entry that is set or deleted",
        want="call.slots that is only read", hint="a slot changes by the notes of fillers and its Memory's merge and "
        "accept, or by a filler of `after`, which is given it",
    )  # fmt: skip


def unnoted(where: str) -> ComposeError:
    """Return the error of a note where nothing may be noted."""
    return ComposeError(
        "nothing may be noted here", where=where, got="no Memory with merge=, another station, or a call that is over",
        want="call.note in a filler of `batch`, `view`, `context` or `layer`, or in a call that a layer map returned, "
        "while it runs; or in one of `condition` with an attribute notes = True",
        hint="what follows an update writes its slot itself",
    )  # fmt: skip


def keyless(one: Any) -> ComposeError:
    """Return the error of a filler that says that it draws nothing and asks for a random key."""
    return ComposeError(
        "a filler that says that it draws nothing asks for a random key", where=written(one)[:120],
        got="draws = False, and call.key", want="one of the two",
        hint="what draws is drawn alike for tied parameters, so it leaves `draws` out",
    )  # fmt: skip


def microbatches(found: Any, split: Any) -> list[Any]:
    """Return what a split returned. Raises `ComposeError` for anything but a list of some."""
    if not (isinstance(found, list | tuple) and found):
        raise _broken("split", split, in_words(found), "a list of microbatches, one or more")
    return list(found)


def context(found: Any, make: Any, station: str = "context") -> AbstractContextManager:
    """Return the context that a filler made. Raises `ComposeError` where it is none."""
    if not _has(type(found), "__enter__", "__exit__"):
        raise _broken(station, make, in_words(found), "a context manager")
    return found


def kept(found: Any, given: dict[str, Any], commit: Any) -> dict[str, Any]:
    """Return the slots that a commit returned. Raises `ComposeError` where some are missing, or there are others."""
    if not (isinstance(found, dict) and found.keys() == given.keys()):
        raise _broken("commit", commit, in_words(found), f"a dict of the slots {', '.join(given) or '(none)'}")
    return found


def scalar(found: Any, scale: Any) -> Tensor:
    """Return the scale that a filler returned. Raises `ComposeError` for anything but a floating 0-d tensor."""
    if not (isinstance(found, Tensor) and found.dim() == 0 and found.is_floating_point()):
        raise _broken("scale", scale, in_words(found), "a 0-d float64 tensor on the device")
    return found


def _alike(station: str, one: Any, found: Any, given: Sequence[Tensor], *, dtypes: bool = False) -> list[Tensor]:
    what = lambda x: (x.shape, x.device, x.dtype if dtypes else None) if isinstance(x, Tensor) else type(x)
    same = isinstance(found, list | tuple) and list(map(what, found)) == list(map(what, given))
    if not same:
        raise _broken(station, one, in_words(found), in_words(given))
    return list(found)


def _broken(station: str, one: Any, got: str, want: str) -> ComposeError:
    return ComposeError("what fills a station did not return what it must",
                        where=f"station {station!r}, {_called(one)}", got=got[:200], want=want[:200])  # fmt: skip


def _called(one: Any) -> str:
    """Return how to call a filler in a message."""
    text = repr(one)
    return getattr(one, "__name__", None) or (type(one).__name__ if text.startswith("<") else text[:60])


def written(x: Any) -> str:
    """Return a filler as text; of a function its name and arguments, whatever its address is."""
    if not inspect.isfunction(x):
        return repr(x)
    return f"{x.__name__}{inspect.signature(x)}"


def _has(x: Any, *names: str) -> bool:
    return all(callable(getattr(x, name, None)) for name in names)
