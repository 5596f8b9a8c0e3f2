"""What a plan of tensor parallelism says of a module: how its parameters lie, and what stands in its place in a copy.

`fds.tensor_parallel(axis, {"blocks.*.up": "column", "blocks.*.down": "row"})`: patterns of paths of modules, and for
each one of these, by its name or as a record.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fds.errors import ComposeError, did_you_mean, is_a, is_int
from fds.nn.parallel import checking
from fds.nn.parallel.heads import DrawsOfAll, PartAttention
from fds.nn.parallel.layers import SelfAttention
from fds.nn.parallel.linear import (
    ColumnConv1D,
    ColumnEmbedding,
    ColumnLinear,
    RowConv1D,
    RowLinear,
    VocabEmbedding,
    is_product,
    lengths,
)
from fds.nn.parallel.region import Region

Dims = dict[str, tuple[int, tuple[int, ...]]]  # parameter -> the dim that is divided, and the lengths of its parts


@attrs.frozen
class Part:
    """What a plan says of a module. Of this one ranks have all, alike."""

    def __str__(self) -> str:
        changed = [
            f"{f.name}={x!r}" for f in attrs.fields(type(self)) if f.repr and (x := getattr(self, f.name)) != f.default
        ]
        return f"{type(self).__name__.lower()}({', '.join(changed)})" if changed else type(self).__name__.lower()

    @property
    def sums(self) -> list[str]:
        """Names of its own parameters that are whole, and of whose gradients every rank has a term."""
        return []

    def dims(self, module: nn.Module, path: str) -> Dims:
        """Return how the module's own parameters are divided. Raises `ComposeError` for a module that cannot be."""
        return {}

    def check(self, module: nn.Module, path: str, size: int) -> None:
        """Raise `ComposeError` where so many ranks cannot divide the module."""

    def convert(self, module: nn.Module, region: Region, *, run: str | None) -> None:
        """Have a copy of the module compute with this rank's pieces, in place.

        `run` names the blocks in which it is, if activations are parts of sequences there.
        """


@attrs.frozen
class Column(Part):
    """See `column`."""

    parts: int | tuple[int, ...] = 1
    gather: bool = False
    unit: int = 1

    def __attrs_post_init__(self) -> None:
        checking.flags("column", ComposeError, gather=self.gather)
        _check_parts("column", self.parts)
        if not is_int(self.unit, 1):
            raise ComposeError(
                "column: unit is the width of a head", where="unit", got=repr(self.unit)[:80], want="an int >= 1"
            )

    def dims(self, module: nn.Module, path: str) -> Dims:
        """Divide the outputs."""
        if type(module) is not nn.Embedding:
            _check_linear(module, path, "column")
        dim, parts = self._cut(module, path)
        return {"weight": (dim, parts)} | ({} if getattr(module, "bias", None) is None else {"bias": (0, parts)})

    def _cut(self, module: nn.Module, path: str = "") -> tuple[int, tuple[int, ...]]:
        """Return the dim of the weight along which outputs lie, and the lengths of their parts."""
        dim = 1 if isinstance(module, nn.Embedding) else _dim_of_outputs(module)
        weight: Any = module.weight
        return dim, lengths(module.parts if isinstance(module, ColumnLinear) else self.parts, weight.shape[dim], path)

    def check(self, module: nn.Module, path: str, size: int) -> None:
        """Raise `ComposeError` where the ranks do not divide what stays together."""
        for length in self.dims(module, path)["weight"][1] if self.unit > 1 else ():
            if length % (self.unit * size):
                raise ComposeError(
                    "the ranks do not divide the heads",
                    where=f"tensor_parallel: {path}",
                    got=f"{length} features, {self.unit} a head, over {size} ranks",
                    want=f"a multiple of {size} heads",
                )

    def convert(self, module: nn.Module, region: Region, *, run: str | None) -> None:
        """Make the copy a column."""
        _, cut = self._cut(module)  # what it computes was tried before: a copy has places beside, of adapters
        gather = self.gather or (isinstance(module, ColumnLinear) and module.gather)
        kind = ColumnConv1D if _is_conv1d(module) else ColumnLinear
        _become(module, ColumnEmbedding if isinstance(module, nn.Embedding) else kind)
        _join(module, region, run=run, gather=gather, cut=cut)


@attrs.frozen
class Row(Part):
    """See `row`."""

    parts: int | tuple[int, ...] = 1

    def __attrs_post_init__(self) -> None:
        _check_parts("row", self.parts)

    def dims(self, module: nn.Module, path: str) -> Dims:
        """Divide the inputs."""
        _check_linear(module, path, "row")
        return {"weight": self._cut(module, path)}

    def _cut(self, module: nn.Module, path: str = "") -> tuple[int, tuple[int, ...]]:
        """Return the dim of the weight along which inputs lie, and the lengths of their parts."""
        dim = 1 - _dim_of_outputs(module)
        weight: Any = module.weight
        return dim, lengths(self.parts, weight.shape[dim], path)

    def convert(self, module: nn.Module, region: Region, *, run: str | None) -> None:
        """Make the copy a row."""
        _, cut = self._cut(module)
        _become(module, RowConv1D if _is_conv1d(module) else RowLinear)
        _join(module, region, run=run, cut=cut)


@attrs.frozen
class Vocab(Part):
    """See `vocab`."""

    gather: bool = True

    def __attrs_post_init__(self) -> None:
        checking.flags("vocab", ComposeError, gather=self.gather)

    def dims(self, module: nn.Module, path: str) -> Dims:
        """Divide the vocabulary."""
        if isinstance(module, nn.Embedding):
            if module.scale_grad_by_freq:
                raise _unfit(module, path, "vocab", "an nn.Embedding without scale_grad_by_freq")
            return {"weight": (0, (module.num_embeddings,))}
        if not isinstance(module, nn.Linear):
            raise _unfit(module, path, "vocab", "an nn.Embedding, or the nn.Linear of a head")
        return Column().dims(module, path)

    def convert(self, module: nn.Module, region: Region, *, run: str | None) -> None:
        """Make the copy an embedding of some rows, or a head of some columns."""
        if isinstance(module, nn.Embedding):
            cut = (module.weight.shape[0],)
            _become(module, VocabEmbedding)
            _join(module, region, run=run, cut=cut)
        else:
            Column(gather=self.gather).convert(module, region, run=run)


@attrs.frozen
class Heads(Part):
    """See `heads`."""

    counts: tuple[str, ...] = ()
    counts_tokens: bool = attrs.field(default=True, repr=False)  # whether attention reads how many it is given
    cross: bool = False

    def __attrs_post_init__(self) -> None:
        checking.flags("heads", ComposeError, cross=self.cross)
        if not all(is_a(name, str) for name in self.counts):
            raise ComposeError(
                "heads takes names of attributes",
                where="counts",
                got=repr(self.counts)[:80],
                want='such as "num_heads"',
            )

    def dims(self, module: nn.Module, path: str) -> Dims:
        """Divide an `nn.MultiheadAttention` by its heads; of other attention its projections say how they lie."""
        if not isinstance(module, nn.MultiheadAttention):
            for name in self.counts:
                if not is_int(getattr(module, name, None), 1):
                    raise ComposeError(
                        "heads names attributes that are divided by the number of ranks",
                        where=f"tensor_parallel: {path}",
                        got=f"{name} = {getattr(module, name, 'nothing')!r:.40}",
                        want="an int of the module, such as num_heads",
                    )
            return {}
        if type(module) is not nn.MultiheadAttention or module.bias_k is not None or module.add_zero_attn:
            raise _unfit(module, path, "heads", "an nn.MultiheadAttention without add_bias_kv and add_zero_attn")
        e = module.embed_dim
        dims: Dims = {"out_proj.weight": (1, (e,))}
        if module.in_proj_bias is not None:
            dims["in_proj_bias"] = (0, (e, e, e))
        if module._qkv_same_embed_dim:
            return dims | {"in_proj_weight": (0, (e, e, e))}
        return dims | {f"{x}_proj_weight": (0, (e,)) for x in "qkv"}

    def check(self, module: nn.Module, path: str, size: int) -> None:
        """Raise `ComposeError` where the ranks do not divide the heads."""
        counts = ("num_heads",) if isinstance(module, nn.MultiheadAttention) else self.counts
        for name in counts:
            if getattr(module, name) % size:
                raise ComposeError(
                    "the ranks do not divide the heads",
                    where=f"tensor_parallel: {path}.{name}",
                    got=str(getattr(module, name)),
                    want=f"a multiple of {size}, the ranks of the axis",
                )

    def convert(self, module: nn.Module, region: Region, *, run: str | None) -> None:
        """Have the copy count this rank's heads alone."""
        if isinstance(module, nn.MultiheadAttention):
            region.dim = -2 if module.batch_first else -3
            _become(module, PartAttention)
            _join(module, region, run=run)
            module.cross = self.cross  # pyright: ignore[reportAttributeAccessIssue,reportArgumentType]
            return
        for name in self.counts:
            setattr(module, name, getattr(module, name) // region.axis.size)
        counts = tuple(getattr(module, name) for name in self.counts)
        run = run if self.counts_tokens else None
        wrap(module, functools.partial(_attend, region, run, counts, self.cross, drops(module)))


@attrs.frozen
class Whole(Part):
    """See `replicated`."""

    grads: str = "same"
    enters: bool = False

    def __attrs_post_init__(self) -> None:
        checking.flags("replicated", ComposeError, enters=self.enters)
        if self.grads not in ("same", "sum"):
            raise ComposeError("replicated takes what gradients are", got=repr(self.grads)[:80], want="'same' or 'sum'")

    def convert(self, module: nn.Module, region: Region, *, run: str | None) -> None:
        """Let what the copy returns in."""
        if self.enters:
            let_in = functools.partial(region.let_in, run=run)
            wrap(module, lambda forward, *args, **kwargs: first(let_in, forward(*args, **kwargs)))


@attrs.frozen
class Sequence(Part):
    """See `sequence`."""

    enters: bool = True
    leaves: bool = True
    run: str = attrs.field(default="", repr=False)  # the list of blocks in which it is: their sequences are one

    def __attrs_post_init__(self) -> None:
        checking.flags("sequence", ComposeError, enters=self.enters, leaves=self.leaves)

    def convert(self, module: nn.Module, region: Region, *, run: str | None) -> None:
        """Cut what the copy is given along the sequence, and put together what it returns."""
        region.blocks = True
        wrap(module, functools.partial(_in_parts, region, self))


def column(parts: int | tuple[int, ...] = 1, *, gather: bool = False, unit: int = 1) -> Column:
    """Divide the outputs of a linear layer over the ranks: `nn.Linear`, GPT-2's Conv1D, `nn.Embedding`'s features.

    Args:
        parts: of several projections in one matrix, each divided by itself: how many equal ones (3 for queries, keys
            and values), or their lengths (grouped queries: `(heads * d, groups * d, groups * d)`).
        gather: whether every rank gets the whole output; else it gets its piece, on which what follows must work as on
            the whole until a row: elementwise functions, and attention by heads.
        unit: how many outputs stay together on a rank: the width of a head.
    """
    return Column(parts, gather, unit)


def row(parts: int | tuple[int, ...] = 1) -> Row:
    """Divide the inputs of a linear layer over the ranks, which a column before it has divided: its output is whole.

    Args:
        parts: of inputs that are put together from what several columns return, `torch.cat([a(x), b(x)], -1)`, each
            divided by itself: how many equal ones, or their lengths.
    """
    return Row(parts)


def vocab(*, gather: bool = True) -> Vocab:
    """Divide the rows of an `nn.Embedding`, or of the `nn.Linear` of a head, over the ranks.

    Args:
        gather: of a head, whether every rank gets the logits of the whole vocabulary. With False it gets its own, for
            `fds.nn.vocab_cross_entropy`.
    """
    return Vocab(gather)


def heads(*counts: str, cross: bool = False) -> Heads:
    """Have attention work on this rank's heads: an `nn.MultiheadAttention`, or a module with linear layers of its own.

    Args:
        counts: attributes of such a module that are divided by the number of ranks: how many heads there are, and how
            wide all of them are together. Its projections have entries of their own in the plan. Dropout inside draws
            what one rank would draw.
        cross: whether keys and values are projections of a sequence of its own that is whole on every rank, also where
            queries are parts of sequences: a decoder's attention to what the encoder returned.
    """
    return Heads(counts, cross=cross)


def replicated(grads: str = "same", *, enters: bool = False) -> Whole:
    """Have all of a module's parameters on every rank.

    Args:
        grads: "sum" where the module works on a piece of an activation, such as a norm of each head: then every rank
            has a term of its gradient. "same" elsewhere.
        enters: whether what the module returns, or the first of what it returns, meets pieces and nothing else, such as
            a gate that is whole and multiplies what a column returns: then its gradient is summed over the ranks.
    """
    return Whole(grads, enters)


def sequence(enters: bool = True, leaves: bool = True) -> Sequence:
    """Have a block work on a part of the sequence, with `tensor_parallel(..., sequence=True)`.

    Args:
        enters: whether it is given the whole sequence, as its first argument, and takes its part.
        leaves: whether what it returns, or the first of what it returns, is put together. Of consecutive blocks of one
            list that a plan calls "sequence" the first enters and the last leaves.
    """
    return Sequence(enters, leaves)


NAMES: Mapping[str, Callable[[], Part]] = {
    "column": column, "row": row, "vocab": vocab, "heads": heads, "replicated": replicated, "sequence": sequence,
}  # fmt: skip


def part(value: Any, where: str) -> Part:
    """Return what a plan says for a pattern. Raises `ComposeError` for anything else than a name or a record."""
    if isinstance(value, Part):
        return value
    if isinstance(value, str) and value in NAMES:
        return NAMES[value]()
    raise ComposeError(
        "this is no part of a plan",
        where=f"tensor_parallel: plan[{where!r}]",
        got=repr(value)[:80],
        want=f"{', '.join(map(repr, NAMES))}, fds.nn.column(parts=3) or fds.nn.split(...)",
        hint=did_you_mean(value, list(NAMES)) if isinstance(value, str) else "",
    )


def consecutive(paths: list[str]) -> dict[str, Sequence]:
    """Return, of blocks that follow each other in one list, which one enters and which one leaves."""
    lists: dict[str, list[tuple[int, str]]] = {}
    for path in paths:
        parent, _, last = path.rpartition(".")
        if last.isdecimal():
            lists.setdefault(parent, []).append((int(last), path))
    ends: dict[str, Sequence] = {}
    for parent, blocks in lists.items():
        indices = {index for index, _ in blocks}
        ends |= {path: Sequence(index - 1 not in indices, index + 1 not in indices, parent) for index, path in blocks}
    return ends


def of_layer(module: nn.Module) -> Part | None:
    """Return what a module says of itself: the layers of `fds.nn`; None for any other."""
    if type(module) is ColumnLinear:
        return Column(module.parts, module.gather)
    if type(module) is RowLinear:
        return Row()
    if type(module) is SelfAttention:
        return Heads(("num_heads", "num_kv_heads"), counts_tokens=False)
    return Vocab() if type(module) is VocabEmbedding else None


def _check_parts(name: str, parts: Any) -> None:
    values = parts if is_a(parts, tuple) else (parts,)
    if not (values and all(is_int(n, 1) for n in values)):
        raise ComposeError(
            f"{name} takes how many parts there are, or their lengths",
            where="parts",
            got=repr(parts)[:80],
            want="an int >= 1, or a tuple of them",
        )


def _dim_of_outputs(module: nn.Module) -> int:
    """Return the dim of a linear layer's weight along which its outputs lie."""
    return 1 if _is_conv1d(module) else 0


def _check_linear(module: nn.Module, path: str, name: str) -> None:
    """Raise `ComposeError` for what is no linear layer."""
    if not (type(module) in (ColumnLinear, RowLinear) or is_product(module) or _is_conv1d(module)):
        raise _unfit(module, path, name, "an nn.Linear, what computes the same, or the Conv1D of transformers")


def _unfit(module: nn.Module, path: str, name: str, want: str) -> ComposeError:
    is_computed = parametrize.is_parametrized(module)  # its weight, from other parameters
    removed = "nn.utils.parametrize.remove_parametrizations before fds.functional, or " if is_computed else ""
    return ComposeError(
        f"this module cannot be divided as {name!r}",
        where=f"tensor_parallel: {path}",
        got=f"{type(module).__module__}.{type(module).__qualname__}",
        want=want,
        hint=f"{removed}no entry: then it is whole on every rank",
    )


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def _become(module: Any, kind: type[nn.Module]) -> None:
    """Change the class of a copy; what a class of the user's has beside `forward` stays.

    An embedding's own forward stays too: its `super().forward`, or its lack of one, is the lookup in pieces.
    """
    before = type(module)
    if before.__module__.startswith(("torch.", "fds.")) or _is_conv1d(module):
        module.__class__ = kind
    else:
        module.__class__ = type(before.__name__, (before, kind) if kind is VocabEmbedding else (kind, before), {})


def _join(module: Any, region: Region, *, run: str | None, gather: bool = False, cut: tuple[int, ...] = ()) -> None:
    module.region, module.run, module.gather, module.cut = region, run, gather, cut


def wrap(module: nn.Module, around: Callable[..., Any]) -> None:
    """Have a copy's forward run inside of another function."""
    module.forward = functools.partial(around, module.forward)


def _attend(
    region: Region,
    run: str | None,
    counts: tuple[int, ...],
    cross: bool,
    draws: bool,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if run is not None:
        args, kwargs = _of_first(functools.partial(region.enter, run=run), args, kwargs)
    with region.in_attention(tensors, counts, memory=cross, opened=run is not None):
        if not draws or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        with DrawsOfAll(region):
            return forward(*args, **kwargs)


def _in_parts(region: Region, block: Sequence, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if block.enters:
        args, kwargs = _of_first(functools.partial(region.cut, run=block.run), args, kwargs)
    before, region.run = region.run, block.run
    try:
        out = forward(*args, **kwargs)
    finally:
        region.run = before
    return first(functools.partial(region.join, run=block.run), out) if block.leaves else out


def _of_first(f: Callable[[Tensor], Tensor], args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return arguments with a function applied to the first one, as they were written."""
    if args:
        return (first(f, args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: first(f, kwargs[name])}


def first(f: Callable[[Tensor], Tensor], x: Any) -> Any:
    """Apply a function to a tensor, or to the first one of a tuple."""
    return f(x) if isinstance(x, Tensor) else type(x)([f(x[0]), *x[1:]])


def drops(module: nn.Module) -> bool:
    """Say whether a copy of attention may use dropout, by rates that it holds."""
    if not module.training:
        return False
    rates = [x for n, x in vars(module).items() if "drop" in n and isinstance(x, float)]
    return any(rates) or any(isinstance(m, nn.Dropout) and m.p for m in module.modules())
