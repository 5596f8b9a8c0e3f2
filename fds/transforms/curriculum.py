"""Train on easy batches first: short sequences, or whatever a function makes of a batch, by a schedule of difficulty.

Fills:  batch                    State:  none: the difficulty follows from `calls`
Law:    14: the step without it on batches that were cut by hand; stopped anywhere and resumed, on any number of ranks
Cost:   less: activations and time of the tokens that are left; a copy of those
Source: Li, Zhang and He 2022, arXiv:2108.06084; `curriculum_learning` of DeepSpeed 0.19.6
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeGuard

import attrs
import torch
from torch import Tensor

from fds import random, tree
from fds.errors import BatchError, ComposeError, Rule, ScheduleError, did_you_mean, is_int
from fds.step import Call, Step, Whole, check_tree, fill, transform

_EACH = 'dims={"tokens": 1, "mask": (2, 3)} names leaves by patterns of key paths, and the dims of each that are cut'
_WORDS = ("seqlen", "seqlen_reshape")


def _difficulty(schedule: Callable[[int], int], call: Call, least: int | None = None) -> int:
    difficulty = schedule(call.calls + 1)
    if not is_int(difficulty, least):
        raise ScheduleError(
            "not a difficulty",
            where=f"curriculum, call {call.calls + 1}",
            got=f"{schedule!r:.60} returned {difficulty!r:.40}",
            want="an int" + ("" if least is None else f", {least} or more: the length of sequences"),
        )
    return difficulty


@attrs.frozen
class Eased:
    """The batch map of a function `(batch, difficulty) -> batch`."""

    function: Callable[[Any, int], Any]
    schedule: Callable[[int], int]

    @property
    def draws(self) -> bool:
        """Whether the function may draw random numbers."""
        return random.draws(self.function)

    def __call__(self, batch: Any, call: Call) -> Any:
        """Return what the function makes of a batch; in an evaluation the batch. Raises `ScheduleError`."""
        return self.function(batch, _difficulty(self.schedule, call)) if call.training else batch


@attrs.frozen
class Shortened:
    """The batch map that shortens sequences: by leaving their ends out, or by making rows of their pieces."""

    schedule: Callable[[int], int]
    dims: Mapping[str, tuple[int, ...]] | None  # pattern of key paths -> dims; None for those that look like tokens
    reshape: bool
    draws: ClassVar = False

    def __call__(self, batch: Any, call: Call) -> Any:
        """Return the batch with shorter sequences; in an evaluation as it is. Raises `ScheduleError`, `BatchError`."""
        if not call.training:
            return batch
        if call.dimensions.sequence is not None:
            raise ComposeError(
                "a curriculum would cut parts of sequences, each rank its own",
                where="curriculum",
                got="ranks along a sequence axis",
                want="rows that are cut before they are divided over these ranks",
                hint="length = schedule(int(state.calls) + 1), where the batch is made",
            )
        length = _difficulty(self.schedule, call, least=1)
        check_tree(batch)
        leaves, build = tree.flatten(batch)
        named = dict(zip(tree.paths(batch), leaves, strict=True))
        stages = any(dimension.role == "stage" for dimension in call.dimensions.source)
        parts = stages and None in named.values()  # a rank of a pipeline has None for what it does not read
        cuts = _likely(named, parts) if self.dims is None else _named(named, self.dims)
        if not self.reshape:
            return build([_first(x, cuts.get(path, ()), length) for path, x in named.items()])
        pieces = _pieces(named, cuts, length)
        return build([_in_pieces(x, cuts.get(path, ()), length, pieces) for path, x in named.items()])


def _likely(named: Mapping[str, Any], parts: bool) -> dict[str, tuple[int, ...]]:
    """Return the dims that are as long as the sequences are, which whole numbers of two dims, (B, S), show."""
    dense: dict[str, Tensor] = {path: x for path, x in named.items() if _is_dense(x)}
    tokens = {path: x for path, x in dense.items() if x.dim() == 2 and _is_whole_number(x)}
    lengths = {path: x.shape[1] for path, x in tokens.items()}
    if not lengths and dense and not parts:
        got = ", ".join(f"{path or 'batch'} {tuple(x.shape)} {x.dtype}" for path, x in dense.items())
        raise _unclear("nobody knows which leaves are sequences", "", got[:200], "whole numbers, (B, S)")
    longest = max(lengths.values(), default=1)
    if not {*lengths.values()} <= {1, longest}:  # a label of each row, (B, 1), is not cut
        got = ", ".join(f"{path} {length}" for path, length in lengths.items())
        raise _unclear("sequences of several lengths", "", got[:200], "one length")
    return {path: _sequence_dims(x, longest) for path, x in dense.items()} if longest > 1 else {}


def _is_dense(x: Any) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested


def _is_whole_number(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex()


def _sequence_dims(x: Tensor, length: int) -> tuple[int, ...]:
    """Return the dims of a leaf along which tokens lie: by what it is like, not where else that number may occur."""
    dims = tuple(dim for dim in range(1, x.dim()) if x.shape[dim] == length)
    if 1 in dims:  # (B, S, ...), or a mask (B, S, S)
        return (1, 2) if x.dim() == 3 and 2 in dims and _is_whole_number(x) else (1,)
    return dims if x.dim() in (3, 4) and x.shape[1] == 1 else ()  # masks (B, 1, S), (B, 1, 1, S), (B, 1, S, S)


def _named(named: Mapping[str, Any], patterns: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the dims by path, not below 0. Raises `BatchError` for patterns without a leaf, leaves without a dim."""
    cuts: dict[str, tuple[int, ...]] = {}
    for pattern in patterns:
        if not fnmatch.filter(named, pattern) and not any(
            x is None and _is_above(at, pattern) for at, x in named.items()
        ):
            what, hint = "a pattern of `dims` matches no leaf", did_you_mean(pattern, named)
            raise BatchError(what, where="curriculum", got=repr(pattern), want=", ".join(named), hint=hint)
    for path, leaf in named.items():
        x = leaf.value if isinstance(leaf, Whole) else leaf
        asked = next((dims for pattern, dims in patterns.items() if fnmatch.fnmatchcase(path, pattern)), ())
        if x is None or not asked:
            continue
        rank = x.dim() if _is_dense(x) else 0
        dims = tuple(dim % rank if -rank <= dim < rank else -1 for dim in asked)
        if min(dims) < (0 if isinstance(leaf, Whole) else 1) or len(set(dims)) < len(dims):
            got = f"dims {asked} of {tuple(x.shape) if _is_dense(x) else type(x).__name__}"
            raise BatchError(
                "a leaf has no such dims to cut",
                where=path or "batch",
                got=got,
                want="dims of a dense tensor, each once, and not dim 0, along which rows lie",
            )
        cuts[path] = dims
    return cuts


def _is_above(path: str, pattern: str) -> bool:
    """Return whether a pattern may match below a path, where a rank of a pipeline has None."""
    return not path or fnmatch.fnmatchcase(path, ".".join(pattern.split(".")[: path.count(".") + 1]))


def _unclear(what: str, where: str, got: str, want: str) -> BatchError:
    return BatchError(f"curriculum: {what}", where=where or "batch", got=got, want=want, hint=_EACH)


def _first(leaf: Any, dims: tuple[int, ...], length: int) -> Any:
    """Return a leaf cut to this length along some dims."""
    if isinstance(leaf, Whole):
        return Whole(_first(leaf.value, dims, length))
    x = leaf
    for dim in dims:
        x = x.narrow(dim, 0, min(length, x.shape[dim]))
    return x if x is leaf or not leaf.is_contiguous() else x.contiguous()  # `view` works as it did


def _pieces(named: Mapping[str, Any], cuts: Mapping[str, tuple[int, ...]], length: int) -> int:
    """Return how many whole pieces of this length there are in a sequence; 1 where it is not longer."""
    sizes: dict[str, int] = {}
    for path, dims in cuts.items():
        x = named[path]
        if isinstance(x, Whole):
            continue
        if len(dims) > 2:
            raise _unclear(
                "pieces of one or two dims become rows", path, f"dims {dims}", "one dim, or the two of a mask"
            )
        sizes |= {f"{path} {x.shape[dim]}": x.shape[dim] for dim in dims}
    if len(set(sizes.values())) > 1:
        got = ", ".join(sizes)[:200]
        raise _unclear("sequences of several lengths have no pieces in common", "", got, "one length")
    return max(next(iter(sizes.values()), 0) // length, 1)


def _in_pieces(leaf: Any, dims: tuple[int, ...], length: int, pieces: int) -> Any:
    """Return a leaf whose rows are in pieces, one below the other: (B, S) as (B pieces, length)."""
    if pieces == 1 or isinstance(leaf, Whole):
        return _first(leaf, dims, length)
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return leaf
    if not _is_dense(leaf):
        raise _unclear("rows of this layout cannot be repeated", "", str(leaf.layout), "dense leaves")
    if not dims:
        return leaf.repeat_interleave(pieces, 0)
    x, at = leaf, sorted(dims)
    for dim in reversed(at):
        x = x.narrow(dim, 0, pieces * length)
        x = x.view(*x.shape[:dim], pieces, length, *x.shape[dim + 1 :])
    # of a mask (B, 1, n, k, n, k) what a piece sees of itself
    x = x.diagonal(0, at[0], at[1] + 1).movedim(-1, 1) if len(at) == 2 else x.movedim(at[0], 1)
    return x.flatten(0, 1)


def _as_dims(dims: Any) -> tuple[int, ...]:
    return tuple(dims) if tree.is_sequence(dims) else (dims,)


def _are_dims(value: Any) -> bool:
    """Return whether this is a dict: pattern -> dim or dims."""
    return tree.is_mapping(value) and all(
        isinstance(pattern, str) and all(map(is_int, _as_dims(dims))) for pattern, dims in value.items()
    )


@transform(
    several=True,
    how=Rule(
        lambda how: callable(how) or how in _WORDS, ": no such curriculum", '"seqlen", "seqlen_reshape", or a function'
    ),
    schedule=Rule(callable, ": {name} is a function of the step", "say, fds.schedules.fixed_linear(64, 1024, 10_000)"),
    dims=Rule(_are_dims, ": {name} are those of leaves, by patterns", '{"tokens": 1, "mask": (2, 3)}').or_none(),
)
def curriculum(
    how: str | Callable[[Any, int], Any],
    schedule: Callable[[int], int],
    *,
    dims: Mapping[str, int | Sequence[int]] | None = None,
):
    """Make batches of a training easier by a schedule of difficulty, asked for call 1, 2, ...: for `calls` + 1.

    "seqlen" leaves out the ends of sequences, so that they are `schedule(calls + 1)` long at most. "seqlen_reshape"
    makes rows of their pieces of that length, and leaves out what is no whole piece: (B, S) becomes (B * pieces,
    length), masks see within pieces, and what has no dim to cut is repeated. A function makes of a batch what it likes.
    Several curricula stand one after the other. Evaluations get the batch whole.

    Without `dims` sequences are as long as whole numbers of two dims are, (B, S); leaves (B, S, ...) are cut too, and
    masks (B, 1, S, S), (B, 1, 1, S), (B, 1, S), and (B, S, S) of whole numbers or booleans. Tokens of several lengths,
    and a batch without any, are an error. What `fds.whole` marks is left as it is.

    Args:
        how: "seqlen", "seqlen_reshape", or a function `(batch, difficulty) -> batch`.
        schedule: of `fds.schedules`, `fixed_linear` and the like, or any function `int -> int`.
        dims: pattern of key paths of a batch -> dim, or dims, that are cut; the first that matches counts, and leaves
            without one stay as they are. Those that `fds.whole` marks can be cut along dim 0 too.

    Raises `ComposeError` for anything else, and in a call where ranks along a sequence axis pass parts of rows;
    `ScheduleError` in a call for a difficulty that is no int, or no length; `BatchError` for leaves without such dims.
    """
    if callable(how):
        if dims is not None:
            raise ComposeError("curriculum: a function cuts what it likes", got=f"dims={dims!r}"[:80], want="no dims")
        filler: Any = Eased(how, schedule)
    else:
        tuples = None if dims is None else {pattern: _as_dims(each) for pattern, each in dims.items()}
        filler = Shortened(schedule, tuples, how == "seqlen_reshape")

    def apply(step: Step) -> Step:
        return fill(step, batch=filler)

    return apply
