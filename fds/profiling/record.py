"""What a step, or a model, takes: floating-point operations, parameters, bytes and time, module by module."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from fds import _html, tree
from fds.errors import FdsError, checked_call, is_int
from fds.profiling.counting import Counting, Work, add_inside, counting, names_above
from fds.profiling.modules import PHASES, ModuleThatRan, Phase
from fds.state import State
from fds.step import Step
from fds.step.all_stations import AtOnce

if TYPE_CHECKING:
    from rich.console import RenderableType


_WIDE = 130  # characters of the text
_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@attrs.frozen
class ModuleProfile:
    """What one module takes, with all modules inside of it.

    Attributes:
        kind: its class.
        num_parameters: parameters of it, each once; as this rank holds them.
        calls: how often it ran forward, recomputations not counted.
        work: phase -> what was done; of the update nothing, which works on all parameters at once.
    """

    kind: str
    num_parameters: int
    calls: int
    work: Mapping[Phase, Work]


@attrs.frozen
class Profile:
    """What a call of a step, or of a model, takes on this rank; `str()` of it is a table.

    Attributes:
        phases: "forward", "recomputation" (forward again, in backward), "backward" and "update" (all the rest: gathers,
            casts, reductions, norms, the optimizer) -> what was done.
        modules: name of a module, as its parameters begin -> what it takes, outer ones before those inside.
        operators: name of an operator, such as "aten.mm" -> phase -> what it did.
        num_parameters: parameters of the step, whole ones; of a model its own.
        seconds: the time of the call without counting; None where it was counted alone.
        title: what was profiled.
        depth: levels of nested modules in the table; None: all.
        top: kinds of modules named for each level as the most expensive.
        detailed: whether the table has a line for every module.
    """

    phases: Mapping[Phase, Work]
    modules: Mapping[str, ModuleProfile]
    operators: Mapping[str, Mapping[Phase, Work]]
    num_parameters: int
    seconds: float | None = None
    title: str = "Profile"
    depth: int | None = None
    top: int = 1
    detailed: bool = True

    @property
    def total(self) -> Work:
        """What was done in all phases together."""
        return _sum(self.phases)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=_WIDE, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __rich__(self) -> RenderableType:
        """Return what rich prints: tables in the colours of the terminal."""
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table

        parts: list[Any] = [f"{self.title}: {self.num_parameters:,} parameters", *self._notes()]
        for _, head, rows, left in self._tables():
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for i, name in enumerate(head):
                table.add_column(name, justify="left" if i < left else "right", no_wrap=True, overflow="ellipsis")
            for row in rows:
                table.add_row(*row)
            parts.append(Padding(table, (1, 0, 0, 0)))
        return Group(*parts)

    def _repr_html_(self) -> str:
        parts = [*map(_html.text, self._notes())]
        for title, head, rows, left in self._tables():
            table = _html.table(rows, head=head, right=() if head is _TOP else range(left, len(head)))
            parts.append(_html.closed(title, table) if title else table)
        return _html.box(f"{self.title}: {self.num_parameters:,} parameters", *parts)

    def _tables(self) -> Iterator[tuple[str, tuple[str, ...], Iterator[tuple[str, ...]], int]]:
        """Yield the title of each table, what stands above its columns, its rows, and how many columns are texts."""
        yield "", _PHASES, self._phase_rows(), 1
        if self.top:
            yield "most expensive", _TOP, self._top_rows(), 2
        if self.detailed:
            yield "modules", _MODULES, self._module_rows(), 2

    def _notes(self) -> Iterator[str]:
        total = self.total
        if self.seconds:
            rate = short(total.flops / self.seconds)
            yield f"{1e3 * self.seconds:,.1f} ms without counting: {rate} flops a second"
        if total.unmasked_flops != total.flops:
            forward = self.phases["forward"]
            yield (
                "flops of attention count every pair of a query and a key; without those that causal masks hide: "
                f"forward {short(forward.unmasked_flops)}, all {short(total.unmasked_flops)}"
            )

    def _phase_rows(self) -> Iterator[tuple[str, ...]]:
        for phase, work in [*self.phases.items(), ("all", self.total)]:
            if work.calls:
                numbers = map(short, (work.flops, work.macs, work.elements, work.num_bytes))
                yield (phase, *numbers, _ms(work.seconds), f"{work.calls:,}")

    def _top_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield, level by level, which classes of modules take most; a class inside of itself counts once."""
        inner = {name: module for name, module in self.modules.items() if name and self._is_shown(name)}
        for level in sorted({name.count(".") for name in inner}):
            kinds: dict[str, list[ModuleProfile]] = {}
            for name, module in inner.items():
                if name.count(".") == level:
                    kinds.setdefault(module.kind, []).append(module)
            for what, amount, write in (
                ("flops", lambda module: _sum(module.work).flops, short),
                ("parameters", lambda module: module.num_parameters, short),
                ("time", lambda module: _sum(module.work).seconds, _ms),
            ):
                sums = sorted(
                    ((sum(map(amount, modules)), kind) for kind, modules in kinds.items()), key=lambda x: -x[0]
                )
                yield str(level + 1), what, ", ".join(f"{kind} {write(n)}" for n, kind in sums[: self.top] if n)

    def _module_rows(self) -> Iterator[tuple[str, ...]]:
        flops = self.total.flops or 1
        for name, module in self.modules.items():
            if self._is_shown(name):
                total, by_phase = _sum(module.work), [module.work[phase] for phase in PHASES[:3]]
                yield (
                    "  " * _level(name) + (name.rpartition(".")[2] or "all"),
                    module.kind,
                    short(module.num_parameters),
                    f"{module.calls:,}",
                    *(short(work.flops) for work in by_phase),
                    f"{100 * total.flops / flops:.1f}%",
                    short(total.num_bytes),
                    *(_ms(work.seconds) for work in by_phase),
                )

    def _is_shown(self, name: str) -> bool:
        return self.depth is None or _level(name) <= self.depth


_PHASES = ("", "flops", "MACs", "other elements", "bytes", "ms", "operators")
_TOP = ("level", "most", "")
_MODULES = (
    "module", "class", "parameters", "calls", "forward", "recomputed", "backward", "flops", "bytes", "ms forward",
    "recomputed", "backward",
)  # fmt: skip


def profile_of(counted: Counting, num_parameters: int | None, title: str, **others: Any) -> Profile:
    """Return the profile of what was counted; `num_parameters` of None are those of the modules that ran."""
    ran = {"": ModuleThatRan("", {})} | counted.modules.ran
    work, params = add_inside(counted.done, list(ran)), {name: dict[int, int]() for name in ran}
    for name, module in ran.items():
        for above in names_above(name):
            params.setdefault(above, {}).update(module.params)
    modules = {
        name: ModuleProfile(module.kind, sum(params[name].values()), module.calls, work[name])
        for name, module in ran.items()
        if not name or module.calls or _sum(work[name]).calls
    }
    operators: dict[str, dict[Phase, Work]] = {}
    for place, done in counted.done.items():
        operators.setdefault(place.operator, {}).setdefault(place.phase, Work()).add(done)
    if num_parameters is None:
        num_parameters = modules[""].num_parameters
    return Profile(work[""], modules, operators, num_parameters, title=title, **others)


def check_shown(depth: Any, top: Any, detailed: Any) -> None:
    """Raise `FdsError` for what a table cannot show."""
    if depth is not None and not is_int(depth, 0):
        raise FdsError("not a depth of modules", where="depth", got=repr(depth)[:80], want="an int >= 0; None: all")
    if not is_int(top, 0):
        raise FdsError("not a number of modules", where="top", got=repr(top)[:80], want="an int >= 0")
    if not isinstance(detailed, bool):
        raise FdsError("not a choice", where="detailed", got=repr(detailed)[:80], want="True or False")


def short(n: float) -> str:
    """Return a number in three digits or so, and a letter for its thousands.

    >>> short(999), short(1_234_567), short(0)
    ('999', '1.23 M', '0')
    """
    for scale, letter in _SCALES:
        if n >= scale:
            return f"{n / scale:.3g} {letter}" if n < 999.5 * scale else f"{n / scale:,.0f} {letter}"
    return f"{n:.3g}"


def _sum(work: Mapping[Phase, Work]) -> Work:
    total = Work()
    for of_phase in work.values():
        total.add(of_phase)
    return total


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def _level(module: str) -> int:
    return module.count(".") + 1 if module else 0


@checked_call
def profile(
    step: Step, state: State, batch: Any, *, depth: int | None = None, top: int = 1, detailed: bool = True
) -> Profile:
    """Count what a call of the step takes on this rank: flops, parameters, bytes and time, module by module.

    The step runs three times with this state and batch, to warm up, to be timed and to be counted, and what it returns
    is dropped. The state stays as it is: a step that donates runs as one that does not. What is compiled runs as it is
    written, and so does what CUDA graphs would replay. Where ranks share the step all of them call this; each gets its
    own profile, in a pipeline that of its own stages.

    Args:
        step: what `compose(...)(loss)` returned.
        state: of it.
        batch: as for a call.
        depth: levels of nested modules in the printed table; None: all.
        top: kinds of modules that the table names as the most expensive of each level.
        detailed: whether the table has a line for every module.

    Raises `FdsError` for what is no step and for other values of these, and all that a call raises.
    """
    check_shown(depth, top, detailed)
    if not isinstance(step, Step):
        raise FdsError(
            "only a step can be profiled",
            where="step",
            got=type(step).__name__,
            want="what fds.compose(...)(loss) returned",
            hint="fds.profile_model(model, example) profiles a module" if isinstance(step, nn.Module) else "",
        )
    plain = attrs.evolve(step, place=attrs.evolve(step.place, donate=False), run=AtOnce())
    # the first call touches memory, and finds out what is found out once
    seconds, counted = _time_and_count(lambda: plain(state, batch), lambda: state.step.device)
    structure, _ = step.structure_of(state.params)
    num_parameters = sum(leaf.numel for leaf in structure.leaves.values())
    rank = "" if step.everyone is None else f" on rank {step.everyone.index} of {step.everyone.size}"
    return profile_of(
        counted, num_parameters, f"Profile of a step{rank}", seconds=seconds, depth=depth, top=top, detailed=detailed
    )


@checked_call
def profile_model(
    model: nn.Module, example: Any, *, depth: int | None = None, top: int = 1, detailed: bool = True
) -> Profile:
    """Count what the forward of a module takes, in eval mode and without gradients, as `get_model_profile` does.

    `profile.phases["forward"]` has `flops` and `macs`, and `profile.num_parameters` counts parameters. The module runs
    three times, and is in its own mode again afterwards.

    Args:
        model: a module.
        example: what it is called with: a tensor, a tuple of arguments, or a dict of keywords.
        depth: levels of nested modules in the printed table; None: all.
        top: kinds of modules that the table names as the most expensive of each level.
        detailed: whether the table has a line for every module.

    Raises `FdsError` for what is no module and for other values of these, and all that the module raises.
    """
    check_shown(depth, top, detailed)
    if not isinstance(model, nn.Module):
        raise FdsError("only a module can be profiled", where="model", got=repr(model)[:80], want="an nn.Module")
    args = example if isinstance(example, tuple) else () if tree.is_dict(example) else (example,)
    kwargs = dict(example) if tree.is_dict(example) else {}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            seconds, counted = _time_and_count(lambda: model(*args, **kwargs), lambda: device)
    finally:
        for part, mode in modes.items():
            part.training = mode
    num_parameters = sum(p.numel() for p in model.parameters())
    title = f"Profile of {type(model).__name__}"
    return profile_of(counted, num_parameters, title, seconds=seconds, depth=depth, top=top, detailed=detailed)


def _time_and_count(call: Callable[[], Any], find_device: Callable[[], torch.device]) -> tuple[float, Counting]:
    """Return the seconds of a second call, and the counts of a third."""
    with torch.compiler.set_stance("force_eager"):
        call()
        device = find_device()  # the call has refused what is no state
        wait = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds = time.perf_counter() - start
        with counting() as counted:
            call()
    return seconds, counted
