"""Law 13: a tensor axis of any size is the axis of size 1, dropout and initialisation included, in every product."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings, strategies as st
from torch import nn

import fds
from fds import plans, tree
from tests import ranks

DTYPE, CALLS, ROWS, TOKENS, WIDTH = torch.float64, 2, 4, 11, 8
EPS, LR = 1e-2, 1e-2
# An element of a gradient is a sum of at most 2**12 rounded products of size 1 (tokens x widths x layers); optimizers
# divide by sqrt(v) + EPS, so a parameter moves by at most LR / EPS of that error in a call, which then comes back.
ROUNDING = torch.finfo(DTYPE).eps * 2**12 * LR / EPS * sum(2.0**i for i in range(CALLS + 1))


class Attention(nn.Module):
    """Attention of fused projections with a norm of each head, and dropout on weights."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width // heads)
        self.heads, self.width, self.dropout = heads, width, dropout

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).split(self.width, -1))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(self.norm(q), k, v, is_causal=True, dropout_p=p)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of a transformer, with dropout on all that is divided, and on what is not."""

    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4, dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.inner, self.outer = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.outer(self.attention(self.first(x)))
        return x + self.outer(self.down(self.inner(F.gelu(self.up(self.second(x))))))


class Embedding(nn.Module):
    """Rows of tokens and of positions."""

    def __init__(self, dropout: float):
        super().__init__()
        self.tokens, self.places, self.drop = nn.Embedding(TOKENS, WIDTH), nn.Embedding(16, WIDTH), nn.Dropout(dropout)

    def forward(self, ids):
        return self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))


def made(cls: type[nn.Module], *args: Any) -> nn.Module:
    return cls(*args).to(DTYPE)


def criterion(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model(dropout: float) -> fds.Layers:
    """Return a language model of layers whose embedding and head are one matrix."""
    parts = [
        fds.TiedLayerSpec("ends", made, Embedding, dropout),
        *(fds.LayerSpec(made, Block, WIDTH, dropout) for _ in range(2)),
        fds.LayerSpec(made, nn.LayerNorm, WIDTH),
        fds.TiedLayerSpec("ends", made, Embedding, dropout, forward_fn=lambda m, x: F.linear(x, m.tokens.weight)),
    ]
    return fds.Layers(parts, criterion)


PLAN = {
    "*.attention": fds.nn.heads("heads", "width"),
    "*.qkv": fds.nn.column(parts=3),
    "*.attention.norm": fds.nn.replicated(grads="sum"),
    "*.attention.out": "row",
    "*.up": "column",
    "*.down": "row",
    "[12]": "sequence",
}


@attrs.frozen
class Place:
    """How many ranks an axis of each role has, and what is composed beside them."""

    tensor: int = 1
    data: int = 1
    stages: int = 1
    copies: int = 1
    zero: int = 0
    sequence: bool = False
    microbatches: int = 4
    parts: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return self.tensor * self.data * self.stages * self.copies


PARTS = {
    "checkpoint": lambda: fds.checkpoint_activations(),
    "checkpoint_pairs": lambda: fds.checkpoint_activations(every=2, store="host"),
    "loss_scale": lambda: fds.loss_scale(2.0**8),
    "skip_nonfinite": lambda: fds.skip_nonfinite(),
    "clip": lambda: fds.clip_by_global_norm(0.5),
    "clip_value": lambda: fds.clip_by_value(0.1),
    "ema": lambda: fds.ema(0.9),
    "donate": lambda: fds.donate(),
    "offload": lambda: fds.offload("host", "host", ratio=0.7),
}
OPTIMIZERS = {
    "adamw": lambda: fds.adamw(LR, eps=EPS),
    "lamb": lambda: fds.lamb(LR, eps=EPS),
    "by_name": lambda: fds.by_name({"*.weight": fds.adamw(LR, eps=EPS), "*": fds.sgd(LR)}),
}
EXCLUDES = {"checkpoint_pairs": "checkpoint", "skip_nonfinite": "loss_scale"}


def trained(place: Place, optimizer: str, dropout: float, length: int) -> dict[str, Any]:
    """Return what a rank computes: metrics of every call, an evaluation, and whole parameters; share the rows."""
    mesh = fds.mesh(copies=place.copies, pp=place.stages, dp=place.data, tp=place.tensor)
    shares = place.data * place.copies
    microbatches = max(place.microbatches // shares, 1)
    split: Any = fds.accumulate(microbatches)
    if place.stages > 1:
        split = fds.pipeline(plans.one_f_one_b, mesh["pp"], num_microbatches=microbatches)
    copies = mesh["copies"] if place.copies > 1 else None
    shard = fds.shard_optimizer(mesh["dp"], stage=place.zero, bucket_bytes=300, replicate=copies)
    tp = fds.tensor_parallel(mesh["tp"], PLAN, sequence=place.sequence)
    step = fds.compose(split, shard, tp, *(PARTS[x]() for x in place.parts), OPTIMIZERS[optimizer]())(model(dropout))
    state, found = step.init(model(dropout).init, key=7), {}
    found["initial"] = step.params(state)
    for call in range(CALLS):
        g = torch.Generator("cpu").manual_seed(call)
        ids = torch.randint(0, TOKENS, (ROWS, length + 1), generator=g, device="cpu")
        ids = ids.chunk(shares)[step.dimensions.share_of_batch[0]]
        state, found[f"call {call}"] = step(state, (ids[:, :-1], ids[:, 1:]))
    found["evaluated"] = step.evaluate(state, (ids[:, :-1], ids[:, 1:]))
    found["params"] = step.params(state)
    return tree.paths(found)


@functools.cache
def plain(optimizer: str, dropout: float, length: int, parts: tuple[str, ...]) -> dict[str, Any]:
    """Return what one rank computes."""
    return trained(Place(parts=parts), optimizer, dropout, length)


def check(found: list[dict[str, Any]], want: dict[str, Any]) -> None:
    for one in found:
        assert one.keys() == want.keys()
        for name, x in want.items():
            near = 0 if "initial" in name or not x.is_floating_point() else ROUNDING
            if not (torch.equal(one[name], x) or torch.allclose(one[name], x, rtol=near, atol=near)):
                raise AssertionError(f"{name}: {one[name]} and {x}")


def test_four_real_ranks_are_one_rank():
    place = Place(2, 2, zero=3, sequence=True, parts=("checkpoint",))
    found = ranks.run(trained, place, "adamw", 0.3, 7, world_size=4)
    check(found, plain("adamw", 0.3, 7, place.parts))


@st.composite
def places(draw) -> Place:
    """Draw a product of axes, at most 16 ranks, whose data ranks share four microbatches."""
    shapes = [
        (2, 1, 1, 1),
        (4, 1, 1, 1),
        (2, 2, 1, 1),
        (2, 1, 2, 1),
        (2, 2, 2, 1),
        (2, 2, 1, 2),
        (4, 2, 2, 1),
        (2, 2, 2, 2),
    ]
    tensor, data, stages, copies = draw(st.sampled_from(shapes))
    names = draw(st.lists(st.sampled_from(sorted(PARTS)), unique_by=lambda x: EXCLUDES.get(x, x), max_size=4))
    zero = draw(st.integers(0, 3)) if data * copies > 1 or draw(st.booleans()) else 0
    return Place(tensor, data, stages, copies, zero, draw(st.booleans()), parts=tuple(sorted(names)))


@settings(max_examples=max(settings().max_examples // 2, 1))
@example(Place(4, 2, 1, 2, 3, True, parts=("clip", "ema")), "lamb", 0.3, 8)
@example(Place(2, 2, 2, 2, 1, True, parts=("checkpoint", "loss_scale")), "adamw", 0.3, 6)
@given(places(), st.sampled_from(sorted(OPTIMIZERS)), st.sampled_from([0.0, 0.3]), st.sampled_from([7, 8]))
def test_a_tensor_axis_of_any_size_is_one_rank(place, optimizer, dropout, length):
    if place.sequence and place.stages > 1:
        length = 8  # padded sequences do not pass through a pipeline
    found = fds.simulate(lambda: trained(place, optimizer, dropout, length), place.ranks)
    check(found, plain(optimizer, dropout, length, place.parts))


def test_axes_of_one_rank_are_no_axes():
    """Five axes of one rank compute the same bits; and those of no pipeline, which runs its schedule, the same way."""

    def run(*, axes: bool, staged: bool = False) -> tuple[dict[str, Any], int]:
        mesh = fds.mesh(copies=1, pp=1, dp=1, sp=1, tp=1)
        more = [fds.tensor_parallel(mesh["tp"], PLAN, sequence=True), fds.context_parallel(mesh["sp"])] if axes else []
        split = fds.pipeline(plans.one_f_one_b, mesh["pp"], num_microbatches=4) if staged else fds.accumulate(4)
        shard = fds.shard_optimizer(mesh["dp"], stage=3, replicate=mesh["copies"] if axes else None)
        step = fds.compose(split, shard, *more, fds.ema(0.9), OPTIMIZERS["lamb"]())(model(0.3))
        g = torch.Generator("cpu").manual_seed(0)
        ids = torch.randint(0, TOKENS, (ROWS, 8), generator=g, device="cpu")
        batch, state = (ids[:, :-1], ids[:, 1:]), step.init(model(0.3).init, key=7)
        for _ in range(2):
            state, metrics = step(state, batch)
        found = tree.paths({"params": step.params(state), "metrics": metrics, "ema": state.slots["ema"]})
        return found, counted_calls(lambda: step(state, batch))

    want, calls = run(axes=False)
    for staged in (False, True):
        found, calls_with_axes = run(axes=True, staged=staged)
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], x) for name, x in want.items())
        assert staged or calls_with_axes == calls


def counted_calls(work: Callable[[], Any]) -> int:
    """Return how many functions of fds a call calls."""
    calls = 0

    def note(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_globals.get("__name__", "").startswith("fds.")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls
