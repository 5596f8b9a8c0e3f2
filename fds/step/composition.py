"""Transforms, and composing them: what may stand in `compose`, and what it makes of a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, cast, overload

import attrs
import torch

import fds.optim
from fds import _html, tree
from fds.collectives import Axis
from fds.errors import CallError, ComposeError, Rule, bound
from fds.loss import Buffered
from fds.optim import Optimizer
from fds.step.checks import forms
from fds.step.execution import InTurn
from fds.step.filling import conflict, fill, written_out
from fds.step.residency.early import check_speculation
from fds.step.sharding.reduce import check_no_sync

if TYPE_CHECKING:
    from fds.step.program import Step

P = ParamSpec("P")
_REWRITING = "a function that returns the step it is given, filled: lambda step: fds.step.fill(step, station=filler)"
_MANY = 8  # words of a transform are written out, more are counted


@attrs.frozen(eq=False)
class Transform:
    """A named rewriting of a step, `Step -> Step`; its text reads as it was written."""

    name: str
    text: str
    apply: Callable[[Step], Step] = attrs.field(repr=False)
    arguments: tuple[Any, ...] = attrs.field(default=(), repr=False)  # what it was made of, which ranks compare
    by_name: Mapping[str, Any] = attrs.field(factory=dict[str, Any], repr=False)  # those of a call, as they were given
    several: bool = attrs.field(default=False, repr=False)  # whether it may stand more than once

    def __call__(self, step: Step) -> Step:
        """Return `step` with the stations of this transform filled."""
        written = (*step.composition, self)
        composing = attrs.evolve(step.composing, position=len(step.composition))
        return _apply(self, attrs.evolve(step, composition=written, composing=composing))

    def __enter__(self) -> NoReturn:
        raise ComposeError(
            "a transform is part of a step, not a scope",
            got=f"with {self.text}: ...",
            want=f"fds.compose({self.text}, ...)(loss)",
            hint="kernels are chosen in a scope by fds.kernels.prefer_triton() and fds.kernels.only('reference')",
        )

    def __exit__(self, *error: object) -> None:
        """Be asked for by `with`, before `__enter__` is called."""

    def joined(self, other: Transform) -> str:
        """Return one call that says what two of the same transform do; "" where both say one thing, or nothing."""
        both = {**self.by_name, **other.by_name}
        if self.name != other.name or len(both) < len(self.by_name) + max(len(other.by_name), 1):
            return ""
        return f"{self.name}({', '.join(f'{name}={_word(value)}' for name, value in both.items())})"

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return _html.box("Transform", _html.code(self.text))


@overload
def transform(factory: Callable[P, Callable[[Step], Step]], /) -> Callable[P, Transform]: ...
@overload
def transform(
    *, several: bool = ..., **rules: Rule
) -> Callable[[Callable[P, Callable[[Step], Step]]], Callable[P, Transform]]: ...
def transform(
    factory: Callable[..., Callable[[Step], Step]] | None = None, /, *, several: bool = False, **rules: Rule
) -> Any:
    """Decorate a function that returns a function `Step -> Step`; `compose` takes what calling it returns.

    It prints as it was called: `noise(0.01)`. `compose` refuses a function `Step -> Step` that was not made this way.
    A call with arguments that the function does not take raises `CallError`, a `ComposeError` and a `TypeError`; one
    with an argument that is not what its rule, an `fds.errors.Rule` by its name, says, `ComposeError`. With `several`
    it may stand in a composition more than once.
    """
    made = functools.partial(_transform, rules=rules, several=several)
    return made if factory is None else made(factory)


def _transform(
    factory: Callable[P, Callable[[Step], Step]], rules: Mapping[str, Rule], several: bool
) -> Callable[P, Transform]:

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> Transform:
        arguments = bound(factory, args, kwargs, CallError).arguments
        for name, rule in rules.items():
            if name in arguments:
                rule.check(factory.__name__, name, arguments[name], ComposeError)
        many = len(args) > _MANY and all(isinstance(arg, str) for arg in args)
        words = [tree.named(cast(Any, args))] if many else [*map(_word, args)]
        words += [f"{k}={_word(v)}" for k, v in kwargs.items()]
        text = f"{factory.__name__}({', '.join(words)})"
        spelled = (factory.__name__, args, kwargs)
        return Transform(factory.__name__, text, factory(*args, **kwargs), spelled, arguments, several)

    make.is_transform_factory = True  # type: ignore[attr-defined]
    return make


def _factory(t: Any) -> bool:
    """Say whether this is a factory of transforms or optimizers that was not called."""
    return hasattr(t, "is_transform_factory") or (callable(t) and getattr(t, "__name__", "") in fds.optim.__all__)


def optimize(optimizer: Optimizer) -> Transform:
    """Return the transform that an optimizer is, wherever one may stand."""
    return Transform("optimizer", repr(optimizer), lambda step: fill(step, optimizer=optimizer), (optimizer,))


@attrs.frozen(eq=False)
class Composition:
    """Transforms in order: called with a step it rewrites it, called with a loss it makes a step of it."""

    parts: tuple[Transform, ...]

    def __call__(self, loss: Any, eval_fn: Any = None) -> Step:
        """Return the step. Raises `ComposeError` for an illegal composition."""
        from fds.step.program import Step

        if isinstance(loss, Step):
            return self.rewrite(loss)
        if isinstance(loss, torch.nn.Module):
            raise ComposeError(
                "a module is not a loss",
                got=type(loss).__name__,
                want=f"{self}(loss_fn)",
                hint="apply, params, buffers = fds.functional(module); loss_fn(params, batch) calls apply(params, ...)",
            )
        for role, f in (("loss", loss), ("eval_fn", loss if eval_fn is None else eval_fn)):
            wrong = isinstance(f, Transform | Composition | Optimizer | torch.nn.Module) or _factory(f)
            if wrong or not (callable(f) or isinstance(f, Buffered)):
                raise ComposeError(
                    "a composition is applied to a loss", where=role, got=repr(f)[:80], want=f"{self}(loss_fn)"
                )
            forms.loss(role, f)
        step = self.rewrite(Step(loss=loss, eval_loss=loss if eval_fn is None else eval_fn))
        for follower in step.followers:
            if follower.slot in step.memory and step.memory[follower.slot].follows:
                raise ComposeError(
                    "two fillers write to one slot",
                    where="station 'after'",
                    got=follower.slot,
                    want="its Memory without merge and accept, or no filler of `after`",
                )
            if follower.slot not in step.memory:
                raise ComposeError(
                    "a filler writes to a slot that nobody makes",
                    where="station 'after'",
                    got=follower.slot,
                    want=", ".join(step.memory) or "no slots are filled",
                    hint=f"fill(step, after=..., memory=Memory({follower.slot!r}, init, lies))",
                )
        if not step.skips and (learning := [memory for memory in step.memory.values() if memory.on_skip == "run"]):
            raise ComposeError(
                "a memory learns of skips, and nothing is skipped",
                where="station 'memory'",
                got=repr(learning[0]),
                want="measure=Measure(norm=True, skips=True), as fds.skip_nonfinite() fills it",
            )
        if step.optimizer is None:
            raise ComposeError(
                "the composition has no optimizer", got=repr(self), want=written_out([*self.parts, "adamw(3e-4)"])
            )
        if step.synchronize is not None and (elsewhere := {*step.place.residency.kinds} - {"slots"}):
            raise ComposeError(
                "ranks synchronize parameters where the step runs, and these live elsewhere",
                where="station 'after'",
                got=f"{step.synchronize}; {step.place}",
                want="parameters, moments and gradients on the device",
                hint="averages may live elsewhere" if "slots" in elsewhere else "",
            )
        step.run.refuse(step)
        check_no_sync(step.optimizer, step.shard, step.condition, step.place.residency, step.synchronize)
        split, differs = step.dimensions.split, step.dimensions.differing
        if step.place.speculate:
            in_turn = isinstance(step.execute, InTurn)
            check_speculation(step.condition, step.optimizer, in_turn=in_turn, communicates=bool(split))
        for map_ in step.condition if split or differs else ():
            if not getattr(map_, "takes_slices", False):
                has = "flat slices of them" if split else "those of its own stages"
                raise ComposeError(
                    f"a gradient map may need all gradients, and each rank has {has}",
                    where="station 'condition'",
                    got=_word(map_),
                    want="a map with takes_slices = True",
                    hint="set it on a map that treats every element alike, wherever it lies"
                    + ("" if differs else "; or shard at stage 0"),
                )
        return step

    def rewrite(self, step: Step) -> Step:
        """Apply the parts in order."""
        written = (*step.composition, *self.parts)
        for position, part in enumerate(self.parts, start=len(step.composition)):
            composing = attrs.evolve(step.composing, position=position)
            step = _apply(part, attrs.evolve(step, composition=written, composing=composing))
        return step

    def __repr__(self) -> str:
        return written_out(self.parts)

    def _repr_html_(self) -> str:
        lines = "".join(f"    {part!r},\n" for part in self.parts)
        return _html.box("Composition", _html.code(f"compose(\n{lines})" if lines else "compose()"))


def compose(*transforms: Any) -> Composition:
    """Compose transforms and an optimizer into one value, which turns a loss into a `Step`.

    `compose(accumulate(8), adamw(3e-4))(loss_fn)`; `compose(...)(loss_fn, eval_fn=None)`. Compositions nest. Where a
    transform acts is its station's business: order matters only inside the tuple stations (gradient maps, layer
    maps, views, what follows an update), where it is the order of execution.

    Raises `ComposeError` for anything that is not a transform (`donate` is none, `donate()` is one), a station or slot
    filled twice, no optimizer.
    """
    parts: list[Transform] = []
    for i, t in enumerate(transforms):
        if _factory(t):
            raise ComposeError(
                "a transform or an optimizer is what calling this returns",
                where=f"position {i}",
                got=t.__name__,
                want=_call_of(t),
            )
        if isinstance(t, Optimizer):
            t = optimize(t)
        if isinstance(t, Composition):
            parts.extend(t.parts)
            continue
        if not isinstance(t, Transform):
            raise ComposeError(
                "this is no transform",
                where=f"position {i}",
                got=repr(t)[:80],
                want="a transform, a composition or an optimizer",
                hint=_instead(t),
            )
        parts.append(t)
    return Composition(tuple(parts))


def _call_of(factory: Any) -> str:
    """Return how to call a factory of transforms or optimizers: `fds.donate()`, `fds.accumulate(...)`."""
    is_ours = factory.__module__.startswith("fds.")
    bare = hasattr(factory, "is_transform_factory") and forms.takes(0)(factory)
    return f"{'fds.' if is_ours else ''}{factory.__name__}({'' if bare else '...'})"


def _instead(t: Any) -> str:
    """Return what to write in the place of what is no transform."""
    kind = t if isinstance(t, type) else type(t)
    name = kind.__name__.lower()
    if issubclass(kind, torch.optim.Optimizer):
        if name in fds.optim.__all__:
            return f"fds.{name}(...)"
        return "fds.adamw(...), fds.sgd(...), or one of your own: docs/write-your-own.md"
    if issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        return "a schedule is an argument of the optimizer: fds.adamw(lr=fds.schedules.warmup_cosine(...))"
    if isinstance(t, list | tuple):
        return "compose(*parts)"
    return (
        "the loss goes in the second call: compose(accumulate(8), adamw(3e-4))(loss_fn)"
        + "; of a function Step -> Step @fds.step.transform makes a transform: docs/write-your-own.md" * callable(t)
    )


def _apply(part: Transform, step: Step) -> Step:
    """Apply a transform, which may stand once, unless it says otherwise or each use remembers something of its own."""
    if not forms.takes(1)(part.apply):
        raise ComposeError(
            "a transform is made of a function of a step", where=part.text, got=repr(part.apply)[:80], want=_REWRITING
        )
    new = part.apply(step)
    if not isinstance(new, type(step)):
        raise ComposeError("a transform did not return a step", where=part.text, got=repr(new)[:80], want=_REWRITING)
    earlier = [i for i, t in enumerate(step.composition[: step.composing.position]) if t.name == part.name]
    if earlier and not part.several and new.memory.keys() == step.memory.keys():
        raise conflict(
            step, f"the name {part.name!r}", earlier[0], "write it once, with all its arguments", drop=earlier[0]
        )
    return new


def _word(value: Any) -> str:
    if isinstance(value, Axis):
        return f"mesh[{value.name!r}]"
    return getattr(value, "__name__", None) or repr(value)
