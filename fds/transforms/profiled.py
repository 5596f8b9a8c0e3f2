"""Count what one call of the step takes, and print it or write it to a file.

Fills:  run                      State:  none
Law:    the identity, bit for bit
Cost:   some 20 us of the host for each operator of the call that is counted; of others nothing
Source: the flops_profiler of DeepSpeed 0.19.6; torch.utils.flop_counter
"""

import os
import warnings
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.collectives import worlds
from fds.errors import ComposeError, FdsError, Rule, count, expanded
from fds.profiling.counting import counting
from fds.profiling.record import Profile, check_shown, profile_of
from fds.state import State
from fds.step import Step, fill, transform
from fds.step.all_stations import Program, Stations
from fds.step.checks.state_check import StateTensors


@attrs.frozen(repr=False)
class CountedOnce:
    """A filler of `run`: one call is counted on the first rank, all others are done at once."""

    at: int
    file: str | None
    shown: dict[str, Any]

    def __repr__(self) -> str:
        return f"the call after {self.at} is profiled, {'and printed' if self.file is None else f'into {self.file}'}"

    def refuse(self, step: Stations) -> None:
        """Do nothing: every step can be counted."""

    def __call__(
        self, program: Program, state: State, held: StateTensors, batch: Any
    ) -> tuple[State, dict[str, Tensor]]:
        """Do the work."""
        if int(state.calls) != self.at or worlds.current().rank:
            return program.work(state, held, batch)
        with torch.compiler.set_stance("force_eager"), counting() as counted:
            out = program.work(state, held, batch)
        self.tell(profile_of(counted, None, f"Profile of the step after {self.at} calls", **self.shown))
        return out

    def tell(self, profile: Profile) -> None:
        """Write a profile to the file; print it where there is none, and with a warning where it cannot be written."""
        try:
            if self.file is not None:
                Path(self.file).parent.mkdir(parents=True, exist_ok=True)
                Path(self.file).write_text(f"{profile}\n")
                return
        except OSError as error:  # the step is done, and its state is not lost for this
            warnings.warn(f"the profile was not written: {error}", stacklevel=2)
        print(profile)


@transform(
    at=count(": not a number of calls", 0, where="at"),
    file=Rule(
        lambda x: x is None or (isinstance(x, str | os.PathLike) and x != ""),
        ": not a path",
        "a file's path, or None",
        where="file",
    ),
)
def profiled(
    at: int = 1,
    *,
    depth: int | None = None,
    top: int = 1,
    detailed: bool = True,
    file: str | os.PathLike[str] | None = None,
):
    """Count flops, parameters, bytes and time of the call after `at` others, module by module, on the first rank.

    It is what `flops_profiler` of a DeepSpeed JSON asks for; `fds.profile(step, state, batch)` profiles any step at any
    time, and returns what it found.

    Args:
        at: calls of the run before the one that is counted, `state.calls`; some should warm up.
        depth: levels of nested modules in the table; None: all.
        top: kinds of modules that the table names as the most expensive of each level.
        detailed: whether the table has a line for every module.
        file: path of a file to write the table to; None prints it. Its directory is made.

    Raises `ComposeError` for other values, and beside `cuda_graph` and `compile(whole=True)`.
    """
    try:
        check_shown(depth, top, detailed)
    except FdsError as error:
        raise ComposeError(f"profiled: {error.what}", where=error.where, got=error.got, want=error.want) from None
    shown = {"depth": depth, "top": top, "detailed": detailed}

    def apply(step: Step) -> Step:
        run = CountedOnce(at, None if file is None else expanded(file), shown)
        return fill(step, run=run, instead=None, hint="fds.profile(step, state, batch) counts a call of any step")

    return apply
