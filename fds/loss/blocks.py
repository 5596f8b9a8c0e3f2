"""Blocks: layers of a loss that are named by patterns or numbers, and in training are called through a rule.

Of `Layers` they are layers, whose calls a layer map replaces. Of any other loss they are submodules of the modules that
it runs: copies of these are changed, and a layer map around the whole loss says for which microbatch they run. A copy
remembers that for backward, where a module that checkpoints its own submodules calls them again.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Protocol

import attrs
import torch
from torch import nn

from fds import tree
from fds.autodiff import in_backward
from fds.errors import ComposeError, LossError, Rule, StateError, is_int
from fds.loss.compiled import is_trial_run
from fds.loss.layers import Layers
from fds.loss.microbatch import Found, LayerCall, modules_of, no_modules, unseen_module
from fds.loss.module_copies import Root
from fds.loss.recipes import LayerSpec


@attrs.frozen
class Block:
    """One of the blocks of a loss.

    Attributes:
        place: among the blocks, from 1.
        total: how many there are.
        name: of the layer, or path of the module.
        arguments: of its forward, by position; none of a layer of `Layers`, which takes one without a name.
        in_place: it writes over its input.
    """

    place: int
    total: int
    name: str
    arguments: tuple[str, ...] = ()
    in_place: bool = False

    def named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield what a call gives for each argument, with its name, first what the block changes."""
        yield from zip((*self.arguments, *[""] * len(args)), args, strict=False)
        yield from sorted(kwargs.items(), key=lambda pair: pair[0] != next(iter(self.arguments), ""))

    def first(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return what a call gives for the first argument, and the tensor in it that the block changes."""
        argument = next(self.named(args, kwargs))[1]
        return argument, first_of(argument)


def first_of(value: Any) -> Any:
    """Return the first of a tuple or list, and what is neither as it is: the tensor that a layer changes."""
    return value[0] if tree.is_sequence(value) and value else value


class BlockRule(Protocol):
    """What is done in the place of a call of a block."""

    def plan(self, call: Any) -> Any:
        """Return what holds for all blocks of a microbatch, given its `Call`; it does not hold that."""
        ...

    def run(
        self, plan: Any, call: Any, block: Block, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict
    ) -> Any:
        """Return what the block returns; in backward, which may run it again, `call` is None where nobody knows it."""
        ...


def _is_name(x: object) -> bool:
    return isinstance(x, str) or is_int(x, 0)


NAMES = Rule(
    lambda x: _is_name(x) or (isinstance(x, Sequence | range) and len(x) > 0 and all(map(_is_name, x))),
    ": {name} names layers",
    'patterns of names such as "*.h.*", or numbers such as range(1, 11)',
)


def at_blocks(loss: Any, names: Any, rule: BlockRule, where: str) -> dict[str, Any]:
    """Return what fills stations so that blocks of a loss are called through a rule.

    `names` is a pattern or a number, or several. Of `Layers` patterns match the names of layers, and a number is one.
    Of other losses they match paths of modules, of which the outermost count, and numbers those in the one list of
    modules of a class. None stands for all in that list, or for the longest row of layers of one class.

    Raises `ComposeError` for names that match nothing, and where there is no such list, or are several.
    """
    if isinstance(loss, Layers):
        chosen = row_of_one_class(loss, where) if names is None else _chosen(names, loss.names, loss.names, where)
        places = [i for i, name in enumerate(loss.names) if name in chosen]
        of_layers = {
            i: Block(place, len(places), loss.names[i], in_place=loss.layer(i).in_place)
            for place, i in enumerate(places, 1)
        }
        return {"layer": _OfLayers(rule, of_layers, where)}
    modules = modules_of(loss)
    paths = {_joined(x, path): (x, path) for x in modules for path, _ in x.module.named_modules()}
    paths.pop("", None)
    if not paths:
        raise no_modules(loss, where)
    lists = _lists(modules)
    if names is not None and not any(is_int(x) for x in _listed(names)):
        numbered: Sequence[str] = ()
    elif len(lists) != 1:
        got = ", ".join(f"{name}: {len(paths)} modules" for name, paths in lists.items()) or "none"
        want = "patterns of paths of modules" + f": {where}(layers={next(iter(lists), 'h')!r} + '.*')"
        raise ComposeError(f"{where}: numbers are of the one list of modules of a class", got=got, want=want)
    else:
        (numbered,) = lists.values()
    chosen = set(numbered) if names is None else _chosen(names, list(paths), numbered, where)
    outermost = [name for name in paths if name in chosen and chosen.isdisjoint(_owners(name))]
    blocks: dict[tuple[int, str], Block] = {}
    for place, name in enumerate(outermost, 1):
        owner, path = paths[name]
        arguments = tuple(inspect.signature(type(owner.module.get_submodule(path)).forward).parameters)[1:]
        blocks[owner.number, path] = Block(place, len(outermost), name, arguments)
    copies = _OfModules(rule, blocks, frozenset(x.number for x in modules), where)
    return {"layer": _OfLoss(rule, copies, where), "modules": copies}


def _listed(names: Any) -> list[Any]:
    return [names] if _is_name(names) else list(names)


def _chosen(names: Any, listed: Sequence[str], numbered: Sequence[str], where: str) -> set[str]:
    """Return the names that patterns and numbers choose."""
    chosen, patterns = set[str](), [x for x in _listed(names) if isinstance(x, str)]
    for number in (x for x in _listed(names) if not isinstance(x, str)):
        hits = [name for name in numbered if name.rpartition(".")[2] == str(number)]
        if not hits:
            what = f"{where}: there is no layer of this number"
            raise ComposeError(what, where="layers", got=str(number), want=tree.named(numbered))
        chosen.update(hits)
    try:
        return chosen | tree.match(patterns, listed, what=where)
    except StateError as error:
        raise ComposeError(
            f"{where}: a pattern matches no layer",
            where="layers",
            got=error.got,
            want="the name of a layer of fds.Layers, or the path of a module, with * for any part of it",
            hint=error.hint,
        ) from None


def row_of_one_class(loss: Layers, where: str) -> set[str]:
    """Return the names of the longest row of layers of one class, the first of several.

    Raises `ComposeError` where no two layers in a row are of one class; `where` names the caller in it.
    """
    kinds = (layer.cls if isinstance(layer, LayerSpec) else type(layer) for layer in loss.layers)
    rows = [list(row) for _, row in itertools.groupby(zip(loss.names, kinds, strict=True), key=lambda pair: pair[1])]
    longest = max(rows, key=len)
    if len(longest) == 1:
        what, want = f"{where}: no two layers in a row are of one class", f"{where}(..., layers=their names)"
        raise ComposeError(what, where="layers", got=str(loss)[:120], want=want)
    return {name for name, _ in longest}


def _lists(modules: Iterable[Found]) -> dict[str, list[str]]:
    """Return the names of modules of one class that a list or a sequence has, by its name: not of those in others."""
    lists: dict[str, list[str]] = {}
    for owner in modules:
        for path, module in owner.module.named_modules():
            kinds = {type(part) for part in module} if isinstance(module, nn.ModuleList | nn.Sequential) else ()
            name = _joined(owner, path)
            if len(kinds) == 1 and len(list(module.children())) > 1 and lists.keys().isdisjoint(_owners(name)):
                lists[name] = [f"{name}.{key}".lstrip(".") for key, _ in module.named_children()]
    return lists


def _joined(owner: Found, path: str) -> str:
    return f"{owner.prefix}{path}".rstrip(".")


def _owners(name: str) -> list[str]:
    return ["", *(name[:end] for end, c in enumerate(name) if c == ".")]


@attrs.frozen(eq=False, repr=False)
class _OfLayers:
    """The layer map of `Layers`."""

    rule: BlockRule
    blocks: dict[int, Block]
    where: str
    draws: ClassVar = False

    def __repr__(self) -> str:
        return f"{self.where} of {tree.named([block.name for block in self.blocks.values()])}"

    def __call__(self, calls: list[LayerCall], call: Any) -> list[LayerCall]:
        joined = [layer_call.layers for layer_call in calls if len(layer_call.layers) != 1]
        if joined:
            raise ComposeError(
                f"{self.where} takes single layers",
                got=f"calls of the layers {joined}",
                want=f"{self.where} after what joins layers, such as fds.checkpoint_activations(every=2)",
            )
        plan = self.rule.plan(call)
        blocks = [self.blocks.get(x.layers[0]) for x in calls]
        return [
            x if block is None else x.replaced(functools.partial(self.run, plan, call, block, x.run))
            for x, block in zip(calls, blocks, strict=True)
        ]

    def run(self, plan: Any, call: Any, block: Block, forward: Callable[..., Any], x: Any) -> Any:
        return self.rule.run(plan, call, block, forward, (x,), {})


@attrs.frozen(eq=False, repr=False)
class _OfLoss:
    """The layer map of a loss that is called as a whole: what runs inside belongs to this microbatch."""

    rule: BlockRule
    modules: _OfModules
    where: str
    draws: ClassVar = False

    __repr__ = _OfLayers.__repr__

    @property
    def blocks(self) -> dict[Any, Block]:
        return self.modules.blocks

    def __call__(self, calls: list[LayerCall], call: Any) -> list[LayerCall]:
        (whole,), plan = calls, self.rule.plan(call)

        def run(*args: Any) -> Any:
            token = self.modules.running.set((plan, call))
            try:
                return whole(*args)
            finally:
                self.modules.running.reset(token)

        return [whole.replaced(run)]


@attrs.frozen(eq=False, repr=False)
class _OfModules:
    """The module map of such a loss."""

    rule: BlockRule
    blocks: dict[tuple[int, str], Block]
    numbers: frozenset[int]  # of all modules that were seen
    where: str
    running: ContextVar[tuple[Any, Any] | None] = attrs.field(  # plan and call of the microbatch whose loss runs
        factory=lambda: ContextVar("fds_blocks", default=None)
    )

    def __repr__(self) -> str:
        return f"{self.where} of {len(self.blocks)} modules"

    def __call__(self, module: nn.Module, root: Root) -> None:
        """Change a copy. Raises `LossError` for one of a module that was not seen when the step was composed."""
        if root.number not in self.numbers:
            raise unseen_module(module, self.where)
        for path, part in list(module.named_modules()):
            block = self.blocks.get((root.number, path))
            if block is not None:
                part.forward = _Through(self, block, part.forward)


class _Through:
    """The forward of a block of a copy, which is used by one microbatch at a time."""

    def __init__(self, modules: _OfModules, block: Block, forward: Callable[..., Any]):
        self.modules, self.block, self.forward = modules, block, forward
        self.last: Any = None  # a plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_trial_run():
            raise LossError(
                f"{self.modules.where} calls layers of a loss that is compiled as one function",
                where=self.block.name,
                got="fds.compile or torch.compile, and modules",
                want="fds.Layers, whose layers are compiled one by one",
            )
        running = self.modules.running.get()
        if running is not None:
            self.last, call = running
        elif in_backward() and self.last is not None:
            call = None
        else:
            return self.forward(*args, **kwargs)  # an evaluation
        return self.modules.rule.run(self.last, call, self.block, self.forward, args, kwargs)
