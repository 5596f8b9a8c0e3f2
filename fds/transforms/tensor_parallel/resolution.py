"""What a plan says of the modules of a loss: of each submodule its part, of each parameter how it lies."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from fds.compression.scores import SUFFIXES
from fds.errors import ComposeError, did_you_mean
from fds.loss import Found
from fds.nn.parallel import auto, plan as plans
from fds.nn.parallel.heads import become_dropout
from fds.nn.parallel.linear import Piece
from fds.nn.parallel.mistakes import Planned
from fds.nn.parallel.plan import Column, Heads, Part, Row, Sequence as Block, Vocab, Whole
from fds.nn.parallel.region import Region
from fds.nn.parallel.split import Split
from fds.nn.parallel.uses import Edges, Side, Use
from fds.nn.parallel.watching import Calls, Observations, watch
from fds.step import Replicated, SplitDim

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
