"""Prune rows of weights with their biases: outputs of linear layers, that is.

Fills:  view, memory             State:  slot `pruned_rows` (or `name`): a bit for each row
Law:    the hand-written loop whose rows are multiplied by masks, made of weights or scores when the schedule says so
Cost:   a pass over the weights each microbatch; where a mask is made, or for "topk" always, one more
Source: Sanh et al. 2020, arXiv:2005.07683; "sensitivity": Michel et al. 2019, arXiv:1905.10650

`prune_channels`: prune output channels of convolutions, with their biases.

Fills:  view, memory             State:  slot `pruned_channels` (or `name`): a bit for each channel
Law:    that of rows
Cost:   that of rows
Source: Li et al. 2017, arXiv:1608.08710

`prune_heads`: prune heads of attention, by the columns of its output projection.

Fills:  view, memory             State:  slot `pruned_heads` (or `name`): a bit for each head
Law:    that of rows
Cost:   that of rows
Source: Michel et al. 2019, arXiv:1905.10650
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import attrs
import torch
from torch import Tensor

from fds import loss as losses, tree
from fds.compression import Cut, masks
from fds.compression.activations import is_conv1d
from fds.compression.masks import Curve
from fds.compression.pieces import Piece, counts
from fds.compression.related import Related, following
from fds.compression.schedule import Schedule, chosen, is_chosen, patterns_of
from fds.compression.scores import SUFFIXES, dropped, summed
from fds.errors import FLAG, ComposeError, Rule, StateError, count, slot_name
from fds.layout import Leaf
from fds.step import Call, Memory, Step, fill, transform

Method = Literal["l1", "topk", "sensitivity"]
METHOD = Rule(get_args(Method).__contains__, ": there is no such method", ", ".join(map(repr, get_args(Method))))


@attrs.frozen(eq=False, repr=False)
class Pruned:
    """The view: rows, or columns of heads, times their masks, with biases and columns of what is related."""

    where: str  # the transform
    patterns: tuple[str, ...]
    method: Method
    schedule: Schedule
    slot: str
    dims: tuple[int, ...]  # numbers of dims that weights may have
    num_heads: int = 0  # 0 of rows
    excluded: tuple[str, ...] = ()
    related: Related = Related()
    draws: ClassVar = False

    def __repr__(self) -> str:
        kind = f"{self.num_heads} heads" if self.num_heads else "rows"
        return f"masks of {kind} of {tree.named(self.patterns)} by {self.method}: {self.schedule}"

    def init(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> dict[str, Tensor]:
        """Return masks in which all stays, by name, (1, words), without words where scores are the masks.

        Raises `StateError` for what cannot be pruned.
        """
        weights = chosen(shapes, self.patterns, self.excluded, self.where, self.dims)
        for name, shape in weights.items():
            if self.num_heads and shape[1] % self.num_heads:
                raise StateError(
                    f"{self.where}: columns are not those of so many heads",
                    where=name,
                    got=f"{shape}, num_heads={self.num_heads}",
                    want=f"a multiple of {self.num_heads} columns: an output projection, (outputs, heads * size)",
                )
            scores, size = self.scores_of(name), (1, self.num_heads) if self.num_heads else (shape[0], 1)
            if self.method != "l1" and shapes.get(scores) != size:
                raise StateError(
                    "a weight has no scores",
                    where=name,
                    got=f"{scores}: {shapes.get(scores)}",
                    want=f"a parameter of this name, {size}",
                    hint=f"fds.compression.with_scores(module, ..., of={'heads' if self.num_heads else 'rows'!r})",
                )
        for name in shapes.keys() - weights.keys():
            if self.chooses(name) and not self.num_heads and biases_of(name, shapes):
                raise StateError(
                    f"{self.where}: patterns choose what has a bias and no such rows",
                    where=name,
                    got=str(shapes[name]),
                    want=f"weights of {' or '.join(map(str, self.dims))} dims alone; excluded=... with this one",
                )
        self.related.check(weights, shapes, self.num_heads, self.where)
        words = {n: -(-(self.num_heads or shape[0]) // masks.BITS) for n, shape in weights.items()}
        words = dict.fromkeys(words, 0) if self.method == "topk" else words
        return {n: torch.full((1, size), masks.ALL, dtype=torch.int64, device=device) for n, size in words.items()}

    def scores_of(self, name: str) -> str:
        """Return the name of the scores of a weight."""
        return name + SUFFIXES["heads" if self.num_heads else "rows"]

    def source_of(self, name: str) -> str:
        """Return the name of what makes the mask of a weight: its scores, or itself."""
        return name if self.method == "l1" else self.scores_of(name)

    def chooses(self, name: str) -> bool:
        """Say whether patterns choose a parameter by its name."""
        return is_chosen(name, self.patterns, self.excluded)

    def weights_of(self, leaf: Leaf, weights: Container[str]) -> list[str]:
        """Return which `weights` have masks that a parameter is multiplied by: itself, and what it is related to."""
        name, is_vector = leaf.name, len(leaf.shape) == 1
        weight: str | None = name
        if is_vector and not self.num_heads and name.rpartition(".")[2] == "bias":
            weight = name.removesuffix("bias") + "weight"
        elif len(leaf.shape) not in self.dims:
            weight = None
        # what is related to heads computes nothing that their columns do not drop
        other = None if is_vector or self.num_heads else self.related.weight_of(name)
        return [source for source in (weight, other) if source is not None and source in weights]

    def prunes(self, leaf: Leaf, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Say whether a parameter is multiplied by masks, given the shapes of all."""
        return bool(self.weights_of(leaf, {n for n, x in shapes.items() if len(x) in self.dims and self.chooses(n)}))

    def reads(self, leaf: Leaf, call: Call) -> Sequence[str]:
        """Return the names of what makes the masks of a parameter: scores, or weights as no other view changed them."""
        return [*map(self.source_of, self.weights_of(leaf, call.slots[self.slot]))]

    def __call__(self, x: Tensor, leaf: Leaf, call: Call, read: Mapping[str, Tensor]) -> Tensor:
        """Return a parameter times its masks, and what has none as it is."""
        weights = self.weights_of(leaf, call.slots[self.slot])
        if not weights or self.schedule.is_idle(call, self.slot):
            return x
        seen, piece = x, Piece.of(leaf.name, leaf.shape, call)
        for weight in weights:
            gate = self.gate(read[self.source_of(weight)], weight, call).to(x.dtype)
            if weight == leaf.name and self.num_heads:
                gate = gate.repeat_interleave(piece.shape[1] // self.num_heads)
            elif weight == leaf.name or x.dim() == 1:
                gate = gate.view(-1, *[1] * (x.dim() - 1))
            else:  # of what takes the rows as its inputs; scores learn by what they are of
                gate = gate.detach().repeat_interleave(piece.shape[1] // len(gate)).view(1, -1, *[1] * (x.dim() - 2))
            seen = seen * piece.cut(gate)
        return seen

    def gate(self, source: Tensor, weight: str, call: Call) -> Tensor:
        """Return what all rows or heads of a weight are multiplied by in this call, (rows or heads,)."""
        if self.method != "l1" and Piece.of(self.scores_of(weight), source.shape, call).placements:
            raise ComposeError(
                f"{self.where} takes scores that each rank has whole",
                where=self.scores_of(weight),
                got="a placement that cuts them",
                want="one that says Replicated() of them",
            )
        if self.method == "topk":
            gate = masks.top(source.flatten(), self.schedule.density)
            return torch.where(call.step >= self.schedule.offset, gate, 1)
        if self.method == "l1":
            piece, heads = Piece.of(weight, source.shape, call), self.num_heads
            if not heads:
                return self.mask(lambda: piece.sums(source, 0), piece.shape[0], weight, call)
            return self.mask(lambda: masks.head_sums(piece.sums(source, 1), heads), heads, weight, call)
        scores = source.detach().flatten()
        gate = 1 + (summed(source) - source.detach()).flatten()  # the difference first: it is 0, whatever the sum
        return self.mask(lambda: scores, len(scores), weight, call) * gate

    def mask(self, scores: Callable[[], Tensor], count: int, weight: str, call: Call) -> Tensor:
        """Return the mask in this call, (rows or heads,), of so many scores; note it where it is looked at."""
        mask = masks.unpack(call.slots[self.slot][weight], count).bool()
        if call.is_due(self.slot):
            kept, final = self.schedule.num_kept(call.step, count), masks.num_kept(self.schedule.density, count)
            mask = self.schedule.current(call.step, mask, final, lambda: masks.largest(scores(), kept).view(1, -1))
            if counts(call):
                call.note(self.slot, weight, masks.pack(mask))
        return self.schedule.in_use(mask, call.step).flatten()

    def removed(self, params: Mapping[str, Tensor], call: Call) -> list[Cut]:
        """Return what of parameters, whole ones by name, an evaluation computes nothing with: scores, too.

        Of a weight to which nothing is related rows stay: what takes its outputs would not fit.
        """
        cuts: list[Cut] = []
        for name in call.slots[self.slot]:
            x = params[name]
            cuts += [dropped(score, params) for score in [self.scores_of(name)] if self.method != "l1"]
            names = self.related.names_of(name)
            if not names:
                continue
            keep = (self.gate(params[self.source_of(name)], name, call).detach() != 0).cpu()
            if not self.num_heads:
                cuts.append(Cut(name, 0, keep))
                cuts += [Cut(bias, 0, keep) for bias in biases_of(name, params)]
                for other in names:
                    y = params[other]
                    times = 1 if y.dim() == 1 else y.shape[1] // len(keep)
                    cuts.append(Cut(other, int(y.dim() > 1), keep.repeat_interleave(times)))
                continue
            size = x.shape[1] // self.num_heads
            cuts.append(Cut(name, 1, keep.repeat_interleave(size), (self.num_heads, int(keep.sum()))))
            for other in names:
                times = len(params[other]) // x.shape[1]  # 3 where queries, keys and values are one matrix
                rows = keep.repeat_interleave(size).repeat(times)
                if self.related.interleaved:
                    rows = keep.repeat_interleave(size * times)
                cuts += [Cut(each, 0, rows) for each in (other, *biases_of(other, params))]
        return cuts


def biases_of(weight: str, params: Mapping[str, Any]) -> list[str]:
    """Return the name of the bias beside a weight, where there is one."""
    bias = weight.removesuffix("weight") + "bias"
    return [bias] if weight.rpartition(".")[2] == "weight" and bias in params else []


def _refuse_conv1d(modules: Sequence[Any], patterns: tuple[str, ...], excluded: tuple[str, ...], where: str) -> None:
    """Raise `ComposeError` for a weight whose outputs are in columns."""
    for x in modules:
        inside: Mapping[str, Any] = dict(x.module.named_modules())
        for path in (path for path, module in inside.items() if is_conv1d(module)):
            name = ".".join(filter(None, (x.prefix.removesuffix("."), path, "weight")))
            if is_chosen(name, patterns, excluded):
                raise ComposeError(
                    f"{where} takes weights of (outputs, inputs), and those of Conv1D are the other way round",
                    where=name,
                    got="Conv1D of transformers",
                    want="nn.Linear; excluded=... with this one",
                )


def _made(view: Pruned, excluded: Any, related: Any, *, interleaved: bool = False) -> Callable[[Step], Step]:
    """Return what fills the stations of a step. Raises `ComposeError` for patterns that are none."""
    where, names = view.where, patterns_of(view.patterns, view.where)
    out = patterns_of(excluded, where, "excluded")
    takes_next = related == "next" and not view.num_heads
    listed = Related() if takes_next else Related.of(names, related, where, interleaved=interleaved)

    def apply(step: Step) -> Step:
        pairs, modules = listed, losses.modules_of(step.loss)
        _refuse_conv1d(modules, names, out, where)
        if takes_next:
            weights = {
                f"{x.prefix}{n}" for x in modules for n, p in x.module.named_parameters() if p.dim() in view.dims
            }
            pairs = following(step.loss, sorted(n for n in weights if is_chosen(n, names, out)), where)
        pruned = attrs.evolve(view, patterns=names, excluded=out, related=pairs)
        return fill(
            step,
            view=pruned,
            memory=Memory(view.slot, pruned.init, "named", **view.schedule.rule),
            instead=f"{where}(..., name={view.slot + '_2'!r})",
            hint="give one of them another name",
        )

    return apply


@transform(several=True, method=METHOD, initial=FLAG, name=slot_name("pruned_more"))
def prune_rows(
    *patterns: str,
    density: float,
    method: Method = "l1",
    offset: int = 0,
    end: int | None = None,
    stride: int = 1,
    curve: Curve = "cubic",
    initial: bool = False,
    related: str | Sequence[str] = (),
    excluded: Sequence[str] = (),
    name: str = "pruned_rows",
):
    """Multiply rows of matrices that the loss sees, and their biases, by masks: outputs of linear layers become 0.

    Of the n rows of a weight the ceil(density n) with the largest scores stay; of equal ones the first. The columns of
    what is related, which take these outputs, are multiplied by the same mask, so that nothing depends on what an
    activation makes of 0; `fds.bake` leaves both out.

    Args:
        patterns: of names of weights, (rows, columns) (`*` crosses dots); a bias is named as its weight.
        density: the share of rows that stays, 0 < density <= 1.
        method: what scores are: "l1" the sum of a row's magnitudes; "topk" parameters, trained as if their gradient
            were that of the mask, which make it in each microbatch from `offset` on; "sensitivity" decaying sums of
            how much the loss depends on a row, to first order. Of the last two a weight's are `<name>_row_scores`,
            which `fds.compression.with_scores` makes; those that are sums have the optimizer
            `fds.compression.sensitivity`.
        offset: updates before masks are in use.
        end: updates after which masks stay as they are; None: `offset`. Not of "topk".
        stride: updates from one mask to the next.
        curve: of densities, "cubic" or "exponential", as `prune_weights` has them.
        initial: take the mask of the weights as they are in the first call, in use from `offset` on. Of "l1".
        related: patterns of names of weights that take the outputs, with as many `*` as those of the weights, each for
            the same text; norms between them too. Of a weight with more columns than rows, each row has as many. "next"
            finds it in `fds.Layers` and `nn.Sequential`. Without it rows become 0 and stay where they are.
        excluded: patterns of names that are left alone.
        name: of the slot; another one where this stands twice.

    Where ranks have parts of a weight (a tensor axis), they add up the sums of rows in the calls that may make a mask,
    and the gradients of scores in each microbatch.

    Raises `ComposeError` for anything else, where "next" cannot be told, and where stages of a pipeline part a weight
    from what is related; `StateError` at init for patterns that match no weight, weights without scores, and what is
    related and does not fit.
    """
    schedule = Schedule.of(density, offset, end, stride, curve, initial=initial, method=method, where="prune_rows")
    view = Pruned("prune_rows", patterns, method, schedule, name, dims=(2,))
    return _made(view, excluded, related)


@transform(several=True, method=METHOD, initial=FLAG, name=slot_name("pruned_more"))
def prune_channels(
    *patterns: str,
    density: float,
    method: Method = "l1",
    offset: int = 0,
    end: int | None = None,
    stride: int = 1,
    curve: Curve = "cubic",
    initial: bool = False,
    related: str | Sequence[str] = (),
    excluded: Sequence[str] = (),
    name: str = "pruned_channels",
):
    """Multiply output channels of convolutions that the loss sees, and their biases, by masks.

    It is `prune_rows` of weights of 3 or more dims, (channels, inputs, ...): arguments and errors are its. What is
    related takes channels as inputs: a convolution in one group, a linear layer after a flattening (each channel has
    as many columns), and the batch norm between, which becomes smaller with them.
    """
    schedule = Schedule.of(density, offset, end, stride, curve, initial=initial, method=method, where="prune_channels")
    view = Pruned("prune_channels", patterns, method, schedule, name, dims=(3, 4, 5))
    return _made(view, excluded, related)


@transform(
    several=True,
    method=METHOD,
    initial=FLAG,
    name=slot_name("pruned_more"),
    num_heads=count(": {name} counts heads"),
    interleaved=FLAG,
)
def prune_heads(
    *patterns: str,
    num_heads: int,
    density: float,
    method: Method = "l1",
    offset: int = 0,
    end: int | None = None,
    stride: int = 1,
    curve: Curve = "cubic",
    initial: bool = False,
    related: str | Sequence[str] = (),
    interleaved: bool = False,
    excluded: Sequence[str] = (),
    name: str = "pruned_heads",
):
    """Multiply the columns of heads in output projections of attention by masks: what a head computes is not read.

    Of `num_heads` heads the ceil(density num_heads) with the largest scores stay. What is related, the weights of
    queries, keys and values, computes what nobody reads; `fds.bake` leaves its rows out, and the biases.

    Args:
        patterns: of names of output projections, (outputs, num_heads * size): head h has columns h * size on.
        num_heads: of each of them.
        density: the share of heads that stays, 0 < density <= 1.
        method: as of `prune_rows`; "l1" sums the magnitudes of a head's columns, scores are `<name>_head_scores`.
        offset: updates before masks are in use.
        end: updates after which masks stay as they are; None: `offset`. Not of "topk".
        stride: updates from one mask to the next.
        curve: of densities, "cubic" or "exponential", as `prune_weights` has them.
        initial: take the mask of the weights as they are in the first call, in use from `offset` on. Of "l1".
        related: patterns of names of weights of queries, keys and values, with as many `*` as those of the weights:
            (num_heads * size, inputs) each, or 2 or 3 of them in one matrix, one after another.
        interleaved: in one matrix the queries, keys and values of one head lie together.
        excluded: patterns of names that are left alone.
        name: of the slot; another one where this stands twice.

    Raises the errors of `prune_rows`; `StateError` at init where columns are not those of so many heads, too.
    """
    schedule = Schedule.of(density, offset, end, stride, curve, initial=initial, method=method, where="prune_heads")
    view = Pruned("prune_heads", patterns, method, schedule, name, dims=(2,), num_heads=num_heads)
    return _made(view, excluded, related, interleaved=interleaved)
