"""`dump_state`: all that a step and a state are, as text."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from fds import tree
from fds.errors import FdsError, checked_call, is_a
from fds.state import State
from fds.step import Step
from fds.step.checks.state_check import usable
from fds.step.residency.contract import is_held

_WIDTH = 10_000  # columns: lines are not wrapped
_NAMED = 4  # parameters of a slice that a line names


@checked_call
def dump_state(state: State, step: Step) -> str:
    """Return what a step is and what its state holds on this rank, as a text to print.

    What is composed, station by station, with the bytes that it takes and sends, as `step.describe(state)` says; then
    the counters and other numbers of the state by their values, and every leaf by its key path: shape, dtype, bytes,
    where it lives, and of a slice of a bucket the parameters in it. No rank waits for another; the numbers are read,
    for which a GPU is waited for.

    Args:
        state: of the step.
        step: what `compose(...)(loss)` returned.

    Raises `FdsError` for anything else.
    """
    if not is_a(step, Step):
        raise FdsError("not a step", where="dump_state", got=type(step).__name__, want="fds.dump_state(state, step)")
    usable(state, "dump_state")
    step.check(state)
    everyone, leaves = step.everyone, tree.paths(state)
    rank = "" if everyone is None else f", rank {everyone.index} of {everyone.size}"
    few = {path: x for path, x in leaves.items() if x.numel() <= 2 and not path.startswith(("params.", "opt."))}
    values = [f"{path:<10} {', '.join(map(str, tree.values_of(x.reshape(-1))))}" for path, x in few.items()]
    total = f"{len(leaves)} leaves, {tree.num_bytes(state):,} bytes{rank}"
    return "\n\n".join([repr(step), str(step.describe(state)), "\n".join(values), _leaves(step, state, leaves), total])


def _leaves(step: Step, state: State, leaves: dict[str, Tensor]) -> str:
    """Return a table of the leaves."""
    structure, residency = step.structure_of(state.params)[0], step.place.residency
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("leaf", "shape", "dtype", "bytes", "lives", "of" * structure.sharded):
        table.add_column(name, justify="right" if name == "bytes" else "left")
    for path, x in leaves.items():
        leaf = step.resident(structure, path)
        held = leaf is not None and is_held(residency, leaf, x.numel())
        where = residency.medium(leaf) if held and leaf is not None else str(x.device)
        inside = tree.named(leaf.names, _NAMED) if structure.sharded and leaf is not None else ""
        table.add_row(path, str(tuple(x.shape)), str(x.dtype).removeprefix("torch."), f"{x.nbytes:,}", where, inside)
    console: Any = Console(width=_WIDTH, highlight=False, markup=False, emoji=False)
    with console.capture() as shown:
        console.print(table)
    return "\n".join(line.rstrip() for line in shown.get().splitlines())
