"""Check that a loss computes with the parameters that it is given, not with those of the original module.

`functional` can replace parameters only where a copy of the module holds them. If forward reads them through something
else (a global variable, an object that is not copied), it reads the original values, which are never trained. The first
call is therefore checked: by the graph of its result, or by its operators where there is no graph.
"""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from fds import tree
from fds.errors import LossError
from fds.loss.copies import out_of_reach
from fds.loss.watching import Watching

_ORIGINALS = WeakTensorKeyDictionary()  # parameter of a module -> (numbers of calls of functional, its name)
_numbers = itertools.count()


def note(module: nn.Module) -> int:
    """Register the parameters of a module while they are alive; return a number for this call of `functional`."""
    number = next(_numbers)
    for name, p in module.named_parameters():
        numbers, _ = _ORIGINALS.get(p) or (set(), name)
        _ORIGINALS[p] = ({*numbers, number}, name)
    return number


def check_no_originals(out: Any, inputs: Any = (), number: int | None = None) -> None:
    """Raise `LossError` if a leaf of the graph from `inputs` to `out` is the parameter of an original module.

    With `number`, only parameters registered under it count. `inputs` themselves may be original parameters.
    """
    tensors = [x for x in tree.leaves(inputs) if isinstance(x, Tensor)]
    stop = {x.grad_fn for x in tensors if x.grad_fn is not None}
    passed = {id(x) for x in tensors}
    todo = [x.grad_fn for x in tree.leaves(out) if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = {*stop, *todo}
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad node
        if leaf is not None and id(leaf) not in passed:
            _check(leaf, number)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


class OriginalsWatch(Watching):
    """Raise `LossError` where an operator reads a parameter registered under `number` that is not in `inputs`.

    A dispatch mode, not a function mode: torch's own modules take other code paths under a function mode.
    """

    def __init__(self, number: int, inputs: Any):
        super().__init__()
        self.number, self.passed = number, {id(x) for x in tree.leaves(inputs)}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for x in tree.leaves((args, kwargs)):
            if isinstance(x, nn.Parameter) and id(x) not in self.passed:
                _check(x, self.number)
        return func(*args, **(kwargs or {}))


def _check(leaf: Tensor, number: int | None) -> None:
    entry = _ORIGINALS.get(leaf)
    if entry is not None and (number is None or number in entry[0]):
        _raise_original(entry[1], inside=number is not None)


def _raise_original(name: str, *, inside: bool) -> NoReturn:
    if inside:
        raise out_of_reach(
            name,
            "a parameter of the original module, which is not trained",
            "a global variable, or an object that copy.deepcopy does not copy, through which forward reaches it",
        )
    raise LossError(
        "the loss reads a parameter of a module itself, which is not trained",
        where=name,
        got="a parameter of a module that was passed to fds.functional",
        want=f"params[{name!r}], apply(params, ...)",
        hint="if it should stay constant: under torch.no_grad(), or .detach()",
    )
