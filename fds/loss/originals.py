"""Parameters of modules themselves, where a loss was to compute with those that it is given.

A module is a function of its parameters only as far as it reads them from where `functional` can put others. What it
reaches in another way (a global variable, an object that is not copied with it) keeps the module's own values, and is
never trained, without a sign of it. The first call tells: by the graph of its result, and without one by its operators.
"""

from __future__ import annotations

import itertools
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from fds import tree
from fds.errors import LossError
from fds.loss.copies import out_of_reach

_ORIGINALS = WeakTensorKeyDictionary()  # parameter of a module -> (numbers of the calls of functional, its name)
_numbers = itertools.count()


def note(module: nn.Module) -> int:
    """Remember the parameters of a module for as long as they live; return a number for this call."""
    number = next(_numbers)
    for name, p in module.named_parameters():
        numbers, _ = _ORIGINALS.get(p) or (set(), name)
        _ORIGINALS[p] = ({*numbers, number}, name)
    return number


def demand_none(out: Any, inputs: Any = (), number: int | None = None) -> None:
    """Raise `LossError` where the graph between `inputs` and `out` begins at a module's own parameter.

    With `number` at one that was noted under it; `inputs` may be such parameters.
    """
    given = [x for x in tree.leaves(inputs) if isinstance(x, Tensor)]
    stop = {x.grad_fn for x in given if x.grad_fn is not None}
    passed = {id(x) for x in given}
    todo = [x.grad_fn for x in tree.leaves(out) if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = {*stop, *todo}
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)  # of the nodes that accumulate gradients
        if leaf is not None and id(leaf) not in passed:
            _check(leaf, number)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)


class Watch(TorchDispatchMode):
    """Raises `LossError` where an operator takes a parameter noted under `number` that is not in `inputs`.

    Below autograd, since torch's own modules take other ways where functions of torch are looked at from above.
    """

    def __init__(self, number: int, inputs: Any):
        super().__init__()
        self.number, self.passed = number, {id(x) for x in tree.leaves(inputs)}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # to skip it, torch would import torch._dynamo, which takes seconds
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run as they are; what they take is not looked at."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for x in tree.leaves((args, kwargs)):
            if isinstance(x, nn.Parameter) and id(x) not in self.passed:
                _check(x, self.number)
        return func(*args, **(kwargs or {}))


def _check(leaf: Tensor, number: int | None) -> None:
    found = _ORIGINALS.get(leaf)
    if found is not None and (number is None or number in found[0]):
        _refuse(found[1], inside=number is not None)


def _refuse(name: str, *, inside: bool) -> NoReturn:
    if inside:
        raise out_of_reach(
            name, "a parameter of the module that it is a copy of, which nobody trains",
            "a global variable, or an object that copy.deepcopy does not copy, through which forward reaches it",
        )  # fmt: skip
    raise LossError(
        "the loss reads a parameter of a module itself, which nobody trains", where=name,
        got="a parameter of a module that was given to fds.functional", want=f"params[{name!r}], apply(params, ...)",
        hint="where it is meant to stay as it is: under torch.no_grad(), or .detach()",
    )  # fmt: skip
