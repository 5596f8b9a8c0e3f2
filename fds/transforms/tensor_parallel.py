"""Divide the matrices of modules over the ranks of an axis, which compute one loss together.

Fills:  topology, modules        State:  every rank its pieces of what the plan divides; names and whole shapes stay
Law:    13: an axis of any size is the axis of size 1 to derived rounding, dropout and initialisation included
Cost:   parameters and their states / N; per column and row B S H elements all-reduced in forward, and in backward; with
        `sequence` gathered and scattered instead, as many, and what is between blocks / N
Source: Shoeybi et al. 2019, arXiv:1909.08053; Korthikanti et al. 2022, arXiv:2205.05198
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from torch import Tensor, nn

from fds.collectives import Axis
from fds.errors import FLAG, ComposeError, LossError, Rule, count, did_you_mean, instance
from fds.loss import Found, Root, modules_of
from fds.nn.parallel import auto, plan as plans
from fds.nn.parallel.heads import become_dropout
from fds.nn.parallel.linear import Piece
from fds.nn.parallel.mistakes import Planned
from fds.nn.parallel.plan import Column, Heads, Part, Row, Sequence as Block, Vocab, Whole
from fds.nn.parallel.region import Region
from fds.nn.parallel.split import Split
from fds.nn.parallel.uses import Edges, Side, Use, check_uses
from fds.nn.parallel.watching import Calls, Known, watch
from fds.step import Dimension, Placement, Replicated, SplitDim, Step, fill, first_call_compared, transform


@attrs.frozen(eq=False, repr=False)
class Divided(Placement):
    """How parameters lie along a tensor axis, by their names; buffers lie whole, alike on every rank."""

    axis: Axis  # pyright: ignore[reportIncompatibleVariableOverride]  (never None)
    resolved: tuple[Resolved, ...]
    by_name: Mapping[str, SplitDim | Replicated]

    def lies(self, name: str) -> SplitDim | Replicated:
        """Say it by the name, or by the end of it where a loss passes a part of its parameters to the module."""
        while name not in self.by_name and "." in name:
            name = name.partition(".")[2]
        return self.by_name.get(name, _SAME)

    def __repr__(self) -> str:
        kinds = Counter(
            (re.sub(r"\d+", "*", f"{one.found.prefix}{path}"), str(part))
            for one in self.resolved
            for path, part in one.parts.items()
        )
        return "; ".join(f"{n} x {path}: {part}" if n > 1 else f"{path}: {part}" for (path, part), n in kinds.items())


_SAME = Replicated()


@attrs.frozen(eq=False, repr=False)
class Dividing:
    """The module map: copies of modules compute with pieces."""

    axis: Axis
    resolved: Mapping[int, Resolved]
    chunks: int
    pending: Edges = attrs.field(factory=Edges)  # of first calls, whose loss has not been checked

    @property
    def vocabularies(self) -> set[int]:
        """How many rows there are, padding included, of each matrix that is divided by rows: heads among them."""
        return {n for one in self.resolved.values() for n in one.rows}

    def __repr__(self) -> str:
        return f"pieces over {self.axis.name} ({self.axis.size} ranks)"

    def __call__(self, module: nn.Module, root: Root) -> None:
        """Convert a copy. Raises `LossError` for one of a module that the plan was not resolved for."""
        known = self.resolved.get(root.number)
        if known is None:
            raise LossError(
                "the loss runs a module that tensor_parallel could not see when it was composed",
                where=type(module).__name__,
                got="a module that the loss reaches in another way than it shows",
                want="loss_fn that holds apply in its closure, its defaults or as a global; or fds.Layers",
            )
        known.convert(module, Region(self.axis, self.chunks), self.pending)

    def check_graph(self, total: Tensor | None) -> None:
        """Raise `LossError` for a first loss that takes pieces for the whole, or whose gradients the plan mistakes.

        The next call is looked at again then. None drops what waits for a loss.
        """
        if not self.pending:
            return
        edges = dict(self.pending)
        self.pending.clear()
        try:
            check_uses(edges, total, "whole")
        except LossError:
            for known in (known for one in self.resolved.values() for known in one.known.values()):
                known.watched.clear()
            raise


@transform(
    axis=instance(Axis, ": {name} is not an axis", 'fds.mesh(tp=-1)["tp"]'),
    plan=Rule(
        lambda plan: plan == "auto" or isinstance(plan, Mapping),
        " takes a plan",
        '"auto", or a dict: pattern of paths of modules -> "column", "row", ...',
        where="plan",
    ),
    sequence=FLAG,
    overlap=count(": {name} counts pieces", 0),
    verify=FLAG,
)
def tensor_parallel(
    axis: Axis,
    plan: str | Mapping[str, str | Part] = "auto",
    *,
    sequence: bool = False,
    overlap: int = 0,
    verify: bool = False,
):
    """Divide the matrices of the loss's modules over an axis, whose ranks pass the same batch and compute one loss.

    The loss is made of modules by `fds.functional` or `fds.Layers`, which stay as they are: private copies compute with
    pieces. Names and whole shapes of parameters stay too, so that a save of any product of axes loads on any other.

    Args:
        axis: of `fds.mesh`; one of size 1 changes nothing.
        plan: `"auto"`, which knows `nn.MultiheadAttention`, `nn.TransformerEncoderLayer`, the layers of `fds.nn` and
            the families of transformers that `fds.nn.parallel.auto` lists, and refuses what it does not know. Or a
            dict: patterns of paths of modules (`*` crosses dots) -> `"column"`, `"row"`, `"vocab"`, `"heads"`,
            `"replicated"`, `"sequence"`, or what functions of these names in `fds.nn` return, or `fds.nn.split`; where
            several patterns match, the last counts. Parameters that it does not name are whole on every rank.
        sequence: cut activations between matrices along the sequence too (norms, dropout, residuals), in the blocks
            that the plan calls `"sequence"`. Sequences that the ranks do not divide are padded inside.
        overlap: into how many pieces the messages of rows, and of columns that share their input with no other, are cut
            to travel beside their products; 0 for one after the other. With 1 sums keep their bits, with more products
            of fewer rows may be summed in another order. In backward the message of a column travels beside the
            gradients of its weights.
        verify: compare the first call with one rank, which runs the undivided module: its loss and every gradient. The
            first call then takes some times as long, and every rank whole parameters; see
            `fds.debugging.compare_with_one_rank`, which does so at any time.

    Raises `ComposeError` for a plan that does not fit, `MeshError` for an axis of ranks that do not run now.
    """
    axis.check_current()
    own = axis.channel("tensor")

    def apply(step: Step) -> Step:
        found = modules_of(step.loss)
        if step.eval_loss is not step.loss:
            numbers = {one.number for one in found}
            found += [one for one in modules_of(step.eval_loss) if one.number not in numbers]
        if not found:
            raise ComposeError(
                "tensor_parallel finds no module in the loss",
                got=repr(step.loss)[:80],
                want="a loss that calls apply, of fds.functional(module), or fds.Layers",
                hint="apply must be in its closure, its defaults, or a global that it names",
            )
        resolved = tuple(resolve(found, plan, axis.size, sequence=sequence))
        if axis.size == 1:
            return step
        lies = dict(itertools.chain.from_iterable(one.lies.items() for one in resolved))
        placement = Divided(own, resolved, lies)
        modules = Dividing(own, {one.found.number: one for one in resolved}, overlap)
        step = fill(step, topology=Dimension(own, "tensor", placement), modules=modules)
        return first_call_compared(step) if verify else step

    return apply


Lies = SplitDim | Replicated


@attrs.frozen(eq=False)
class Resolved:
    """What a plan says of one module of a loss: of its submodules by path, and of its parameters by name."""

    found: Found
    parts: Mapping[str, Part]
    in_parts: Mapping[str, str]  # submodules that run where activations are parts of sequences: of which run of blocks
    lies: Mapping[str, Lies]  # by name in the tree of parameters
    before: tuple[int, ...] = ()  # of layers: the parts of the features that the layer before ends in pieces of
    after: tuple[int, ...] | None = None  # the same for this layer; None where nothing follows that might draw
    known: dict[bool, Known] = attrs.field(factory=lambda: {False: Known(), True: Known()})  # in training, or not

    @property
    def rows(self) -> set[int]:
        """How many rows there are of each matrix that is divided by rows."""
        return {sum(how.parts) for how in self.lies.values() if isinstance(how, SplitDim) and how.dim == 0}

    @property
    def side(self) -> Side | None:
        """What the module returns; None where its loss says it, or where parts of sequences may leave it."""
        if self.after is None or any(isinstance(part, Block) and not part.leaves for part in self.parts.values()):
            return None
        return "pieces" if self.after else "whole"

    def convert(self, module: nn.Module, region: Region, pending: Edges) -> None:
        """Have a copy of the module compute with pieces, in place; what its first call shows waits for the loss."""
        region.before = region.inside = self.before
        columns = Counter(path.rpartition(".")[0] for path, part in self.parts.items() if isinstance(part, Column))
        for path, one in submodules(module):
            part = self.parts.get(path)
            run = self.in_parts.get(path)
            if part is not None:
                part.convert(one, region, run=run)
                if isinstance(part, Column) and isinstance(one, Piece):
                    one.alone = columns[path.rpartition(".")[0]] == 1
            elif type(one) is nn.Dropout:
                become_dropout(one, region, run=run)
            if isinstance(one, nn.TransformerEncoderLayer):
                one.activation_relu_or_gelu = 0  # torch's fast path reads weights itself, and would take them for whole
        modules = dict(submodules(module))
        uses = list[Use]()
        for path, name in self.found.paths.items():
            owner, _, key = path.rpartition(".")
            lies = self.lies[self.found.prefix + name]
            how = lies.grads if isinstance(lies, Replicated) else "piece"
            held = modules[owner]._parameters  # pyright: ignore[reportPrivateUsage]
            by_hand = isinstance(self.parts.get(owner), Split)
            uses.append(Use(held, key, self.found.prefix + name, how, owner in self.in_parts, by_hand))
        counts = [
            (modules[path], key, _joined(self.found.prefix, f"{path}.{key}".lstrip(".")))
            for path, part in self.parts.items()
            if isinstance(part, Heads) and not isinstance(modules[path], nn.MultiheadAttention)
            for key in part.counts
        ]
        block = self.parts.get("")
        run = block.run if isinstance(block, Block) and not block.enters else None
        known = self.known[any(one.training for one in modules.values())]
        planned = Planned(self.found.module, module, self.found.prefix, self.parts, region)
        watch(module, Calls(region, known, uses, planned, counts, pending, run, self.after, self.side))


def resolve(found: Sequence[Found], plan: str | Mapping[Any, Any], size: int, *, sequence: bool) -> list[Resolved]:
    """Return what a plan says of each module of a loss.

    Raises `ComposeError` for patterns that match nothing, modules that cannot be divided so, and parameters of which
    two modules say something else.
    """
    names = {one.number: _names(one) for one in found}
    chosen = {one.number: _layers_of_ours(one) for one in found}
    if isinstance(plan, str):
        for one in found:
            known = auto.auto_plan(one.module)
            chosen[one.number] |= {p: part for p, part in known.items() if sequence or not isinstance(part, Block)}
        if not any(chosen.values()):
            raise auto.unknown([one.module for one in found])
    else:
        _match(plan, names, chosen, sequence=sequence)
        for one in found:
            _check_attention_of_ours(one, chosen[one.number])
    resolved = [_resolved(one, chosen[one.number], size, sequence=sequence) for one in found]
    _check_agreement(resolved)
    return _following(resolved)


def submodules(module: nn.Module, *, all_paths: bool = False) -> list[tuple[str, nn.Module]]:
    """Return the submodules of a module and their paths, itself included; each once, or once for each of its paths."""
    return list(module.named_modules(remove_duplicate=not all_paths))  # pyright: ignore[reportUnknownArgumentType]


def _names(found: Found) -> dict[str, list[str]]:
    """Return the paths of every submodule in the whole tree, by its first path in its own module."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for path, module in submodules(found.module, all_paths=True):
        own = first.setdefault(id(module), path)
        names.setdefault(own, []).append(_joined(found.prefix, path))
    return names


def _joined(prefix: str, path: str) -> str:
    return f"{prefix}{path}".rstrip(".")


def _layers_of_ours(found: Found) -> dict[str, Part]:
    every = ((path, plans.of_layer(module)) for path, module in submodules(found.module))
    return {path: part for path, part in every if part is not None}


def _check_attention_of_ours(found: Found, chosen: Mapping[str, Part]) -> None:
    for path, part in _layers_of_ours(found).items():
        divided = any(isinstance(chosen.get(f"{path}.{name}".lstrip(".")), Column | Row) for name in ("qkv", "out"))
        if isinstance(part, Heads) and divided and not isinstance(chosen.get(path), Heads):
            raise ComposeError(
                "a plan says something else of attention of fds.nn than that its heads are divided",
                where=f"tensor_parallel: {_joined(found.prefix, path)}",
                got=str(chosen.get(path)),
                want="nothing: the layers of fds.nn say themselves how they are divided",
                hint='"sequence" is for the module that holds it, "replicated" for all that it holds too',
            )


def _match(
    plan: Mapping[Any, Any],
    names: dict[int, dict[str, list[str]]],
    chosen: dict[int, dict[str, Part]],
    *,
    sequence: bool,
) -> None:
    """Give every submodule what the last pattern that matches it says."""
    every = [name for paths in names.values() for all_names in paths.values() for name in all_names]
    for pattern, value in plan.items():
        part, hits = plans.part(value, str(pattern)), list[tuple[int, str, str]]()
        for number, paths in names.items():
            for path, all_names in paths.items():
                hit = next((name for name in all_names if fnmatch.fnmatchcase(name, str(pattern))), None)
                if hit is not None:
                    hits.append((number, path, hit))
        if not hits:
            raise ComposeError(
                "tensor_parallel: a pattern matches no module",
                where="plan",
                got=repr(pattern)[:80],
                want="the path of a module, with * for any part of it",
                hint=did_you_mean(str(pattern), [name for name in every if name]),
            )
        if isinstance(part, Block) and not sequence:
            continue
        if isinstance(part, Block):  # what is in a block works on its parts
            paths = {hit for _, _, hit in hits}
            hits = [one for one in hits if paths.isdisjoint(_owners(one[2]))]
        blocks = plans.consecutive([hit for _, _, hit in hits]) if value == "sequence" else {}
        for number, path, hit in hits:
            chosen[number][path] = blocks.get(hit, part)


def _resolved(found: Found, parts: dict[str, Part], size: int, *, sequence: bool) -> Resolved:
    """Return what parts of a plan say of a module's parameters."""
    modules = dict(submodules(found.module))
    blocks = {path: part.run for path, part in parts.items() if isinstance(part, Block)}
    inside = {path: run for path in modules for block, run in blocks.items() if _is_inside(path, block)}
    lies: dict[str, Lies] = {}
    own = {name: found.prefix + name for name in found.paths.values()}
    for local in own:
        owner = local.rpartition(".")[0]
        lies[local] = Replicated("sum" if owner in inside else "same")
    said: dict[str, str] = {}
    for path, part in parts.items():
        where, module = _joined(found.prefix, path), modules[path]
        part.check(module, where, size)
        if isinstance(part, Whole):
            for name in (name for p, name in found.paths.items() if _is_inside(p, path)):
                lies[name] = Replicated("sum" if part.grads == "sum" or path in inside else "same")
        at = f"{path}." if path else ""
        for name, (dim, lengths) in part.dims(module, where).items():
            local = found.paths.get(at + name)
            if local is None:
                raise _computed(f"{found.prefix}{at}{name}", module)
            new = SplitDim(dim, lengths)
            if local in said and lies[local] != new:
                raise _tied(own[local], said[local], where)
            if min(lengths) < size:
                raise ComposeError(
                    "there are more ranks than there is to divide",
                    where=f"tensor_parallel: {own[local]}",
                    got=f"{min(lengths)} over {size} ranks",
                )
            lies[local], said[local] = new, where
        lies |= {found.paths[at + name]: Replicated("sum") for name in part.sums}
    for path, local in found.paths.items():  # every module that uses a piece must know that it is one
        owner = path.rpartition(".")[0]
        if isinstance(lies[local], SplitDim) and not _knows(parts, owner):
            raise _tied(own[local], said[local], _joined(found.prefix, owner))
    return Resolved(found, parts, inside, {own[local]: how for local, how in lies.items()})


def _following(resolved: list[Resolved]) -> list[Resolved]:
    """Return the same, where they are layers with what each one's `inside` is before and after it."""
    found, inside = list[Resolved](), ()
    layers = sum(bool(one.found.prefix) for one in resolved)
    for index, one in enumerate(resolved):
        if not one.found.prefix:
            found.append(one)
            continue
        own, before = one.parts.get(""), inside
        if isinstance(own, Column | Vocab) and not isinstance(one.found.module, nn.Embedding) and not own.gather:
            inside = own.dims(one.found.module, "")["weight"][1]
        elif one.parts and not isinstance(own, Whole):
            inside = ()
        found.append(attrs.evolve(one, before=before, after=inside if index + 1 < layers else None))
    return found


def _knows(parts: Mapping[str, Part], owner: str) -> bool:
    return owner in parts or isinstance(parts.get(owner.rpartition(".")[0]), Heads)


def _is_inside(path: str, block: str) -> bool:
    return path == block or path.startswith(f"{block}.") or not block


def _owners(path: str) -> list[str]:
    return [path[:end] for end, c in enumerate(path) if c == "."]


def _tied(name: str, first: str, second: str) -> ComposeError:
    return ComposeError(
        "two modules share a parameter, and a plan says one thing of one and another of the other",
        where=f"tensor_parallel: {name}",
        got=f"divided for {first!r}, not so for {second!r}",
        want="entries for both, of tied embedding and head 'vocab'",
    )


def _computed(name: str, module: nn.Module) -> ComposeError:
    return ComposeError(
        "a plan divides a tensor that is no parameter, but computed from others in every call",
        where=f"tensor_parallel: {name}",
        got=f"parameters {', '.join(key for key, _ in module.named_parameters(recurse=False))}",
        want="a module without weight_norm, spectral_norm or pruning",
        hint="nn.utils.remove_weight_norm, remove_spectral_norm or prune.remove before fds.functional\n"
        "or no entry: then it is whole on every rank",
    )


def _check_agreement(resolved: list[Resolved]) -> None:
    known: dict[str, Lies] = {}
    for name, how in _every(resolved):
        if known.setdefault(name, how) != how:
            raise ComposeError(
                "two modules of the loss have a parameter of the same name, and it lies differently",
                where=f"tensor_parallel: {name}",
                got=f"{known[name]} and {how}",
                want="one module, or fds.Layers",
            )


def _every(resolved: list[Resolved]) -> Iterator[tuple[str, Lies]]:
    for one in resolved:
        yield from one.lies.items()
