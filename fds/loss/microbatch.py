"""Losses of any kind: one microbatch of one, its calls seeded and wrapped by the layer maps; the modules of one."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor, nn

from fds import random
from fds.errors import ComposeError, LossError
from fds.loss import compiled
from fds.loss.compiling import CompiledLoss, Compiler
from fds.loss.layers import Layers
from fds.loss.modes import Mode, mode
from fds.loss.module_copies import StateBuffers
from fds.loss.modules import Apply
from fds.loss.values import Buffered, Outcome, read


@attrs.frozen(eq=False)
class LayerCall:
    """How one layer, or several one after another, are called; layer maps take and return lists of these.

    Attributes:
        run: x -> what the layer returns; for an opaque loss, (params, batch) -> what the loss returns.
        layers: indices of the layers that it runs; empty for an opaque loss.
        in_place: it writes over its input.
        recomputes: it runs forward again in backward.
    """

    run: Callable[..., Any]
    layers: tuple[int, ...] = ()
    in_place: bool = False
    recomputes: bool = False

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        return self.run(*args)

    def replaced(self, run: Callable[..., Any]) -> LayerCall:
        """Return the same with another function in the place of `run`."""
        return attrs.evolve(self, run=run)


LayerMap = Callable[[list[LayerCall], Any], list[LayerCall]]


@attrs.frozen(eq=False)
class Setting:
    """All that one evaluation of a loss depends on besides parameters, batch and buffers."""

    seeds: Sequence[int | None]  # one per layer that may draw, the criterion's last
    devices: tuple[torch.device, ...] = ()
    mode: Mode = Mode()
    maps: tuple[LayerMap, ...] = ()  # outermost first
    record: Any = None  # the `Call` of the microbatch, which maps receive and from whose key all that draws is seeded

    def call(self, index: int, f: Callable[..., Any], num_params: int = 0) -> Callable[..., Any]:
        """Return `f` seeded and in this mode, however often and in whichever thread it is run again.

        Its arguments are of the microbatch, but for the first `num_params`, which are parameters.
        """
        around = self.mode.around

        def run(*args: Any) -> Any:
            with mode(self.mode):
                seed = self.seeds[index]
                if seed is not None:
                    random.reseed(seed, self.devices)
                if not around:
                    return f(*args)
                with contextlib.ExitStack() as stack:
                    for enter in around:
                        stack.enter_context(enter(index, args[num_params:]))
                    return f(*args)

        return run

    def at(self, function: Any, *data: int | str, alone: tuple[int, ...] = ()) -> Any:
        """Return the `Call` of a filler, and seed the generators for it from its key, where it may draw.

        Only generators are seeded with `alone` too: what tells a stage from others, whose fillers have the same key.
        """
        call = self.record.given_to(function, *data)
        if random.draws(function):
            random.reseed(random.seed(call.base, *call.data, *alone), self.devices)
        return call

    def mapped(self, calls: list[LayerCall]) -> list[LayerCall]:
        """Apply the layer maps: a map takes the list of calls and may wrap or group them.

        A map that may draw is seeded, by the first layer that it is given; and so is every call that it returns, by its
        first layer: these draw alike wherever the layers are cut into stages. The layers inside are seeded anew.
        """
        first = calls[0].layers[0] if calls[0].layers else 0
        for index, layer_map in reversed(list(enumerate(self.maps))):
            before, call_of_map = calls, self.at(layer_map, "layers", index, alone=(first,))
            calls = check_calls(layer_map, layer_map(list(before), call_of_map), before)
            if random.draws(layer_map):
                old = {id(call) for call in before}  # they are alive: nobody else has their id
                calls = [
                    call if id(call) in old else self._seed_call(call, "layer", index, first + at)
                    for at, call in enumerate(calls)
                ]
        return calls

    def _seed_call(self, call: LayerCall, kind: str, index: int, at: int) -> LayerCall:
        def run(*args: Any) -> Any:
            self.at(call, kind, index, call.layers[0] if call.layers else at)
            return call.run(*args)

        return call.replaced(run)


def check_calls(layer_map: LayerMap, calls: Any, before: Sequence[LayerCall]) -> list[LayerCall]:
    """Return what a layer map returned. Raises `ComposeError` unless it is a list of functions, at most as many.

    Plain functions, as many as there were calls, stand for the calls in their places.
    """
    if isinstance(calls, list | tuple) and 0 < len(calls) <= len(before) and all(map(callable, calls)):
        places = before if len(calls) == len(before) else [LayerCall(call) for call in calls]
        return [
            call if isinstance(call, LayerCall) else place.replaced(call)
            for call, place in zip(calls, places, strict=True)
        ]
    many = isinstance(calls, list | tuple) and len(calls) > len(before)
    raise ComposeError(
        "a layer map returned more calls than it was given" if many else "a layer map returned no calls",
        where=f"station 'layer', {getattr(layer_map, '__name__', layer_map)}",
        got=f"{len(calls)} calls" if many else repr(calls)[:80],
        want=f"a list of 1 to {len(before)} LayerCalls, or functions of one argument",
    )


def draws(loss: Any) -> list[bool]:
    """Say which calls of a loss are seeded: the one of an opaque loss; layers that may draw, and the criterion."""
    if isinstance(loss, Layers):
        return [loss.layer(i).draws for i in range(len(loss))] + [True]
    return [True]


def initial_buffers(loss: Any) -> dict[str, Tensor]:
    """Return the initial `state.buffers`."""
    if isinstance(loss, Layers):
        return loss.buffers()
    return loss.buffers if isinstance(loss, Buffered) else {}


def carried_buffers(loss: Any, eval_loss: Any, buffers: dict[str, Tensor]) -> StateBuffers | None:
    """Return the state's buffers for an `eval_loss` that does not take them; None if it does, or if there are none."""
    if not buffers or isinstance(eval_loss, Buffered | Layers):
        return None
    initial = loss.sources() if isinstance(loss, Layers) else initial_buffers(loss)
    return StateBuffers({name: x for name, x in initial.items() if name in buffers}, buffers)


def run(loss: Any, params: Any, batch: Any, buffers: dict[str, Tensor], setting: Setting) -> Outcome:
    """Evaluate a loss on one microbatch. Raises `LossError` for an invalid result."""
    if isinstance(loss, Layers):
        return _run_layers(loss, params, batch, buffers, setting)
    threaded = isinstance(loss, Buffered)
    f = loss.loss_fn if threaded else loss
    (call,) = setting.mapped([LayerCall(setting.call(0, f, num_params=1))])  # parameters
    if threaded:
        value = call(params, batch, {key: b.clone() for key, b in buffers.items()})
    else:
        value = call(params, batch)
    return read(value, where=name(loss), buffers=buffers, threaded=threaded)


def is_compiled(loss: Any) -> bool:
    """Return whether this loss is compiled as a whole, so that its parameters must be plain tensors."""
    inner = loss.loss_fn if isinstance(loss, Buffered) else loss
    return isinstance(inner, CompiledLoss) or compiled.is_compiled(inner)


def compiled_with(arguments: dict[str, Any], text: str, loss: Any) -> Any:
    """Return a loss that does what this one does, compiled with these arguments: `Layers` layer by layer."""
    compiler = Compiler.of(loss, arguments, text)
    if isinstance(loss, Layers):
        return loss.compiled(compiler)
    if isinstance(loss, Buffered):
        return attrs.evolve(loss, loss_fn=CompiledLoss(loss.loss_fn, compiler, name(loss)))
    return CompiledLoss(loss, compiler, name(loss))


def name(loss: Any) -> str:
    """Return the name of a loss for messages."""
    inner = loss.loss_fn if isinstance(loss, Buffered) else loss
    return getattr(inner, "__name__", type(inner).__name__)


def _run_layers(loss: Layers, params: Any, batch: Any, buffers: dict[str, Tensor], setting: Setting) -> Outcome:
    x, targets = loss.split(batch)
    loss.check(params)
    current = dict(buffers)
    for call in setting.mapped(layer_calls(loss, range(len(loss)), params, current, setting)):
        x = call(x)
    value = setting.call(len(loss), loss.compare)(x, targets)
    if setting.mode.seen is not None:
        setting.mode.seen[:1] = [x]
    return read(value, where="the criterion of Layers", buffers=current)


def layer_calls(
    loss: Layers, indices: Iterable[int], params: Any, current: dict[str, Tensor], setting: Setting
) -> list[LayerCall]:
    """Return the calls of some layers, in order, for one microbatch; each writes its new buffers into `current`."""
    old: dict[int, dict[str, Tensor]] = {}

    def layer_call(index: int) -> LayerCall:
        layer = loss.layer(index)

        def run_layer(x: Any) -> Any:
            first = index not in old  # a recomputation finds the buffers of the first run, and its updates are lost
            out, new = layer(params, old.setdefault(index, dict(current)) if layer.buffers else {}, x)
            if first:
                current.update(new)
            return out

        return LayerCall(setting.call(index, run_layer), (index,), layer.in_place)

    return [layer_call(i) for i in indices]


class Found(NamedTuple):
    """A module that a loss runs copies of: its structure, parameters on meta.

    `number` and `prefix` are those of the `Root` of its copies; `paths` of all its parameters lead to their names.
    """

    number: int
    prefix: str
    module: nn.Module
    paths: dict[str, str]


def modules_of(loss: Any) -> list[Found]:
    """Return the modules of a loss, in the order of its layers, or as they are found."""
    if isinstance(loss, Layers):
        applies = [loss.layer(i).apply for i in range(len(loss))]
    else:
        applies = list(_find_applies(loss))
    unique = {x.number: x for x in applies if x is not None}
    return [Found(x.number, x.prefix, x.source, x.param_paths) for x in unique.values()]


class Place(NamedTuple):
    """Where a loss's modules hold a parameter: in which module, by its number, and at which path.

    `local` is its name among parameters of that module, `name` among all; `module` is the part that has it as its own.
    """

    number: int
    path: str
    local: str
    name: str
    module: nn.Module


def places_of(loss: Any) -> list[Place]:
    """Return where modules of a loss hold parameters, and their names in the tree of all."""
    places: list[Place] = []
    if isinstance(loss, Layers):
        layers = [loss.layer(i) for i in range(len(loss))]
        named = [(x.apply, {local: name for name, local in x.params.items()}) for x in layers if x.apply is not None]
    else:
        named = [(x, {local: x.prefix + local for local in x.names}) for x in _find_applies(loss)]
    for applied, names in named:
        for path, local in applied.param_paths.items():
            owner = applied.source.get_submodule(path.rpartition(".")[0])
            places.append(Place(applied.number, path, local, names[local], owner))
    return list({(x.number, x.path): x for x in places}.values())


def no_modules(loss: Any, where: str) -> ComposeError:
    """Return the error of a loss in which what is to change modules finds none."""
    return ComposeError(
        f"{where} finds no module in the loss",
        got=repr(loss)[:80],
        want="fds.Layers, or a loss that calls apply, of fds.functional(module)",
        hint="apply must be in its closure, its defaults, or a global that it names",
    )


def unseen_module(module: nn.Module, where: str) -> LossError:
    """Return the error of a module that `modules_of` did not find in a loss, and that runs all the same."""
    return LossError(
        f"the loss runs a module that {where} could not see when it was composed",
        where=type(module).__name__,
        got="a module that the loss reaches in another way than it shows",
        want="loss_fn that holds apply in its closure, its defaults or as a global; or fds.Layers",
    )


def _find_applies(loss: Any) -> Iterator[Apply]:
    """Yield what a function reaches: its closure, defaults, globals that it names, and what it was bound to."""
    todo, seen = [loss], set[int]()
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, type | types.ModuleType):
            continue
        seen.add(id(x))
        if isinstance(x, Apply):
            yield x
        elif isinstance(x, Buffered):
            todo.append(x.loss_fn)
        elif isinstance(x, CompiledLoss):
            todo.append(x.function)
        elif isinstance(x, functools.partial):
            todo += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, types.MethodType):
            todo += [x.__func__, x.__self__]
        elif isinstance(x, types.FunctionType):
            todo += [*inspect.getclosurevars(x).nonlocals.values(), *(x.__defaults__ or ())]
            todo += [*(x.__kwdefaults__ or {}).values(), *_named_globals(x.__code__, x.__globals__)]
        elif isinstance(x, list | tuple):
            todo += x
        elif isinstance(x, dict):
            todo += x.values()
        elif callable(x) and hasattr(x, "__dict__") and not isinstance(x, nn.Module):
            todo += [*vars(x).values(), type(x).__call__]


def _named_globals(code: types.CodeType, names: dict[str, Any]) -> Iterator[Any]:
    """Yield the globals that code names, also in functions inside: `apply` values, and functions of the same file."""
    for name in code.co_names:
        x = names.get(name)
        if isinstance(x, Apply) or (isinstance(x, types.FunctionType) and x.__globals__ is names):
            yield x
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _named_globals(inner, names)
