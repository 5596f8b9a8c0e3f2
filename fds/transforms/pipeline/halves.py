"""Backward in two halves that share the work: B towards a call's inputs, W towards its parameters.

B runs the graph from the outputs to the inputs alone, and keeps the gradients that arrive where the graph branches to
parameters. W starts from those, runs what hangs off the branches, and frees the graph: a linear layer costs one matrix
product in each. A graph cannot be cut so where a parameter is reached from two branches of which one leads to the
other (W would run the way between them again), or where a branch is an autograd.Function of Python, which computes
all of its gradients however few are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Rest = Callable[[], None]


def backward_input(
    outputs: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[list[Tensor | None], Rest] | None:
    """Return the gradients by `inputs`, and what adds those by `leaves` to their `.grad` later; None if it cannot.

    Args:
        outputs: where backward starts.
        grads: the gradients there.
        inputs: tensors of the graph that require gradients; without any, all of backward is left for later.
        leaves: parameters, leaves of the graph.
    """
    if not inputs:
        return [], lambda: torch.autograd.backward(list(outputs), list(grads), inputs=list(leaves))
    groups = _branches(outputs, inputs, leaves)
    if groups is None:
        return None
    kept: dict[Node, tuple] = {}
    keep = lambda node: lambda arrived: kept.__setitem__(node, arrived)
    hooks = [node.register_prehook(keep(node)) for nodes, _ in groups for node in nodes]
    try:
        found = torch.autograd.grad(outputs, inputs, grads, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()

    def rest() -> None:
        for nodes, theirs in groups:
            arrived = [(GradientEdge(n, i), g) for n in nodes for i, g in enumerate(kept.pop(n, ())) if g is not None]
            if arrived:
                torch.autograd.backward([e for e, _ in arrived], [g for _, g in arrived], inputs=theirs)

    return list(found), rest


def _branches(
    outputs: Sequence[GradientEdge], inputs: Sequence[Tensor], leaves: Sequence[Tensor]
) -> list[tuple[list[Node], list[Tensor]]] | None:
    """Return groups of (nodes where the graph branches, parameters behind them); no parameter is in two groups."""
    targets = {get_gradient_edge(x).node for x in inputs}
    ends = {get_gradient_edge(x).node: i for i, x in enumerate(leaves)}
    children = _graph([edge.node for edge in outputs])
    leads: set[Node] = set()  # to an input
    behind: dict[Node, frozenset[int]] = {}  # parameters, of nodes that do not lead to an input
    none: frozenset[int] = frozenset()
    groups: list[tuple[list[Node], frozenset[int]]] = []
    for node, nexts in children.items():  # a node comes after what it leads to
        if node in targets or any(n in leads for n in nexts):
            leads.add(node)
            found = none.union(*(behind[n] for n in nexts if n not in leads))
            if found:
                if isinstance(node, BackwardCFunction):
                    return None
                shared = [g for g in groups if g[1] & found]
                groups = [g for g in groups if not g[1] & found]
                nodes = [n for g in shared for n in g[0]]
                if nodes and _leads_to(node, set(nodes), children, leads):
                    return None
                groups.append(([*nodes, node], found.union(*(g[1] for g in shared))))
        else:
            end = ends.get(node)
            behind[node] = none.union(*(behind[n] for n in nexts)) if end is None else frozenset((end,))
    return [(nodes, [leaves[i] for i in sorted(found)]) for nodes, found in groups]


def _graph(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return the nodes that lead from the roots, each after those that it leads to, with these."""
    done: dict[Node, list[Node]] = {}
    stack = [(root, False) for root in roots]
    seen: set[Node] = set()
    while stack:
        node, left = stack.pop()
        if left:
            done[node] = [n for n, _ in node.next_functions if n is not None]
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((n, False) for n, _ in node.next_functions if n is not None and n not in seen)
    return done


def _leads_to(node: Node, nodes: set[Node], children: dict[Node, list[Node]], leads: set[Node]) -> bool:
    """Say whether there is a way from a node to one of others, among those that lead to an input."""
    stack, seen = [node], set()
    while stack:
        for n in children[stack.pop()]:
            if n in nodes:
                return True
            if n in leads and n not in seen:
                seen.add(n)
                stack.append(n)
    return False
