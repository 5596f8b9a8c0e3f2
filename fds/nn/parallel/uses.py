"""What parameters are used for: for what all ranks have whole, or for the pieces of it that each has.

On the way back from a loss, which is whole, the graph of autograd passes functions that put pieces together (`sum_out`,
`join`), behind which are pieces, and functions that let in what is whole (`copy_in`, `cut`), behind which all is
whole again. So every path says what the gradient is that arrives at its end: the same on all ranks where that is whole,
and one rank's term of it among pieces. Functions that do either say it in `takes` and `gives`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import attrs
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import CheckpointFunction

from fds import tree
from fds.errors import LossError

Side = Literal["whole", "pieces"]


@attrs.frozen(eq=False)
class Use:
    """A parameter of a copy: where the copy holds it, its name, and how ranks hold it: "piece", "same" or "sum"."""

    parameters: Mapping[str, Tensor | None]
    key: str
    name: str
    lies: str
    in_parts: bool
    by_hand: bool  # whether the module's own forward computes with pieces


Edges = dict[tuple[Any, int], Use]  # (node, number) in the graph -> the parameter whose gradient arrives there
Met = dict[tuple[Use, Side], Any]  # a parameter, and on which side it is -> the function before which that begins
Mixed = dict[
    Side, tuple[str, Any]
]  # where something of the other side is used -> the nearest parameter in it, the same

_WRONG = {("piece", "whole"), ("same", "pieces"), ("sum", "whole")}


def edges_of(uses: Iterable[Use]) -> Edges:
    """Return where in the graph the parameters are that copies hold now."""
    tensors = [(x, use) for use in uses if (x := use.parameters.get(use.key)) is not None and x.requires_grad]
    with temporarily_clear_interpreter_stack():  # private; under torch.func parameters have none of a transform's
        edges = [(get_gradient_edge(x), use) for x, use in tensors]
    return {(edge.node, edge.output_nr): use for edge, use in edges}


def check_uses(edges: Edges, out: Any, side: Side | None) -> None:
    """Raise `LossError` where a gradient is not what a plan takes it for, given results that are whole, or pieces.

    None for what may be either: then all counts behind what puts pieces together, or lets something in.
    """
    roots = [(x.grad_fn, x.output_nr) for x in tree.leaves(out) if isinstance(x, Tensor) and x.grad_fn is not None]
    waiting = deque[tuple[Any, int, Side | None, Any]]((*root, side, None) for root in roots)  # nearest first
    seen, mixed = set[Any](), Mixed()
    met: Met = {}
    while waiting:
        node, number, side, behind = waiting.popleft()
        use = edges.get((node, number))
        if use is not None and side is not None:
            met.setdefault((use, side), behind)
        if node is None or use is not None or (node, side) in seen:
            continue
        seen.add((node, side))
        function = function_of(node)
        takes, gives = (getattr(node, name, getattr(function, name, None)) for name in ("takes", "gives"))
        if gives is not None and side is not None and gives != side and side not in mixed:
            mixed[side] = nearest(edges, node, number), behind
        if function is CheckpointFunction or getattr(function, "runs_again", False):
            side = None  # what lets in what is whole, or joins pieces, is not in the graph before backward
        for index, (following, at) in enumerate(node.next_functions):
            if takes is None:
                waiting.append((following, at, side, behind))
            else:  # what comes after the first argument are pieces of parameters
                waiting.append((following, at, "pieces" if index else takes, function))
    _judge(met, mixed)


def nodes_behind(node: Any, number: int = 0, stops: Callable[[Any], bool] = bool) -> Iterator[tuple[Any, int]]:
    """Yield what a node of the graph was made of, nearest first, itself included; nothing behind those that stop it."""
    waiting, seen = deque([(node, number)]), set[Any]()
    while waiting:
        at = waiting.popleft()
        if at[0] is not None and at not in seen:
            seen.add(at)
            yield at
            waiting += () if stops(at[0]) else at[0].next_functions


def function_of(node: Any) -> Any:
    """Return the `torch.autograd.Function` whose node this is, None for one of torch's."""
    return getattr(type(node), "_forward_cls", None)  # private


def metadata_of(node: Any) -> dict[str, Any]:
    """Return what is noted at a node of the graph, a dict to write to."""
    return node.metadata


def nearest(edges: Edges, node: Any, number: int = 0) -> str:
    """Return the name of the nearest parameter behind a node."""
    behind = nodes_behind(node, number, lambda _: False)
    return next((edges[at].name for at in behind if at in edges), "an activation")


def _judge(met: Met, mixed: Mixed) -> None:
    """Raise `LossError` for the nearest parameter whose gradient would be another one, with advice that mends it."""
    wrong = next((key for key in met if (key[0].lies, key[1]) in _WRONG), None)
    use, side = wrong or (None, next(iter(mixed), None))
    if side is None:
        return
    where = f"tensor_parallel: {mixed[side][0] if use is None else use.name}"
    if use is not None and use.lies == "sum":
        raise LossError(
            "what a 'sequence' block makes of a part of the tokens is used as if it were of all"
            if use.in_parts
            else "a parameter is used for what all ranks have whole, and its gradient would be counted by each",
            where=where,
            got="more than the first of what the block returns" if use.in_parts else "replicated(grads='sum')",
            want="no 'sequence' for the block" if use.in_parts else "replicated(), or no entry in the plan",
        )
    if side == "whole":
        raise LossError(
            "pieces of features reach the loss, and nothing puts them together",
            where=where,
            got="this rank's piece, where a loss takes it for the whole",
            want="a 'row' after it, column(gather=True), 'vocab' for a head, or fds.nn.vocab_cross_entropy of logits",
            hint="a loss that reads parameters sees pieces of them: decay of weights is the optimizer's",
        )
    same = [other for other, at in met if (other.lies, at) == ("same", "pieces")]
    want = "fds.nn.replicated(grads='sum') for the module that holds it, and it alone"
    if "pieces" in mixed or any((other, "whole") in met for other in same):
        want = "fds.nn.replicated(enters=True) for a module that returns what meets pieces, and that alone"
    behind = mixed[side][1] if wrong is None else met[wrong]
    raise LossError(
        "something whole meets pieces, and the gradients of what made it would be those of one rank's pieces",
        where=where,
        got="gradients that the plan takes to be the same on all ranks",
        want=getattr(behind, "advice", want),
        hint="or 'column' for a layer of which the pieces need a piece alone",
    )
