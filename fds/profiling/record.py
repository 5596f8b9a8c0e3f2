"""What a step, or a model, takes: floating-point operations, parameters, bytes and time, module by module."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from fds import _html
from fds.errors import FdsError, is_int
from fds.profiling.counting import PHASES, Counting, Phase, Work, inclusive

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

        def made(head: tuple[str, ...], rows: Iterator[tuple[str, ...]], left: int) -> Table:
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for i, name in enumerate(head):
                table.add_column(name, justify="left" if i < left else "right", no_wrap=True, overflow="ellipsis")
            for row in rows:
                table.add_row(*row)
            return table

        parts: list[Any] = [f"{self.title}: {self.num_parameters:,} parameters", *self._notes()]
        parts += [Padding(made(_PHASES, self._phase_rows(), 1), (1, 0, 0, 0))]
        if self.top:
            parts += [Padding(made(_TOP, self._top_rows(), 2), (1, 0, 0, 0))]
        if self.detailed:
            parts += [Padding(made(_MODULES, self._module_rows(), 2), (1, 0, 0, 0))]
        return Group(*parts)

    def _repr_html_(self) -> str:
        right = lambda head, left: range(left, len(head))
        parts = [*map(_html.text, self._notes())]
        parts += [_html.table(self._phase_rows(), head=_PHASES, right=right(_PHASES, 1))]
        if self.top:
            parts += [_html.closed("most expensive", _html.table(self._top_rows(), head=_TOP))]
        if self.detailed:
            table = _html.table(self._module_rows(), head=_MODULES, right=right(_MODULES, 2))
            parts += [_html.closed("modules", table)]
        return _html.box(f"{self.title}: {self.num_parameters:,} parameters", *parts)

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
                yield (phase, *_numbers(work), f"{work.calls:,}")

    def _top_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield, level by level, which classes of modules take most; a class inside of itself counts once."""
        inner = {name: one for name, one in self.modules.items() if name and self._is_shown(name)}
        for level in sorted({name.count(".") for name in inner}):
            kinds: dict[str, list[ModuleProfile]] = {}
            for name, one in inner.items():
                if name.count(".") == level:
                    kinds.setdefault(one.kind, []).append(one)
            for what, amount, write in (
                ("flops", lambda one: _sum(one.work).flops, short),
                ("parameters", lambda one: one.num_parameters, short),
                ("time", lambda one: _sum(one.work).seconds, _ms),
            ):
                sums = sorted(((sum(map(amount, some)), kind) for kind, some in kinds.items()), key=lambda x: -x[0])
                yield str(level + 1), what, ", ".join(f"{kind} {write(n)}" for n, kind in sums[: self.top] if n)

    def _module_rows(self) -> Iterator[tuple[str, ...]]:
        flops = self.total.flops or 1
        for name, one in self.modules.items():
            if self._is_shown(name):
                level = name.count(".") + 1 if name else 0
                every, of = _sum(one.work), [one.work[phase] for phase in PHASES[:3]]
                yield (
                    "  " * level + (name.rpartition(".")[2] or "all"),
                    one.kind,
                    short(one.num_parameters),
                    f"{one.calls:,}",
                    *(short(work.flops) for work in of),
                    f"{100 * every.flops / flops:.1f}%",
                    short(every.num_bytes),
                    *(_ms(work.seconds) for work in of),
                )

    def _is_shown(self, name: str) -> bool:
        return self.depth is None or (name.count(".") + 1 if name else 0) <= self.depth


_PHASES = ("", "flops", "MACs", "other elements", "bytes", "ms", "operators")
_TOP = ("level", "most", "")
_MODULES = (
    "module", "class", "parameters", "calls", "forward", "recomputed", "backward", "flops", "bytes", "ms forward",
    "recomputed", "backward",
)  # fmt: skip


def profile_of(counted: Counting, num_parameters: int | None, title: str, **others: Any) -> Profile:
    """Return the profile of what was counted; `num_parameters` of None are those of the modules that ran."""
    found = counted.modules.found
    work = inclusive(counted.done, list(found))
    own: dict[str, dict[int, int]] = {"": {}}
    for name, one in found.items():
        words = name.split(".") if name else []
        for n in range(len(words) + 1):
            own.setdefault(".".join(words[:n]), {}).update(one.own)
    ran = {name: one for name, one in found.items() if name and (one.calls or _sum(work[name]).calls)}
    root = found.get("")
    modules = {
        "": ModuleProfile(root.kind if root else "", sum(own[""].values()), root.calls if root else 0, work[""]),
        **{name: ModuleProfile(one.kind, sum(own[name].values()), one.calls, work[name]) for name, one in ran.items()},
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
    for one in work.values():
        total.add(one)
    return total


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def _numbers(work: Work) -> tuple[str, ...]:
    of = (work.flops, work.macs, work.elements, work.num_bytes)
    return (*map(short, of), _ms(work.seconds))
