"""What a step checks before it does anything: that states and parameters are such, and its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, ParamSpec, TypeVar

import attrs
import torch
from torch import Tensor

from fds import autodiff, tree
from fds.errors import FdsError, LossError, StateError
from fds.layout import Sharded
from fds.loss import Layers
from fds.loss.compiled import untraced
from fds.state import State
from fds.step.checks.forms import takes
from fds.step.sharding.shard import Shard
from fds.step.structure import Slot, Structure

P = ParamSpec("P")
R = TypeVar("R")

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INTEGERS = {torch.bool, torch.uint8, *_BITS.values()}
_PLAIN = (Tensor, torch.nn.Parameter)
_ANEW = "make the state with the init of this step, or carry it over: step.init(other_step.params(state))"


@attrs.frozen(eq=False)
class StateTensors:
    """The tensors of a state, in the order of its structure."""

    structure: Structure
    parts: list[Tensor]
    devices: list[torch.device]  # of the trained parts
    opt: list[Tensor]  # of all slots, one after another


def graphless(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method of a step run without gradients and outside inference mode, wherever it is called.

    So nothing that it returns has a graph, and all of it may be trained later. Raises `FdsError` inside a transform of
    `torch.func`.
    """

    @untraced("a step is not compiled, its loss may be: compose(...)(torch.compile(loss_fn))")
    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if autodiff.in_torch_func():
            raise FdsError(
                "torch.func cannot transform a step",
                got="a step inside grad, vmap, jvp or another transform",
                want="torch.func inside the loss, around the model",
                hint="for several states: call the step for each",
            )
        if not torch.is_inference_mode_enabled():
            with torch.no_grad():
                return method(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run


def undifferentiated(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method of a step raise `FdsError` for arguments that are being differentiated: no graph leads through."""

    @untraced("a step is not compiled, its loss may be: compose(...)(torch.compile(loss_fn))")
    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if autodiff.is_differentiated() and any(_requires_grad(x) for x in tree.leaves((args, kwargs))):
            raise FdsError(
                "no gradient flows through a step",
                got="a state or a batch that depends on what is differentiated",
                want="the update written out, with fds.autodiff.value_and_grad(..., create_graph=True)",
                hint="under torch.no_grad() the step is a constant",
            )
        return method(*args, **kwargs)

    return run


def usable(state: Any, doing: str) -> None:
    """Raise `StateError` for anything but a state, `DonatedStateError` for one that was given up."""
    if not isinstance(state, State):
        raise StateError(
            f"{doing}: this is not a state",
            got=type(state).__name__,
            want="a State",
            hint="what step.init(params), fds.load or a step returned",
        )
    state.check(doing)


def same_form(params: Any, shard: Shard | None) -> None:
    """Raise `StateError` for anything but slices where a state of a step holds slices."""
    if shard is not None and shard.slices_state and not isinstance(params, Sharded):
        raise StateError(
            "the state does not hold the slices of parameters that this step does",
            where="params",
            got=f"a {type(params).__name__} in their place",
            want=f"parameters as stage {shard.stage} holds them",
            hint="state = step.with_params(state, params) takes whole ones, as step.params returns them, or a slot of "
            "state.opt",
        )


def same_composition(state: State, slots: Iterable[str], opt: Mapping[str, Slot]) -> None:
    """Raise `StateError` unless a state has these slots, and in `opt` the names of these slots."""
    parts = [("slots", state.slots, slots), ("opt", state.opt, opt)]
    parts += [(f"opt.{slot}", state.opt.get(slot, {}), want.names) for slot, want in opt.items()]
    for where, got, want in parts:
        if tuple(got) != tuple(want) and got.keys() != set(want):
            raise StateError(
                "the state is another composition's",
                where=where,
                got=", ".join(got) or "nothing",
                want=", ".join(want) or "nothing",
                hint=_ANEW,
            )


def without_graph(state: State, tensors: StateTensors) -> State:
    """Return a state of which no tensor requires grad or was made in inference mode."""
    leaves = [*tensors.parts, *tensors.opt, *tree.leaves(state.buffers), *tree.leaves(state.slots), state.key]
    if not any(map(tree.requires_grad_of, leaves)) and not any(map(Tensor.is_inference, leaves)):
        return state
    names = ("params", "opt", "buffers", "slots", "key")
    return attrs.evolve(state, **{name: tree.map(_plain, getattr(state, name)) for name in names})


def same_slots(state: State, opt: Mapping[str, Slot], devices: Sequence[torch.device] | None) -> list[Tensor]:
    """Return the tensors of the optimizer's slots, one slot after another; `devices` are those of the trained parts.

    Raises `StateError` where one has not the shape, the dtype or the device of its part; without `devices` any will do.
    """
    leaves: list[Tensor] = []
    for slot, want in opt.items():
        named = state.opt[slot]
        values = list(named.values()) if tuple(named) == want.names else [named[name] for name in want.names]
        at = devices if devices is None or all(want.has) else list(compress(devices, want.has))
        if kinds(values) != (want.shapes, want.dtypes) or (at is not None and list(map(tree.device_of, values)) != at):
            at = [None] * len(values) if at is None else at
            wanted = zip(want.names, values, want.shapes, want.dtypes, at, strict=True)
            for name, x, shape, dtype, device in wanted:
                _check_kind(f"opt.{slot}.{name}", x, shape, dtype, device)
        leaves += values
    return leaves


def same_kinds(where: str, got: Any, want: Any) -> None:
    """Raise `StateError` unless a tree has the structure, shapes and dtypes of another, of `meta` tensors."""
    (values, spec), (wanted, wanted_spec) = tree.parts(got), tree.parts(want)
    if spec == wanted_spec and kinds(values) == kinds(wanted):
        return
    named, wanted_by_name = tree.paths(got), tree.paths(want)
    for name in dict.fromkeys([*wanted_by_name, *named]):
        _check_kind(f"{where}.{name}", named.get(name), *_kind(wanted_by_name.get(name)))


def counters(state: State) -> None:
    """Raise `StateError` where `step`, `calls` or `key` is not what it was when `init` made it."""
    host = torch.device("cpu")
    for name, x, size, device in (
        ("step", state.step, (), None),
        ("calls", state.calls, (), host),
        ("key", state.key, (2,), host),
    ):
        _check_kind(name, x, torch.Size(size), torch.int64, device)


def kinds(leaves: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the shapes and the dtypes of leaves; None for a leaf that is not a tensor."""
    try:
        return tuple(map(tree.shape_of, leaves)), tuple(map(tree.dtype_of, leaves))
    except TypeError:
        pairs = [_kind(x) for x in leaves]
        return tuple(shape for shape, _ in pairs), tuple(dtype for _, dtype in pairs)


def _kind(x: Any) -> tuple[torch.Size | None, torch.dtype | None]:
    return (x.shape, x.dtype) if isinstance(x, Tensor) else (None, None)


def _check_kind(
    where: str, x: Any, shape: torch.Size | None, dtype: torch.dtype | None, device: torch.device | None = None
) -> None:
    """Raise `StateError` for anything but a tensor of this shape, dtype and device; None stands for no tensor."""
    if _kind(x) == (shape, dtype) and (device is None or x.device == device):
        return

    def text(shape: torch.Size, dtype: torch.dtype | None, device: torch.device | None) -> str:
        return f"{tuple(shape)} {dtype}" + ("" if device is None else f" on {device}")

    got = text(x.shape, x.dtype, device and x.device) if isinstance(x, Tensor) else repr(x)[:60]
    raise StateError(
        "a part of the state does not fit its parameters and this step",
        where=where,
        got=got,
        want="nothing" if shape is None else text(shape, dtype, device),
        hint=_ANEW,
    )


@contextlib.contextmanager
def intact(looked: dict[str, list[str]], at: str, *, by: str = "the loss", **trees: Any) -> Generator[None]:
    """Raise `LossError` where what runs inside writes into the tensors of these trees.

    Writing through `.data` does not change the version of a tensor, so values are compared the first time that this
    runs `at` a place, which is then recorded in `looked`.
    """
    leaves = [x for tree_ in trees.values() for x in tree.leaves(tree_)]
    try:
        versions = list(map(tree.version_of, leaves))
    except (TypeError, RuntimeError):  # not a tensor, or an inference tensor, which has no version counter
        leaves = [x for x in leaves if isinstance(x, Tensor) and not x.is_inference()]
        versions = list(map(tree.version_of, leaves))
    plain = [] if at in looked else [x for x in leaves if type(x) in _PLAIN and _has_values(x)]
    values = _values(plain) if plain else []
    yield
    changed = {id(x) for x, old, new in zip(plain, values, _values(plain), strict=True) if old != new} if plain else ()
    looked.setdefault(at, [])
    if changed or list(map(tree.version_of, leaves)) != versions:
        changed = {*changed} | {id(x) for x, version in zip(leaves, versions, strict=True) if x._version != version}
        where = ", ".join(path for path, x in tree.paths(trees).items() if id(x) in changed)
        raise LossError(
            f"{by} writes over what it is given",
            where=where,
            got="an in-place operation",
            want=f"{by.replace('the ', 'a ')} that leaves its arguments as they are",
            hint="look for inplace=True in the first layer, methods that end in _ and .data; what was written stays",
        )


def _values(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the addresses of tensors, and the sums of their bits."""
    bits = [x.detach().contiguous().view(_BITS[x.itemsize]) if x.is_floating_point() else x for x in tensors]
    sums = [x.sum(dtype=torch.int64) for x in bits]
    on = dict.fromkeys(x.device for x in sums)
    read = {device: iter(tree.values_of(torch.stack([x for x in sums if x.device == device]))) for device in on}
    return [(x.data_ptr(), next(read[x.device])) for x in tensors]


def _has_values(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_meta and (x.is_floating_point() or x.dtype in _INTEGERS)


def parameters(params: Any) -> None:
    """Raise `StateError` for a module or a loss in place of the parameters that `step.init` takes."""
    if isinstance(params, Layers):
        raise StateError("layers are a loss, not parameters", got="layers", want="layers.init")
    if isinstance(params, torch.nn.Module):
        raise StateError(
            "a module is not a tree of parameters",
            got=type(params).__name__,
            want="a pytree of tensors, or a recipe",
            hint="apply, params, buffers = fds.functional(module)",
        )
    if callable(params) and not takes(1)(params):
        raise StateError(
            "what makes parameters takes a key",
            got=repr(params)[:80],
            want="a function key -> params",
            hint="fds.recipe(factory) makes one of a function that builds a module",
        )


def _requires_grad(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _plain(x: Tensor) -> Tensor:
    return x.clone() if x.is_inference() else x.detach()


def check_own(params: Any) -> None:
    """Raise `StateError` for leaves of a tree that are not finite, or that share memory."""
    named = tree.paths(params)
    seen: dict[tuple[torch.device, int], dict[str, Tensor]] = {}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            continue
        if x.numel() and not x.is_meta:
            others = seen.setdefault((x.device, x.untyped_storage().data_ptr()), {})
            for other, y in others.items():
                if overlap(x, y):
                    raise StateError(
                        "two parameters share their memory, and a copy would untie them",
                        where=name,
                        got=f"memory of {other!r}",
                        want="each parameter once",
                        hint="leave one name out (fds.functional and TiedLayerSpec do), and use it twice in the loss",
                    )
            others[name] = x
        check_finite(name, x)


def check_finite(name: str, x: Tensor) -> None:
    """Raise `StateError` for a leaf with NaN or infinite elements."""
    if x.is_floating_point() and not x.is_meta and not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).sum())
        raise StateError(
            "a parameter is not finite",
            where=name,
            got=f"{bad} of {x.numel()} elements NaN or infinite",
            want="finite initial values",
        )


def overlap(x: Tensor, y: Tensor) -> bool:
    """Say whether two tensors of one storage share an element."""
    (a, b), (c, d) = ((t.storage_offset(), t.storage_offset() + _extent(t)) for t in (x, y))
    if x.dtype != y.dtype or b <= c or d <= a:
        return b > c and d > a
    used = torch.zeros(max(b, d), dtype=torch.bool)
    used.as_strided(x.shape, x.stride(), a).fill_(True)
    return bool(used.as_strided(y.shape, y.stride(), c).any())


def _extent(x: Tensor) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
