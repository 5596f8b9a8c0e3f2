"""One stage of a pipeline: some consecutive layers, and the graphs of the microbatches that are under way in it.

Backward in two halves shares the work: B towards a call's inputs, W towards its parameters. B runs the graph from the
outputs to the inputs alone, and keeps the gradients that arrive where the graph branches to parameters. W starts from
those, runs what hangs off the branches, and frees the graph: a linear layer costs one matrix product in each. A graph
cannot be cut so where a parameter is reached from two branches of which one leads to the other (W would run the way
between them again), or where a branch is an autograd.Function of Python, or another operation that computes all of its
gradients however few are asked for.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from fds import autodiff, loss as losses
from fds.step import Cut, Microbatch
from fds.transforms.pipeline.packets import Packet

Grads = Sequence[Tensor | None]  # by leaf of a packet


class _Enter(torch.autograd.Function):
    """A tensor inside the graph, where a layer may write over it; its gradient goes to a leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


# torch does not say what it takes
_enter: Callable[[Tensor, Tensor], Tensor] = _Enter.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _leaf(x: Tensor) -> Tensor:
    """Return a leaf for the gradient of a tensor, without memory: how long that stays is for the layers to say."""
    leaf = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    leaf.untyped_storage().resize_(0)
    return leaf.requires_grad_()


@attrs.frozen(eq=False)
class Piece:
    """Some calls of layers that were run, cut off from what came before: their graph, by both its ends."""

    layers: tuple[int, ...]
    inputs: list[Tensor | None]  # by leaf that came in, for those that want one: leaves for the gradients
    outputs: list[tuple[int, GradientEdge]]  # (leaf that went out, where its backward begins)
    whole: bool  # it runs forward again in backward, so B and W are one

    def roots(self, grads: Grads) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return where backward begins, and the gradients there; outputs that nobody used have none."""
        pairs = [(edge, grad) for i, edge in self.outputs if (grad := grads[i]) is not None]
        return [edge for edge, _ in pairs], [grad for _, grad in pairs]

    def wanted(self) -> list[Tensor]:
        """Return the inputs that want a gradient."""
        return [x for x in self.inputs if x is not None]


class Stage:
    """Layers `layers` of a loss, for the length of a step.

    Of a microbatch it keeps the graph, not the output: who gets that decides how long it stays.
    """

    def __init__(
        self,
        each: Microbatch,
        loss: losses.Layers,
        layers: range,
        params: Any,
        leaves: Sequence[Tensor],
        buffers: dict[str, Tensor],
        add: Callable[..., None],
        again: Collection[str] = (),
    ):
        self.each, self.loss, self.layers, self.params, self.buffers = each, loss, layers, params, buffers
        self.leaves = list(leaves)  # those of its parameters that are trained
        self.add = add  # of gradients: `add(backward, last=...)`
        self.again = again  # names of parameters that an earlier stage has too, which counts what views note of them
        self.is_last = layers.stop == len(loss)
        self.pieces: dict[int, list[Piece]] = {}  # by microbatch
        self.rests: dict[int, list[tuple[Rest, Piece]]] = {}  # what W still has to do
        self.cuts: dict[int, dict[str, Cut]] = {}  # by microbatch, where there are views
        self.whole: set[int] = set()  # layers that B ran whole
        names = [name for layer in layers for name in loss.layer(layer).params]
        self.ties = len(set(names)) < len(names)  # two of its layers share a parameter: its gradient comes in parts

    def forward(
        self, i: int, packet: Packet, setting: losses.Setting, targets: Any, *, split: bool
    ) -> tuple[Packet, losses.Outcome | None]:
        """Run microbatch `i`; return what goes on, and on the last stage the outcome of the loss.

        With `split` every call is a piece of its own, so that backward can be done in two halves.
        """
        self.pieces[i] = []
        packet, current = packet.loose(), dict(self.buffers)
        trains = torch.is_grad_enabled() and bool(self.leaves or any(packet.wants))
        rows = targets if self.layers.start else (packet.leaves, targets)
        at = f"values given to stage {self.layers}, {setting.mode.evaluating}"
        with self.each.opened(self.params, rows, setting, at, in_pieces=True, again=self.again) as (
            params,
            self.cuts[i],
        ):
            calls = losses.layer_calls(self.loss, self.layers, params, current, setting)
            calls = setting.mapped(calls)
            groups, piece = _groups(calls) if split else [calls], None
            for group in groups:
                piece, packet = self._run(group, packet)
                if self.is_last and group is groups[-1]:
                    break
                self._close(i, piece, packet)
                packet = packet.loose() if split else packet
            self.buffers = current
            if not self.is_last:
                return packet.loose(), None
            value = setting.call(len(self.loss), self.loss.compare)(packet.build(packet.leaves), targets)
        outcome = losses.read(value, where="the criterion of Layers", buffers=current)
        total = outcome.total
        if trains:
            self.each.check_graph(total, setting)
        root = Packet([total], None, (total.requires_grad,))
        assert piece is not None
        self._close(i, piece, root)
        return packet.loose(), attrs.evolve(outcome, total=total.detach())

    def backward(self, i: int, grads: Grads, *, last: bool) -> list[Tensor | None]:
        """Run backward of microbatch `i` whole; return the gradients by what came in."""
        current: list[Grads] = [grads]
        self._count_pieces(i)

        def run(_: list[Tensor]) -> None:
            for piece in reversed(self.pieces.pop(i)):
                current[0] = self._backward(i, piece, current[0])
                self._end_piece(i, piece)
            del self.cuts[i]

        self.add(run, last=last, in_parts=self._in_parts(i))
        return list(current[0])

    def backward_input(self, i: int, grads: Grads) -> list[Tensor | None]:
        """Run what leads to the gradients by what came in, and return them; the rest is for `backward_weight`."""
        rests = self.rests[i] = []
        current: list[Grads] = [grads]
        self._count_pieces(i)

        def run(_: list[Tensor]) -> None:
            for piece in reversed(self.pieces.pop(i)):
                edges, arrived = piece.roots(current[0])
                halves = None
                if edges and not piece.whole:
                    halves = backward_input(edges, arrived, piece.wanted(), self._leaves(i))
                if halves is not None:
                    by_input = iter(halves[0])
                    current[0] = [None if x is None else next(by_input) for x in piece.inputs]
                    rests.append((halves[1], piece))
                    continue
                if edges:
                    self.whole.update(piece.layers)
                current[0] = self._backward(i, piece, current[0])
                self._end_piece(i, piece)

        self.add(run, last=False, in_parts=self._in_parts(i))
        return list(current[0])

    def backward_weight(self, i: int, *, last: bool) -> None:
        """Run what `backward_input` left of microbatch `i`."""
        rests = self.rests.pop(i)

        def run(_: list[Tensor]) -> None:
            while rests:
                rest, piece = rests.pop(0)
                rest()
                self._end_piece(i, piece)
            del self.cuts[i]

        self.add(run, last=last, in_parts=self._in_parts(i))

    def _in_parts(self, i: int) -> bool:
        """Say whether a parameter's gradient may come in parts: where layers share one, or views of several read it."""
        return self.ties or any(cut.reads for cut in self.cuts[i].values())

    def _leaves(self, i: int) -> list[Tensor]:
        """Return where the gradients of microbatch `i` arrive: the trained parameters, or what is cut off from them."""
        return [cut.leaf for cut in self.cuts[i].values()] if self.each.views else self.leaves

    def _count_pieces(self, i: int) -> None:
        """Say in how many pieces of backward the gradient of each viewed parameter of microbatch `i` comes."""
        for name, cut in self.cuts[i].items():
            cut.back.pieces = sum(name in self._names(piece) for piece in self.pieces[i])

    def _end_piece(self, i: int, piece: Piece) -> None:
        for name in self._names(piece) & self.cuts[i].keys():
            self.cuts[i][name].end_piece()

    def _names(self, piece: Piece) -> set[str]:
        return {name for layer in piece.layers for name in self.loss.layer(layer).params}

    def _backward(self, i: int, piece: Piece, grads: Grads) -> list[Tensor | None]:
        edges, arrived = piece.roots(grads)
        wanted = piece.wanted()
        inputs = [*wanted, *self._leaves(i)]
        if edges and inputs:
            autodiff.backward_by(edges, arrived, inputs)
        by_input = [None if x is None else x.grad for x in piece.inputs]
        for x in wanted:
            x.grad = None
        return by_input

    def _run(self, group: list[losses.LayerCall], packet: Packet) -> tuple[Piece, Packet]:
        """Run some calls on a packet, cut off from where it came from; the piece has no outputs yet."""
        grad = torch.is_grad_enabled()
        inputs = [_leaf(x) if want and grad else None for x, want in zip(packet.leaves, packet.wants, strict=True)]
        entered = [x if leaf is None else _enter(leaf, x) for x, leaf in zip(packet.leaves, inputs, strict=True)]
        value = packet.build(entered)
        del entered
        for call in group:
            try:
                value = call(value)
            except Exception as error:
                if len(call.layers) == 1:  # layer maps may have joined layers to one call
                    error.add_note(f"in layers[{call.layers[0]}]")
                raise
        layers = sum((call.layers or tuple(self.layers) for call in group), ())
        return Piece(layers, inputs, [], any(call.recomputes for call in group)), Packet.of(value)

    def _close(self, i: int, piece: Piece, packet: Packet) -> None:
        pairs = enumerate(zip(packet.leaves, packet.wants, strict=True))
        piece.outputs.extend((at, get_gradient_edge(x)) for at, (x, want) in pairs if want)
        self.pieces[i].append(piece)


def _groups(calls: list[losses.LayerCall]) -> list[list[losses.LayerCall]]:
    """Return calls that can be cut apart; one that writes over its input stays with the call that computes it."""
    groups: list[list[losses.LayerCall]] = []
    for call in calls:
        if not groups or not call.in_place:
            groups.append([])
        groups[-1].append(call)
    return groups


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
        by_input = torch.autograd.grad(outputs, inputs, grads, retain_graph=bool(groups), allow_unused=True)
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

    return list(by_input), rest


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
        params = none.union(*(behind[n] for n in nexts if n not in leads))
        if node in targets or any(n in leads for n in nexts):
            leads.add(node)
            if params and (isinstance(node, BackwardCFunction) or node.name() in COMPUTES_ALL):
                return None
            groups = _joined(groups, node, params)
        else:
            end = ends.get(node)
            behind[node] = params if end is None else frozenset((end,))
            groups = _joined(groups, node, behind[node] if node in roots else none)
    for nodes, _ in groups:
        others = leads.intersection(nodes)
        if len(nodes) > 1 and any(_leads_to(node, others, children, leads) for node in others):
            return None
    return [(nodes, [leaves[i] for i in sorted(params)]) for nodes, params in groups], leads


def _joined(groups: list[Group], node: Node, params: frozenset[int]) -> list[Group]:
    """Return groups with one more start, in one with those that share a parameter with it."""
    if not params:
        return groups
    shared = [group for group in groups if group[1] & params]
    others = [group for group in groups if not group[1] & params]
    return [*others, ([*(n for nodes, _ in shared for n in nodes), node], params.union(*(more for _, more in shared)))]


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
