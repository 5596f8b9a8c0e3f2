"""Submodules: modules of a loss that are named by patterns, and called through a rule, in evaluations as in training.

Unlike blocks they may lie inside of layers of `Layers`. Copies of modules are changed; a layer map around whatever is
called says of which microbatch they run. A copy remembers that for backward, which may run it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, Protocol

import attrs
import torch
from torch import nn

from fds import tree
from fds.autodiff import in_backward
from fds.errors import ComposeError, LossError, Rule, StateError
from fds.loss.compiled import is_trial_run
from fds.loss.microbatch import LayerCall, modules_of, no_modules, unseen_module
from fds.loss.module_copies import Root

PATTERNS = Rule(
    lambda x: isinstance(x, str) or (tree.is_sequence(x) and len(x) > 0 and all(isinstance(y, str) for y in x)),
    ": {name} names modules",
    'a pattern of their paths such as "*.linear", or several',
)


class SubmoduleRule(Protocol):
    """What is done in the place of a call of a module.

    `is_planned` says whether it needs a plan: if not, it is run with None, by compiled code too.
    """

    @property
    def is_planned(self) -> bool:
        """Say so."""
        ...

    def check(self, name: str, module: nn.Module) -> None:
        """Raise an error for a module that is not for this rule: of the loss, or a copy that others have changed."""
        ...

    def plan(self, call: Any) -> Any:
        """Return what holds for all modules of a microbatch, given its `Call`; it does not hold that."""
        ...

    def run(
        self,
        plan: Any,
        call: Any,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return what the module returns; in backward, which may run it again, `call` is None."""
        ...

    def bake(self, name: str, module: nn.Module, call: Any) -> None:
        """Have a plain module compute what it is in an evaluation with this call."""
        ...


def at_submodules(losses: Sequence[Any], patterns: str | Sequence[str], rule: SubmoduleRule, where: str) -> Submodules:
    """Return the module map by which modules of some losses, those of training and evaluation, follow a rule.

    `patterns` match paths of modules as `fds.freeze`'s match parameters: of `Layers` they begin with the layer's name.
    A transform fills `modules` with the map, and `layer` with its `around`.

    Raises `ComposeError` where there are no modules, for a pattern that matches none, and what `rule.check` raises.
    """
    owners = {x.number: x for loss in losses for x in modules_of(loss)}
    paths: dict[str, list[tuple[int, str]]] = {}
    parts: dict[tuple[int, str], nn.Module] = {}
    for x in owners.values():
        for path, part in x.module.named_modules():
            if name := f"{x.prefix}{path}".rstrip("."):
                paths.setdefault(name, []).append((x.number, path))
                parts[x.number, path] = part
    if not paths:
        raise no_modules(losses[0], where)
    try:
        names = tree.match([patterns] if isinstance(patterns, str) else patterns, list(paths), what=where)
    except StateError as error:
        raise ComposeError(
            f"{where}: a pattern matches no module",
            where="patterns",
            got=error.got,
            want="the path of a module of the loss, with * for any part of it",
            hint=error.hint,
        ) from None
    chosen = {at: name for name in paths if name in names for at in paths[name]}
    for at, name in chosen.items():
        _check_called(name, parts[at], where)
        rule.check(name, parts[at])
    return Submodules(rule, chosen, frozenset(owners), where)


def _check_called(name: str, module: nn.Module, where: str) -> None:
    """Raise `ComposeError` for a module that is no more than a place for weights."""
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        raise ComposeError(
            f"{where}: nn.MultiheadAttention computes with the weights of this module, and never calls it",
            where=name,
            got="the projection of an nn.MultiheadAttention",
            want="attention that calls its projections, such as fds.nn's or that of transformers",
        )


@attrs.frozen(eq=False, repr=False)
class Submodules:
    """The module map: copies of modules call those that were chosen through a rule."""

    rule: SubmoduleRule
    chosen: Mapping[tuple[int, str], str]  # number of the module and path in it -> name in the loss
    numbers: frozenset[int]  # of all modules that were seen
    where: str
    running: ContextVar[tuple[Any, Any] | None] = attrs.field(  # plan and call of the microbatch that runs
        factory=lambda: ContextVar("fds_submodules", default=None)
    )

    def __repr__(self) -> str:
        return f"{self.where} of {tree.named(self.names)}"

    @property
    def names(self) -> list[str]:
        """Names of the modules, each once."""
        return list(dict.fromkeys(self.chosen.values()))

    @property
    def around(self) -> Around:
        """The layer map that goes with it."""
        return Around(self)

    def __call__(self, module: nn.Module, root: Root) -> None:
        """Change a copy. Raises `LossError` for one of a module that was not seen when the step was composed."""
        if root.number not in self.numbers:
            raise unseen_module(module, self.where)
        for path, part in list(module.named_modules()):
            name = self.chosen.get((root.number, path))
            if name is not None:
                self.rule.check(name, part)
                _keep_from_fused_paths(module, path)
                part.forward = _through(self, name, part)

    def bake(self, module: nn.Module, prefix: str, call: Any) -> None:
        """Have those inside a plain module, of whose names `prefix` stands before, compute what an evaluation does."""
        names = set(self.chosen.values())
        for path, part in [*module.named_modules()]:
            if (name := f"{prefix}{path}") in names:
                _keep_from_fused_paths(module, path)
                self.rule.bake(name, part, call)


def _through(modules: Submodules, name: str, part: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module of a copy, which is used by one microbatch at a time."""
    rule, replaced, last = modules.rule, vars(part).get("forward"), []

    def forward(*args: Any, **kwargs: Any) -> Any:
        if replaced is not None:
            return replaced(*args, **kwargs)
        return type(part).forward(
            part, *args, **kwargs
        )  # not bound before: a map that comes later may change the class

    def run(*args: Any, **kwargs: Any) -> Any:
        return rule.run(None, None, name, part, forward, args, kwargs)

    def run_planned(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or is_trial_run():
            raise LossError(
                f"{modules.where} follows the state, which is not there in a layer that is compiled",
                where=name,
                got="fds.compile or torch.compile",
                want="what follows no state: dynamic ranges, without an offset",
            )
        running = modules.running.get()
        if running is not None:
            last[:] = [running[0]]
            return rule.run(*running, name, part, forward, args, kwargs)
        if in_backward() and last:
            return rule.run(last[0], None, name, part, forward, args, kwargs)
        raise LossError(
            f"{modules.where}: a module was called that no microbatch runs",
            where=name,
            got="a call in another thread, or with another context",
            want="a call by the loss itself",
        )

    return run_planned if rule.is_planned else run


def _keep_from_fused_paths(module: nn.Module, path: str) -> None:
    """Have what is around a module call it, where torch would compute with its weights in an evaluation."""
    for end in [0, *(i for i, c in enumerate(path) if c == ".")]:
        owner: Any = module.get_submodule(path[:end])
        if isinstance(owner, nn.TransformerEncoderLayer):
            owner.activation_relu_or_gelu = 0
        if isinstance(owner, nn.TransformerEncoder):
            owner.use_nested_tensor = False


@attrs.frozen(eq=False, repr=False)
class Around:
    """The layer map: what runs inside of a call belongs to this microbatch."""

    modules: Submodules
    draws: ClassVar = False
    in_evaluation: ClassVar = True

    def __repr__(self) -> str:
        return repr(self.modules)

    def __call__(self, calls: list[LayerCall], call: Any) -> list[LayerCall]:
        plan = self.modules.rule.plan(call)
        return [self._within(x, plan, call) for x in calls] if self.modules.rule.is_planned else calls

    def _within(self, layer_call: LayerCall, plan: Any, call: Any) -> LayerCall:
        def run(*args: Any) -> Any:
            token = self.modules.running.set((plan, call))
            try:
                return layer_call(*args)
            finally:
                self.modules.running.reset(token)

        return layer_call.replaced(run)


def overlapping(maps: Iterable[Any], new: Submodules) -> list[str]:
    """Return the names of modules that other maps of the same kind have too."""
    others = (x for x in maps if isinstance(x, Submodules) and x.where == new.where)
    return [name for x in others for name in x.names if name in new.names]
