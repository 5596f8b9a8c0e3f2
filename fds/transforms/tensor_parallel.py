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
from fds.compression.scores import SUFFIXES
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
from fds.nn.parallel.watching import Calls, Observations, watch
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

    def holding(self, encodings: Sequence[Any]) -> Divided:
        """Return the same placement, which knows how long parts are that views encode."""

        def encoded(how: SplitDim | Replicated) -> SplitDim | Replicated:
            if not isinstance(how, SplitDim):
                return how
            each = (view.parts(how.parts, self.axis.size) for view in encodings if hasattr(view, "parts"))
            return attrs.evolve(how, encoded=tuple(parts for parts in each if parts))

        return attrs.evolve(self, by_name={name: encoded(how) for name, how in self.by_name.items()})

    def __repr__(self) -> str:
        kinds = Counter(
            (re.sub(r"\d+", "*", f"{resolution.loss_module.prefix}{path}"), str(part))
            for resolution in self.resolved
            for path, part in resolution.parts.items()
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
        return {n for resolution in self.resolved.values() for n in resolution.rows}

    def __repr__(self) -> str:
        return f"pieces over {self.axis.name} ({self.axis.size} ranks)"

    def __call__(self, module: nn.Module, root: Root) -> None:
        """Convert a copy. Raises `LossError` for one of a module that the plan was not resolved for."""
        resolution = self.resolved.get(root.number)
        if resolution is None:
            raise LossError(
                "the loss runs a module that tensor_parallel could not see when it was composed",
                where=type(module).__name__,
                got="a module that the loss reaches in another way than it shows",
                want="loss_fn that holds apply in its closure, its defaults or as a global; or fds.Layers",
            )
        resolution.convert(module, Region(self.axis, self.chunks), self.pending)

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
            for resolution in self.resolved.values():
                for observations in resolution.observations.values():
                    observations.watched.clear()
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
            several patterns match, the last counts. Parameters that it does not name are whole on every rank, but for
            the scores of divided weights (`fds.compression.with_scores`), which lie as these do.
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
    channel = axis.channel("tensor")

    def apply(step: Step) -> Step:
        loss_modules = modules_of(step.loss)
        if step.eval_loss is not step.loss:
            numbers = {loss_module.number for loss_module in loss_modules}
            loss_modules += [other for other in modules_of(step.eval_loss) if other.number not in numbers]
        if not loss_modules:
            raise ComposeError(
                "tensor_parallel finds no module in the loss",
                got=repr(step.loss)[:80],
                want="a loss that calls apply, of fds.functional(module), or fds.Layers",
                hint="apply must be in its closure, its defaults, or a global that it names",
            )
        resolved = tuple(resolve(loss_modules, plan, axis.size, sequence=sequence))
        if axis.size == 1:
            return step
        lies = dict(itertools.chain.from_iterable(resolution.lies.items() for resolution in resolved))
        lies |= {name: how for filler in step.added for name, how in filler.lie(lies).items()}
        placement = Divided(channel, resolved, lies)
        modules = Dividing(channel, {resolution.loss_module.number: resolution for resolution in resolved}, overlap)
        step = fill(step, topology=Dimension(channel, "tensor", placement), modules=modules)
        return first_call_compared(step) if verify else step

    return apply


Lies = SplitDim | Replicated


@attrs.frozen(eq=False)
class Resolved:
    """What a plan says of one module of a loss: of its submodules by path, and of its parameters by name."""

    loss_module: Found
    parts: Mapping[str, Part]
    in_parts: Mapping[str, str]  # submodules that run where activations are parts of sequences: of which run of blocks
    lies: Mapping[str, Lies]  # by name in the tree of parameters
    before: tuple[int, ...] = ()  # of layers: the parts of the features that the layer before ends in pieces of
    after: tuple[int, ...] | None = None  # the same for this layer; None where nothing follows that might draw
    # by whether it is in training
    observations: dict[bool, Observations] = attrs.field(factory=lambda: {False: Observations(), True: Observations()})

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
        for path, submodule in submodules(module):
            part = self.parts.get(path)
            run = self.in_parts.get(path)
            if part is not None:
                part.convert(submodule, region, run=run)
                if isinstance(part, Column) and isinstance(submodule, Piece):
                    submodule.alone = columns[path.rpartition(".")[0]] == 1
            elif type(submodule) is nn.Dropout:
                become_dropout(submodule, region, run=run)
            if isinstance(submodule, nn.TransformerEncoderLayer):
                # torch's fast path reads weights itself, and would take them for whole
                submodule.activation_relu_or_gelu = 0
        modules = dict(submodules(module))
        uses = list[Use]()
        for path, name in self.loss_module.paths.items():
            owner, _, key = path.rpartition(".")
            lies = self.lies[self.loss_module.prefix + name]
            how = lies.grads if isinstance(lies, Replicated) else "piece"
            params = modules[owner]._parameters  # pyright: ignore[reportPrivateUsage]
            by_hand = isinstance(self.parts.get(owner), Split)
            uses.append(Use(params, key, self.loss_module.prefix + name, how, owner in self.in_parts, by_hand))
        counts = [
            (modules[path], key, _joined(self.loss_module.prefix, f"{path}.{key}".lstrip(".")))
            for path, part in self.parts.items()
            if isinstance(part, Heads) and not isinstance(modules[path], nn.MultiheadAttention)
            for key in part.counts
        ]
        block = self.parts.get("")
        run = block.run if isinstance(block, Block) and not block.enters else None
        observations = self.observations[any(submodule.training for submodule in modules.values())]
        planned = Planned(self.loss_module.module, module, self.loss_module.prefix, self.parts, region)
        watch(module, Calls(region, observations, uses, planned, counts, pending, run, self.after, self.side))


def resolve(
    loss_modules: Sequence[Found], plan: str | Mapping[Any, Any], size: int, *, sequence: bool
) -> list[Resolved]:
    """Return what a plan says of each module of a loss.

    Raises `ComposeError` for patterns that match nothing, modules that cannot be divided so, and parameters of which
    two modules say something else.
    """
    names = {loss_module.number: _names(loss_module) for loss_module in loss_modules}
    chosen = {loss_module.number: _layers_of_ours(loss_module) for loss_module in loss_modules}
    if isinstance(plan, str):
        for loss_module in loss_modules:
            parts = auto.auto_plan(loss_module.module)
            chosen[loss_module.number] |= {
                p: part for p, part in parts.items() if sequence or not isinstance(part, Block)
            }
        if not any(chosen.values()):
            raise auto.unknown([loss_module.module for loss_module in loss_modules])
    else:
        _match(plan, names, chosen, sequence=sequence)
        for loss_module in loss_modules:
            _check_attention_of_ours(loss_module, chosen[loss_module.number])
    resolved = [
        _resolved(loss_module, chosen[loss_module.number], size, sequence=sequence) for loss_module in loss_modules
    ]
    _check_agreement(resolved)
    return _following(resolved)


def submodules(module: nn.Module, *, all_paths: bool = False) -> list[tuple[str, nn.Module]]:
    """Return the submodules of a module and their paths, itself included; each once, or once for each of its paths."""
    return list(module.named_modules(remove_duplicate=not all_paths))  # pyright: ignore[reportUnknownArgumentType]


def _names(loss_module: Found) -> dict[str, list[str]]:
    """Return the paths of every submodule in the whole tree, by its first path in its own module."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for path, module in submodules(loss_module.module, all_paths=True):
        first_path = first.setdefault(id(module), path)
        names.setdefault(first_path, []).append(_joined(loss_module.prefix, path))
    return names


def _joined(prefix: str, path: str) -> str:
    return f"{prefix}{path}".rstrip(".")


def _layers_of_ours(loss_module: Found) -> dict[str, Part]:
    parts = ((path, plans.of_layer(module)) for path, module in submodules(loss_module.module))
    return {path: part for path, part in parts if part is not None}


def _check_attention_of_ours(loss_module: Found, chosen: Mapping[str, Part]) -> None:
    for path, part in _layers_of_ours(loss_module).items():
        divided = any(isinstance(chosen.get(f"{path}.{name}".lstrip(".")), Column | Row) for name in ("qkv", "out"))
        if isinstance(part, Heads) and divided and not isinstance(chosen.get(path), Heads):
            raise ComposeError(
                "a plan says something else of attention of fds.nn than that its heads are divided",
                where=f"tensor_parallel: {_joined(loss_module.prefix, path)}",
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
    candidates = [name for paths in names.values() for all_names in paths.values() for name in all_names]
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
                hint=did_you_mean(str(pattern), [name for name in candidates if name]),
            )
        if isinstance(part, Block) and not sequence:
            continue
        if isinstance(part, Block):  # what is in a block works on its parts
            paths = {hit for _, _, hit in hits}
            hits = [(number, path, hit) for number, path, hit in hits if paths.isdisjoint(_owners(hit))]
        blocks = plans.consecutive([hit for _, _, hit in hits]) if value == "sequence" else {}
        for number, path, hit in hits:
            chosen[number][path] = blocks.get(hit, part)


def _resolved(loss_module: Found, parts: dict[str, Part], size: int, *, sequence: bool) -> Resolved:
    """Return what parts of a plan say of a module's parameters."""
    modules = dict(submodules(loss_module.module))
    blocks = {path: part.run for path, part in parts.items() if isinstance(part, Block)}
    inside = {path: run for path in modules for block, run in blocks.items() if _is_inside(path, block)}
    lies: dict[str, Lies] = {}
    full_names = {name: loss_module.prefix + name for name in loss_module.paths.values()}
    for local in full_names:
        owner = local.rpartition(".")[0]
        lies[local] = Replicated("sum" if owner in inside else "same")
    said: dict[str, str] = {}
    for path, part in parts.items():
        where, module = _joined(loss_module.prefix, path), modules[path]
        part.check(module, where, size)
        if isinstance(part, Whole):
            for name in (name for p, name in loss_module.paths.items() if _is_inside(p, path)):
                lies[name] = Replicated("sum" if part.grads == "sum" or path in inside else "same")
        at = f"{path}." if path else ""
        dims = part.dims(module, where)
        scores = {name + SUFFIXES["weights"]: how for name, how in dims.items()}  # of the same shapes
        dims |= {name: how for name, how in scores.items() if at + name in loss_module.paths}
        for name, (dim, lengths) in dims.items():
            local = loss_module.paths.get(at + name)
            if local is None:
                raise _computed(f"{loss_module.prefix}{at}{name}", module)
            new = SplitDim(dim, lengths)
            if local in said and lies[local] != new:
                raise _tied(full_names[local], said[local], where)
            if min(lengths) < size:
                raise ComposeError(
                    "there are more ranks than there is to divide",
                    where=f"tensor_parallel: {full_names[local]}",
                    got=f"{min(lengths)} over {size} ranks",
                )
            lies[local], said[local] = new, where
        lies |= {loss_module.paths[at + name]: Replicated("sum") for name in part.sums}
    for path, local in loss_module.paths.items():  # every module that uses a piece must know that it is one
        owner = path.rpartition(".")[0]
        if isinstance(lies[local], SplitDim) and not _knows(parts, owner):
            raise _tied(full_names[local], said[local], _joined(loss_module.prefix, owner))
    return Resolved(loss_module, parts, inside, {full_names[local]: how for local, how in lies.items()})


def _following(resolved: list[Resolved]) -> list[Resolved]:
    """Return the same, where they are layers with what each one's `inside` is before and after it."""
    out, inside = list[Resolved](), ()
    layers = sum(bool(resolution.loss_module.prefix) for resolution in resolved)
    for index, resolution in enumerate(resolved):
        if not resolution.loss_module.prefix:
            out.append(resolution)
            continue
        part, module, before = resolution.parts.get(""), resolution.loss_module.module, inside
        if isinstance(part, Column | Vocab) and not isinstance(module, nn.Embedding) and not part.gather:
            inside = part.dims(module, "")["weight"][1]
        elif resolution.parts and not isinstance(part, Whole):
            inside = ()
        out.append(attrs.evolve(resolution, before=before, after=inside if index + 1 < layers else None))
    return out


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
    seen: dict[str, Lies] = {}
    for name, how in _lies_by_name(resolved):
        if seen.setdefault(name, how) != how:
            raise ComposeError(
                "two modules of the loss have a parameter of the same name, and it lies differently",
                where=f"tensor_parallel: {name}",
                got=f"{seen[name]} and {how}",
                want="one module, or fds.Layers",
            )


def _lies_by_name(resolved: list[Resolved]) -> Iterator[tuple[str, Lies]]:
    for resolution in resolved:
        yield from resolution.lies.items()
