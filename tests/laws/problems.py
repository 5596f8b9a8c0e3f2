"""What the laws are held over: losses of every kind with their parameters and batches, optimizers, compositions.

A new kind of loss or a new transform is a row here, and then meets every law.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

import fds
from fds.loss import Buffered, modules_of
from fds.optim import Optimizer
from fds.step import transform
from fds.transforms.kernels import reference_kernels

ROWS = 12  # divides into 1, 2, 3, 4, 6 microbatches


@attrs.frozen
class Problem:
    """A loss, how to start it, and a batch of `ROWS` rows for it."""

    name: str
    loss: Any
    params: Any
    batch: Any
    draws: bool = False  # dropout is on
    coupled: bool = False  # rows of a microbatch see each other (batch norm)
    additions: int = 4096  # additions behind one gradient element, at most

    def _repr_pretty_(self, printer, cycle):
        printer.text(f"<{self.name}, draws={self.draws}, coupled={self.coupled}>")


class Block(nn.Module):
    """A user's own module: residual, normalised, with dropout where asked for."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


class Attention(nn.Module):
    """Torch's own attention with dropout, and an in-place activation inside."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, dropout=dropout, batch_first=True)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x):
        y = x.unsqueeze(1).expand(-1, 3, -1)
        return self.act(x + self.attention(y, y, y, need_weights=False)[0].mean(1))


class TiedNet(nn.Module):
    """Embedding and output share one weight."""

    def __init__(self, dropout: float):
        super().__init__()
        self.embed, self.block = nn.Embedding(7, 6), Block(6, dropout)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.block(self.embed(tokens)))


def regression(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 5, generator=g, dtype=dtype), torch.randn(ROWS, 3, generator=g, dtype=dtype)


def language(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 7, (ROWS, 4), generator=g)
    targets = torch.randint(0, 7, (ROWS, 4), generator=g)
    ignored = torch.rand(ROWS, 4, generator=g) < 0.3
    ignored[:, 0] = False
    return tokens, targets.masked_fill(ignored, -100)


def token_mean(logits, targets):
    """Return a token-weighted mean and metrics of both kinds."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    kept = (targets != -100).sum()
    hits = (logits.argmax(-1) == targets).sum()
    return fds.Mean(total, kept), {"accuracy": hits / kept, "tokens": kept}


def squared_error(outputs, targets):
    """Return `F.mse_loss`, which torch 2.11 cannot differentiate for 16-bit outputs and float32 targets."""
    return F.mse_loss(outputs.to(targets.dtype), targets)


def layers(seed: int, dtype: torch.dtype, dropout: float, norm: bool) -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first = fds.LayerSpec(nn.Linear, 5, 6, dtype=dtype)
        parts = [first, Block(6, dropout).to(dtype), nn.SiLU(inplace=True), torch.tanh, nn.Dropout(dropout)]
        if norm:
            parts.append(nn.BatchNorm1d(6, dtype=dtype))
        last = [Block(6, dropout).to(dtype), Attention(6, dropout).to(dtype), nn.Linear(6, 3, dtype=dtype)]
        loss = fds.Layers([*parts, *last], squared_error)
        return Problem("layers", loss, loss.init(fds.random.key(seed)), regression(seed, dtype), dropout > 0, norm)


def tied_layers(seed: int, dtype: torch.dtype, dropout: float, norm: bool) -> Problem:
    loss = fds.Layers(
        [
            fds.TiedLayerSpec("embed", nn.Embedding, 7, 6, dtype=dtype),
            nn.Dropout(dropout),
            fds.LayerSpec(nn.LayerNorm, 6, dtype=dtype),
            fds.TiedLayerSpec("embed", nn.Embedding, 7, 6, dtype=dtype, forward_fn=lambda m, x: F.linear(x, m.weight)),
        ],
        token_mean,
    )
    return Problem("tied_layers", loss, loss.init(fds.random.key(seed)), language(seed), dropout > 0)


def opaque(seed: int, dtype: torch.dtype, dropout: float, norm: bool) -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        parts = [nn.Linear(5, 6), nn.BatchNorm1d(6) if norm else nn.Tanh(), Block(6, dropout), nn.Linear(6, 3)]
        apply, params, buffers = fds.functional(nn.Sequential(*parts).to(dtype))
    x, y = regression(seed, dtype)

    def loss_fn(params, batch, buffers):
        out, new = apply.with_buffers(params, buffers, batch["x"])
        return F.mse_loss(out, batch["y"]), {"size": out.detach().abs().mean()}, new

    def plain_loss_fn(params, batch):
        return F.mse_loss(apply(params, batch["x"]), batch["y"])

    loss = fds.with_buffers(loss_fn, buffers) if norm else plain_loss_fn
    return Problem("opaque", loss, params, {"x": x, "y": y}, dropout > 0, norm)


def tied_module(seed: int, dtype: torch.dtype, dropout: float, norm: bool) -> Problem:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        apply, params, _ = fds.functional(TiedNet(dropout).to(dtype))

    def loss_fn(params, batch):
        return token_mean(apply(params, batch["tokens"]), batch["targets"])

    tokens, targets = language(seed)
    return Problem("tied_module", loss_fn, params, {"tokens": tokens, "targets": targets}, dropout > 0)


def raw(seed: int, dtype: torch.dtype, dropout: float, norm: bool) -> Problem:
    """No module: nested parameters, one unused, one integer, a leaf that is whole, a gradient that is a view."""
    g = torch.Generator().manual_seed(seed)
    params = {
        "w": [torch.randn(5, 3, generator=g, dtype=dtype), torch.randn(3, generator=g, dtype=dtype)],
        "scale": torch.ones((), dtype=dtype),
        "unused": torch.randn(2, 2, generator=g, dtype=dtype),
        "shift": torch.tensor([1, 2, 3]),
    }

    def loss_fn(params, batch):
        x, y, weights = batch
        out = F.dropout(x @ params["w"][0], dropout) * params["scale"] + (params["w"][1] + params["shift"])
        return (((out - y) ** 2) * weights).mean() + params["w"][1].sum() * 0.5

    x, y = regression(seed, dtype)
    return Problem("raw", loss_fn, params, [x, y, fds.whole(torch.rand(3, generator=g, dtype=dtype))], dropout > 0)


def records(seed: int, dtype: torch.dtype, dropout: float, norm: bool) -> Problem:
    """Layers that pass records along: several tensors, some of them without gradients, and a skip connection."""
    names = ["linear", "in_place", *(["batch_norm"] if norm else []), "shared", "dropout"]
    return stack(seed, dtype, names, ["block", "mix", "same"], dropout, language_model=True, tied=True)


KINDS: tuple[Callable[..., Problem], ...] = (layers, tied_layers, opaque, tied_module, raw, records)


@st.composite
def problems(draw, dtype=torch.float32, dropout: bool | None = None, norm: bool | None = None) -> Problem:
    """Draw a problem; `dropout` and `norm` pin whether there are dropout and batch norm."""
    p = draw(st.sampled_from([0.0, 0.3])) if dropout is None else 0.3 * dropout
    n = draw(st.booleans()) if norm is None else norm
    return draw(st.sampled_from(KINDS))(draw(st.integers(0, 2**16)), dtype, p, n)


def means(problem: Problem, change: Callable[[fds.Mean], fds.Mean]) -> Problem:
    """Return the problem with another `Mean` in the place of what its loss returns; a scalar is one of weight 1."""

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            return changed(value[0]), *value[1:]
        return change(value if isinstance(value, fds.Mean) else fds.Mean(value, 1))

    loss = problem.loss
    if isinstance(loss, fds.Layers):
        other: Any = fds.Layers(loss.layers, lambda out, targets: changed(loss.criterion(out, targets)))
    elif isinstance(loss, Buffered):
        other = fds.with_buffers(lambda *args: changed(loss.loss_fn(*args)), loss.buffers)
    else:
        other = lambda params, batch: changed(loss(params, batch))
    return attrs.evolve(problem, loss=other)


def _typed(cls: Callable[..., nn.Module], dtype: torch.dtype, *args: Any) -> nn.Module:
    return cls(*args).to(dtype)


class Inside(nn.Module):
    """A layer applied to the first part of a record, whose other parts are passed along."""

    def __init__(self, cls: Callable[..., nn.Module], *args: Any):
        super().__init__()
        self.module = cls(*args)

    def forward(self, record):
        return {**record, "x": self.module(record["x"])}


class Rows(nn.Module):
    """Batch norm over all dims but the last, and so over all rows of a microbatch."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(x.flatten(0, -2)).view_as(x)


def pack(x):
    """Return a record of `x`: a skip connection, truth values, integers, a float without gradients, no tensors."""
    known = x.detach()
    return {"x": x, "skip": x, "aux": (known > 0, known.argmax(-1)), "size": known.abs().mean(-1, True), "note": None}


def mix(record):
    """Use all parts of a record."""
    positive, largest = record["aux"]
    x = record["x"] + 0.5 * record["skip"] / (1 + record["size"])
    return {**record, "x": x.masked_fill(positive, 0.1) + 0.01 * largest.unsqueeze(-1).to(x.dtype)}


def unpack(record):
    return record["x"]


def same(x):
    return x


# name -> the layer at width 6, in this dtype, with this dropout
LAYERS: dict[str, Callable[[torch.dtype, float], Any]] = {
    "linear": lambda dtype, p: fds.LayerSpec(_typed, nn.Linear, dtype, 6, 6),
    "block": lambda dtype, p: fds.LayerSpec(_typed, Block, dtype, 6, p),
    "layer_norm": lambda dtype, p: fds.LayerSpec(_typed, nn.LayerNorm, dtype, 6),
    "batch_norm": lambda dtype, p: fds.LayerSpec(_typed, Rows, dtype, 6),
    "dropout": lambda dtype, p: nn.Dropout(p),
    "tanh": lambda dtype, p: torch.tanh,
    "same": lambda dtype, p: same,
    "identity": lambda dtype, p: nn.Identity(),
    "in_place": lambda dtype, p: nn.SiLU(inplace=True),
    "shared": lambda dtype, p: fds.TiedLayerSpec("shared", _typed, nn.Linear, dtype, 6, 6),
}
PACKED: dict[str, Callable[[torch.dtype, float], Any]] = {
    "linear": lambda dtype, p: fds.LayerSpec(_typed, Inside, dtype, nn.Linear, 6, 6),
    "block": lambda dtype, p: fds.LayerSpec(_typed, Inside, dtype, Block, 6, p),
    "mix": lambda dtype, p: mix,
    "same": lambda dtype, p: same,
}


def stack(
    seed: int,
    dtype: torch.dtype,
    names: list[str],
    packed: list[str],
    dropout: float,
    *,
    language_model: bool,
    tied: bool,
) -> Problem:
    """Return a loss of these layers at width 6, first plain ones, then those on records.

    A language model begins with an embedding, and ends with it if `tied`; a regression begins with a module, and
    ends with it if `tied`.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if language_model:
            head = lambda m, x: F.linear(x, m.weight)
            ends = [fds.TiedLayerSpec("embed", _typed, nn.Embedding, dtype, 7, 6)]
            ends += [fds.TiedLayerSpec("embed", _typed, nn.Embedding, dtype, 7, 6, forward_fn=head)]
            if not tied:
                ends[1] = fds.LayerSpec(_typed, nn.Linear, dtype, 6, 7)
        else:
            module = nn.Linear(6, 6, dtype=dtype)
            ends = [module, module if tied else nn.Linear(6, 6, dtype=dtype)]
        inner = [LAYERS[name](dtype, dropout) for name in names]
        if packed:
            inner += [pack, *(PACKED[name](dtype, dropout) for name in packed), unpack]
        loss = fds.Layers([ends[0], *inner, ends[1]], token_mean if language_model else squared_error)
        x, y = language(seed) if language_model else (torch.randn(ROWS, 6, dtype=dtype) for _ in range(2))
        coupled, ends_with = "batch_norm" in names, "tied" if tied else "own"
        name = f"{'language' if language_model else 'regression'}: {names}, {packed}, {ends_with} head, seed {seed}"
        return Problem(name, loss, loss.init(fds.random.key(seed)), (x, y), dropout > 0, coupled)


@st.composite
def stacks(draw, dtype=torch.float64, *, tied: bool | None = None, branching: bool = True) -> Problem:
    """Draw layers for a pipeline, at least two; `tied` pins whether layers share parameters.

    Without `branching` no activation has three gradients, whose sum depends on where the layers are cut apart.
    """
    shares = draw(st.booleans()) if tied is None else tied
    names = draw(st.lists(st.sampled_from([n for n in LAYERS if shares or n != "shared"]), max_size=6))
    # what a layer keeps for its backward, the next may not write over
    keeps = lambda name: name in ("tanh", "same", "identity", "dropout", "in_place")
    names = [name for at, name in enumerate(names) if name != "in_place" or at == 0 or not keeps(names[at - 1])]
    kinds = [name for name in PACKED if branching or name != "block"]
    packed = draw(st.one_of(st.just([]), st.lists(st.sampled_from(kinds), max_size=3)))
    p = draw(st.sampled_from([0.0, 0.3]))
    seed, language_model = draw(st.integers(0, 2**16)), draw(st.booleans())
    return stack(seed, dtype, names, packed, p, language_model=language_model, tied=shares and draw(st.booleans()))


def _schedule(t):
    return 0.01 / (t + 1)


OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "sgd": lambda: fds.sgd(0.1),
    "half_sgd": lambda: fds.sgd(0.5),
    "momentum": lambda: fds.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda: fds.adam(0.01),
    "adamw": lambda: fds.adamw(_schedule, weight_decay=0.1),
    "lamb": lambda: fds.lamb(0.01),
    "lion": lambda: fds.lion(0.01),
    "adagrad": lambda: fds.adagrad(0.1),
    "groups": lambda: fds.by_name({"*w*": fds.adamw(0.01), "*": fds.sgd(0.1)}),
}


def optimizers() -> st.SearchStrategy[Optimizer]:
    """Draw an optimizer."""
    return st.sampled_from(sorted(OPTIMIZERS)).map(lambda name: OPTIMIZERS[name]())


@functools.cache
def directory() -> tempfile.TemporaryDirectory[str]:
    """Return a directory of this process."""
    return tempfile.TemporaryDirectory(prefix="fds-laws-")


def _on_disk() -> Any:
    disk = fds.disk(directory().name, buffer_bytes=4096)
    return fds.offload(disk, disk, averages=disk)


@transform
def on_linears(make: Callable[[list[str]], Any]):
    """Do what `make(names)` does for the linear layers of a loss that call their forward; nothing where it has none."""

    def apply(step: fds.Step) -> fds.Step:
        never = nn.modules.linear.NonDynamicallyQuantizableLinear
        names = [
            f"{found.prefix}{path}".rstrip(".")
            for found in modules_of(step.loss)
            for path, part in found.module.named_modules()
            if isinstance(part, nn.Linear) and not isinstance(part, never)
        ]
        return make(sorted(set(names))).apply(step) if names else step

    return apply


@attrs.frozen
class Part:
    """A transform that compositions may hold: its tuple station, inside which order matters, and whom it excludes."""

    make: Callable[[], Any]
    station: str = ""
    excludes: str = ""  # of the parts that bear the same word, one may stand


TRANSFORMS: dict[str, Part] = {
    "accumulate": Part(lambda: fds.accumulate(3)),
    "checkpoint": Part(lambda: fds.checkpoint_activations(), excludes="checkpoint"),
    "checkpoint_pairs": Part(lambda: fds.checkpoint_activations(every=2, store="host"), excludes="checkpoint"),
    "loss_scale": Part(lambda: fds.loss_scale(2.0**10), excludes="commit"),
    "static_loss_scale": Part(lambda: fds.static_loss_scale(2.0**5), excludes="commit"),
    "skip_nonfinite": Part(lambda: fds.skip_nonfinite(), excludes="commit"),
    "clip_norm": Part(lambda: fds.clip_by_global_norm(0.5), "condition"),
    "clip_value": Part(lambda: fds.clip_by_value(0.1), "condition"),
    "ema": Part(lambda: fds.ema(0.9), "after"),
    "slow_ema": Part(lambda: fds.ema(0.99, name="slow"), "after"),
    "precision": Part(lambda: fds.precision(torch.bfloat16), excludes="precision"),
    "half": Part(lambda: fds.precision(torch.float16), excludes="precision"),
    "rounded": Part(
        lambda: on_linears(lambda names: fds.quantize_activations(names, bits=6, range="static")), excludes="products"
    ),
    "eight_bits": Part(lambda: on_linears(lambda names: fds.float8(names, "rowwise")), excludes="products"),
    "references": Part(lambda: reference_kernels()),
    "prune_weights": Part(lambda: fds.prune_weights("*", density=0.5, offset=1), "view"),
    "autocast": Part(lambda: fds.autocast(torch.bfloat16), "context", "precision"),
    "quantized": Part(lambda: fds.quantize_weights("*", bits=(8, 6), mixing=0.25), "view", "weights"),
    "stochastic": Part(lambda: fds.quantize_weights("*", bits=6, rounding="stochastic"), "view", "weights"),
    "offload": Part(lambda: fds.offload("host", "host", averages="host", ratio=0.7), excludes="place"),
    "offload_to_disk": Part(_on_disk, excludes="place"),
}


def compositions(*, without: tuple[str, ...] = ()) -> st.SearchStrategy[list[str]]:
    """Draw names of transforms that may stand together, in any order."""
    names = sorted(TRANSFORMS.keys() - set(without))
    return st.lists(st.sampled_from(names), unique_by=lambda n: TRANSFORMS[n].excludes or n, max_size=5)


def make(names: list[str], optimizer: Any, problem: Problem, *more: Any) -> fds.Step:
    """Compose the named transforms and an optimizer over a problem's loss."""
    return fds.compose(*(TRANSFORMS[n].make() for n in names), *more, optimizer)(problem.loss)
