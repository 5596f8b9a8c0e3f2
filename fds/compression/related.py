"""What is related to a pruned weight: the weights that take its outputs, or give a head its inputs, by patterns."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from fds import loss as losses, tree
from fds.compression._shrink import places_of
from fds.errors import ComposeError, StateError, is_a

# of these a number that comes out depends on the one that goes in alone
ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid,
    nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Identity, nn.Dropout,
    nn.Dropout1d, nn.Dropout2d,
)  # fmt: skip
# by the convolution before: of these a channel that comes out depends on the one that goes in alone
CHANNELWISE: dict[type, tuple[type, ...]] = {
    nn.Conv1d: (nn.BatchNorm1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d),
    nn.Conv2d: (nn.BatchNorm2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
    nn.Conv3d: (),
}
FUNCTIONS = (torch.tanh, torch.relu, torch.sigmoid, F.relu, F.gelu, F.silu, F.elu, F.leaky_relu, F.tanh, F.sigmoid)


def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(map(re.escape, pattern.split("*"))))


def _filled(pattern: str, parts: Sequence[str]) -> str:
    pieces = pattern.split("*")
    return "".join(a + b for a, b in zip(pieces, (*parts, ""), strict=True)) if len(pieces) > 1 else pattern


@attrs.frozen
class Related:
    """Patterns of weights, with the patterns of what is related to each: `*` stands for the same text in both."""

    pairs: tuple[tuple[str, tuple[str, ...]], ...] = ()
    interleaved: bool = False  # of heads: queries, keys and values of one head lie together

    @classmethod
    def of(cls, patterns: Sequence[str], related: Any, where: str, *, interleaved: bool = False) -> Related:
        """Return it. Raises `ComposeError` for anything but patterns with as many `*` as those of the weights."""
        listed = [related] if is_a(related, str) else [*related] if is_a(related, tuple | list) else [None]
        texts = [text for text in (*patterns, *listed) if is_a(text, str) and text and not set(text) & {*"?["}]
        right = len(texts) == len(patterns) + len(listed) and len({text.count("*") for text in texts}) == 1
        if listed and not right:
            raise ComposeError(
                f"{where}: related takes patterns of names, with as many * as those of the weights",
                where="related",
                got=f"{patterns}, related={related!r}"[:120],
                want='say, "*.fc1.weight", related="*.fc2.weight"',
            )
        return cls(tuple((pattern, (*texts[len(patterns) :],)) for pattern in patterns) if listed else (), interleaved)

    def names_of(self, weight: str) -> list[str]:
        """Return the names of what is related to a weight."""
        for pattern, listed in self.pairs:
            if match := _regex(pattern).fullmatch(weight):
                return [_filled(text, match.groups()) for text in listed]
        return []

    def weight_of(self, name: str) -> str | None:
        """Return the name of the weight that a parameter is related to, None where there is none."""
        for pattern, listed in self.pairs:
            for text in listed:
                if match := _regex(text).fullmatch(name):
                    return _filled(pattern, match.groups())
        return None

    def check(
        self, weights: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], num_heads: int, where: str
    ) -> None:
        """Raise `StateError` for what is related and is not there, or has another shape than it must."""
        for weight, shape in weights.items():
            for name in self.names_of(weight):
                size = shapes.get(name)
                want = f"(rows, a multiple of {shape[0]}, ...), or ({shape[0]},) of a norm"
                if num_heads:
                    want = f"1, 2 or 3 times {shape[1]} rows, those of queries, keys and values of all heads"
                    fits = bool(size) and size[0] in (shape[1], 2 * shape[1], 3 * shape[1])
                else:
                    multiple = bool(size) and len(size) > 1 and shape[0] > 0 and size[1] % shape[0] == 0
                    fits = multiple or size == shape[:1]
                if not fits or self.weight_of(name) != weight:
                    raise StateError(
                        f"{where}: what is related to a weight does not fit it",
                        where=weight,
                        got=f"{name}: {size}",
                        want=want,
                        hint="" if size is not None else tree.named([n for n in shapes if len(shapes[n]) > 1]),
                    )


def following(loss: Any, weights: Sequence[str], where: str) -> Related:
    """Return what takes the outputs of weights next, in `fds.Layers` or an `nn.Sequential` that the loss runs.

    After a linear layer that is a linear layer, past activations and dropout. After a convolution it is one of as many
    dims, past pooling and batch norms, which are related too, or past `nn.Flatten()` a linear layer. Raises
    `ComposeError` for all else: of what dims go in, and so of what a norm takes for features, layers do not tell.
    """
    pairs: list[tuple[str, tuple[str, ...]]] = []
    chains, places = list(_chains(loss)), Counter[int]()
    for x in losses.modules_of(loss):
        places += places_of(x.module)
    for weight in weights:
        path, _, last = weight.rpartition(".")
        chain = next((chain for chain in chains if any(name == path for name, _ in chain)), [])
        related = _next(chain, path, places) if last == "weight" and chain else None
        if related is None:
            raise ComposeError(
                f"{where}: what takes the outputs of a weight cannot be told",
                where=weight,
                got='related="next"',
                want="related=... with its name, and those of norms between",
                hint="it is told in fds.Layers and nn.Sequential alone, past activations and dropout; of a convolution "
                "past batch norms and pooling too, and nn.Flatten() before a linear layer",
            )
        pairs.append((weight, related))
    return Related(tuple(pairs))


def _chains(loss: Any) -> Iterator[list[tuple[str, Any]]]:
    """Yield rows of layers of which each takes what the one before returns, with their paths."""
    if isinstance(loss, losses.Layers):
        row: list[tuple[str, Any]] = []
        for i, layer in enumerate(loss.layers):
            apply = loss.layer(i).apply
            row.append((loss.names[i], layer) if apply is None else (apply.prefix.removesuffix("."), apply.source))
        yield row
    for x in losses.modules_of(loss):
        for path, module in x.module.named_modules():
            if type(module) is nn.Sequential:
                inside = ".".join(filter(None, (x.prefix.removesuffix("."), path)))
                yield [(".".join(filter(None, (inside, name))), child) for name, child in module._modules.items()]


def _next(chain: Sequence[tuple[str, Any]], path: str, places: Counter[int]) -> tuple[str, ...] | None:
    """Return the names of what takes the outputs of a layer in a row of layers, None where it cannot be told."""
    paths = [name for name, _ in chain]
    source, *rest = chain[paths.index(path) :]
    kind, names = type(source[1]), list[str]()
    is_flat = kind is nn.Linear  # each feature has columns of its own in a linear layer
    if not is_flat and (kind not in CHANNELWISE or source[1].groups != 1):
        return None
    for name, layer in (source, *rest):
        parameters = [*layer.parameters()] if isinstance(layer, nn.Module) else []
        if parameters and (paths.count(name) > 1 or any(places[id(p)] > 1 for p in parameters)):
            return None  # it computes something else, too
        if layer is source[1]:
            continue
        if type(layer) is (nn.Linear if is_flat else kind) and getattr(layer, "groups", 1) == 1:
            return (f"{name}.weight", *names)
        if not is_flat and type(layer) in CHANNELWISE[kind]:
            if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
                if not layer.affine:
                    return None  # no name says that its statistics become fewer
                names.append(f"{name}.weight")
        elif not is_flat and type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            is_flat = True
        elif not (type(layer) in ELEMENTWISE or layer in FUNCTIONS):
            return None
    return None
