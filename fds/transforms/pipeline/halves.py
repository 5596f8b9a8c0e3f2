"""Backward in two halves that share the work: B towards a call's inputs, W towards its parameters.

B runs the graph from the outputs to the inputs alone, and keeps the gradients that arrive where the graph branches to
parameters. W starts from those, runs what hangs off the branches, and frees the graph: a linear layer costs one matrix
product in each. A graph cannot be cut so where a parameter is reached from two branches of which one leads to the
other (W would run the way between them again), or where a branch is an autograd.Function of Python, or another
operation that computes all of its gradients however few are asked for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Rest = Callable[[], None]
Group = tuple[list[Node], frozenset[int]]  # where W starts, and which parameters are behind
COMPUTES_ALL = {"MkldnnRnnLayerBackward0"}  # of torch's own, those that heed no mask of what is asked for


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
    cut = _cut(outputs, inputs, leaves)
    if cut is None:
        return None
    groups, leads = cut
    kept: dict[Node, tuple[Tensor | None, ...]] = {}

    def keep(node: Node) -> Callable[[tuple[Tensor | None, ...]], None]:
        return lambda arrived: kept.__setitem__(node, arrived)

    with _hooked({node: keep(node) for nodes, _ in groups for node in nodes if node in leads}):
        # compiled code frees what it saved as it runs, and refuses to keep a graph
        found = torch.autograd.grad(outputs, inputs, grads, retain_graph=bool(groups), allow_unused=True)
    # an output of parameters alone has its gradient already
    alone = [(edge, grad) for edge, grad in zip(outputs, grads, strict=True) if edge.node not in leads]

    def rest() -> None:
        for nodes, theirs in groups:
            mine = {node: kept.pop(node) for node in nodes if node in kept}
            starts = [(GradientEdge(n, i), g) for n, got in mine.items() for i, g in enumerate(got) if g is not None]
            starts += [(edge, grad) for edge, grad in alone if edge.node in nodes]
            if starts:
                # hooks of tensors have changed what was kept, and would again: it is put in their results' place
                with _hooked({node: functools.partial(_instead, got) for node, got in mine.items()}):
                    torch.autograd.backward([edge for edge, _ in starts], [grad for _, grad in starts], inputs=theirs)

    return list(found), rest


def _instead(kept: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    return kept


@contextlib.contextmanager
def _hooked(hooks: dict[Node, Callable[..., Any]]) -> Generator[None]:
    """Call these with what arrives at nodes, before the nodes get it; what they return is what the nodes get."""
    handles = [node.register_prehook(hook) for node, hook in hooks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cut(
    outputs: Sequence[GradientEdge], inputs: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[list[tuple[list[Node], list[Tensor]]], set[Node]] | None:
    """Return groups of (where W starts, parameters behind), and what leads to an input; None if it cannot be cut.

    W starts where the graph branches to parameters, and at outputs of parameters alone. No parameter is in two groups.
    """
    targets = {get_gradient_edge(x).node for x in inputs}
    ends = {get_gradient_edge(x).node: i for i, x in enumerate(leaves)}
    roots = {edge.node for edge in outputs}
    children = _graph([edge.node for edge in outputs])
    leads: set[Node] = set()
    behind: dict[Node, frozenset[int]] = {}  # parameters, of nodes that do not lead to an input
    none: frozenset[int] = frozenset()
    groups: list[Group] = []
    for node, nexts in children.items():  # a node comes after what it leads to
        found = none.union(*(behind[n] for n in nexts if n not in leads))
        if node in targets or any(n in leads for n in nexts):
            leads.add(node)
            if found and (isinstance(node, BackwardCFunction) or node.name() in COMPUTES_ALL):
                return None
            groups = _joined(groups, node, found)
        else:
            end = ends.get(node)
            behind[node] = found if end is None else frozenset((end,))
            groups = _joined(groups, node, behind[node] if node in roots else none)
    for nodes, _ in groups:
        others = leads.intersection(nodes)
        if len(nodes) > 1 and any(_leads_to(node, others, children, leads) for node in others):
            return None
    return [(nodes, [leaves[i] for i in sorted(found)]) for nodes, found in groups], leads


def _joined(groups: list[Group], node: Node, found: frozenset[int]) -> list[Group]:
    """Return groups with one more start, in one with those that share a parameter with it."""
    if not found:
        return groups
    shared = [group for group in groups if group[1] & found]
    others = [group for group in groups if not group[1] & found]
    return [*others, ([*(n for nodes, _ in shared for n in nodes), node], found.union(*(more for _, more in shared)))]


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
    seen: set[Node] = set()
    stack = [node]
    while stack:
        for n in children[stack.pop()]:
            if n in nodes:
                return True
            if n in leads and n not in seen:
                seen.add(n)
                stack.append(n)
    return False
