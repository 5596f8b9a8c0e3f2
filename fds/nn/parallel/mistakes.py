"""What is wrong with a plan, where the first call of a copy fails with pieces and would not fail with the whole.

Between a column and its row a user's own code works on pieces. Where it counts on the whole, torch's errors are of
shapes that nobody wrote. So the call is tried again, of the module that no plan has changed, with zeros for parameters.
If that runs, the plan is at fault; if not, the error is the user's and stays as it is. So do errors of torch that are
not of shapes alone, such as too little memory: on the meta device they do not come again.
"""

from __future__ import annotations

import copy
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fds import tree
from fds.errors import LossError, is_int
from fds.nn.parallel.plan import Column, Heads, Part, Row
from fds.nn.parallel.region import Region, ranges

ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)  # of shapes: torch's, and the user's
_FDS = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_OF_RANKS = (_FDS, os.path.join(os.path.dirname(torch.__file__), "distributed"))  # whose errors are not of shapes
_MOST_TEXT = 2000  # characters of an error that are read
_SHAPED = {"view", "reshape", "unflatten", "expand"}


@attrs.frozen(eq=False)
class Failed:
    """A call of a function of torch that raised."""

    error: BaseException
    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def again(self) -> None:
        """Call it without values."""
        args, kwargs = tree.map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (self.args, self.kwargs))
        self.func(*args, **kwargs)


@attrs.frozen(eq=False)
class Planned:
    """A module that a plan divides: whole, its parameters without values, and the copy that computes with pieces."""

    whole: nn.Module
    copy: nn.Module
    prefix: str  # of its names in the whole tree
    parts: Mapping[str, Part]
    region: Region

    def explain(self, error: Exception, failed: Failed | None, args: Any, kwargs: Any) -> LossError | None:
        """Return what to raise for an error of a call of the copy; None where the plan is not at fault."""
        failed = failed if failed is not None and failed.error is error else None
        if failed is None and not self._is_of_shapes(error):
            return None
        if (failed is not None and _runs(failed.again)) or not _runs(lambda: self._run_whole(args, kwargs)):
            return None
        paths = {id(module): path for path, module in self.copy.named_modules()}
        frames = _frames(error)
        inside = [
            paths.get(id(frame.f_locals.get(next(iter(frame.f_code.co_varnames), "")))) for frame in frames
        ]  # a row fails for what made its input
        path = next((x for x in reversed(inside) if x is not None and not isinstance(self.parts.get(x), Row)), None)
        if path is None:
            return None
        module, func = self.copy.get_submodule(path), getattr(failed and failed.func, "__name__", "")
        hints = self._hints(path, module, frames[inside.index(path) :], func)
        return LossError(
            "a module fails with this rank's pieces, as the plan divides it, and would not with the whole",
            where=f"tensor_parallel: {f'{self.prefix}{path}'.rstrip('.') or type(module).__name__}",
            got=f"{type(error).__name__}: {error}"[:200],
            want="between a 'column' and its 'row', code that works on a piece of the features",
            hint="\n".join(hints),
        )

    def _is_of_shapes(self, error: Exception) -> bool:
        """Say whether an error that the user's code raised may be of shapes: it tells of pieces or their width."""
        if _frames(error)[-1].f_code.co_filename.startswith(_OF_RANKS):
            return False
        if "values to unpack" in str(error):
            return True
        sizes = {n for x in self.copy.parameters() for n in x.shape}
        return not sizes.isdisjoint(map(int, re.findall(r"\d+", str(error)[:_MOST_TEXT])))

    def _run_whole(self, args: Any, kwargs: Any) -> None:
        """Call the whole module, with zeros for parameters, which take no memory."""
        whole, values = copy.deepcopy(self.whole), dict(self.copy.named_parameters())
        if not any(part.training for part in self.copy.modules()):
            whole.eval()
        state = {name: values[name].new_zeros(()).expand(x.shape) for name, x in whole.named_parameters()}
        device = next((x.device for x in values.values()), None)
        state |= {name: x.to(device) for name, x in whole.named_buffers()}
        torch.func.functional_call(whole, state, *tree.map(self._as_whole, (args, kwargs)))

    def _as_whole(self, x: Any) -> Any:
        """Return zeros for the whole of what a layer before this one ended with pieces of, and all else as it is."""
        parts, axis = self.region.before, self.region.axis
        if parts and isinstance(x, Tensor) and x.shape[-1:] == (sum(ranges(n, axis)[axis.index][1] for n in parts),):
            return x.new_zeros((*x.shape[:-1], sum(parts)))
        return x

    def _hints(self, path: str, module: Any, frames: list[FrameType], func: str) -> Iterator[str]:
        """Yield what may mend it, by what stands in the module."""
        names = set[str]().union(*(_names_in(frame.f_code) for frame in frames))
        inside = {
            p: part for p, part in self.parts.items() if p != path and f"{p}.".startswith(f"{path}." if path else "")
        }
        columns = [(p, part) for p, part in inside.items() if isinstance(part, Column)]
        heads = self.parts.get(path)
        names -= set(heads.counts) if isinstance(heads, Heads) else set()
        numbers = _numbers(module, names) if columns else ""
        if numbers and len(columns) == 1 and (columns[0][1].parts, columns[0][1].unit) == (1, 1):
            name = columns[0][0].removeprefix(path).lstrip(".")
            yield f"column(parts=) for {name} if it holds several projections, column(unit=) if they lie head by head"
        if numbers:
            yield f"heads(...) for it, with those of its numbers that count heads or their features: {numbers}"
        for key in sorted(names & vars(module).keys()) if columns else ():
            if numbers := _numbers(vars(module)[key], names - vars(module).keys()):
                yield f"numbers of its own in place of those of {key}, which no plan divides: {numbers}"
        if func in _SHAPED:
            yield "-1 in the place of a number of the whole"
        if not inside and isinstance(getattr(module, "weight", None), Tensor) and module.weight.dim() == 2:
            yield "'row' for it, which takes what a 'column' returns"
        yield "column(gather=True) for the layer before, where all features are needed"


def _numbers(x: Any, names: set[str]) -> str:
    """Return the ints among an object's attributes of these names, as text."""
    values = {name: vars(x)[name] for name in sorted(names) if name in getattr(x, "__dict__", {})}
    return ", ".join(f"{name} = {n}" for name, n in values.items() if is_int(n, 2))


def _frames(error: BaseException) -> list[FrameType]:
    """Return where an error passed, the function that raised it last."""
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _names_in(code: CodeType) -> set[str]:
    """Return the attributes that a function reads, and those that functions inside of it do."""
    inner = (x for x in code.co_consts if isinstance(x, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _runs(call: Callable[[], None]) -> bool:
    try:
        with torch.no_grad():
            call()
    except Exception:  # of the user's code too
        return False
    return True
