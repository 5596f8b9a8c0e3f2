"""Count what operators do while a step runs: a dispatch mode, which changes nothing of what they compute."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from fds.attention_layouts.layout import by_key
from fds.collectives.simulation import performing
from fds.profiling.modules import PHASES, Phase, Watching, tensors_of

Shape = Sequence[int]


def _attention(q: Shape, k: Shape, v: Shape, *, scores: int = 1, values: int = 1) -> int:
    return 2 * q[0] * q[1] * q[2] * k[2] * (scores * q[3] + values * v[3])


def _listed(q: Shape, v: Shape, blocks: int, block: int, *, scores: int = 1, values: int = 1) -> int:
    # `blocks` are those of all heads of a row of the batch
    return 2 * q[0] * blocks * block**2 * (scores * q[3] + values * v[3])


def _listed_blocks(q: Shape, chosen: Shape | None, layout: int, block: int, together: int, causal: bool) -> int:
    # of all heads of a row of the batch
    if chosen is not None:  # as many as may be chosen: numbers are not read
        return q[1] * -(-chosen[2] * together // block) * chosen[3]
    listed = by_key(layout).causal() if causal else by_key(layout)
    return listed.nonzeros * q[1] // listed.num_heads


def _conv_backward(
    grad: Shape, x: Shape, w: Shape, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, mask: Sequence[bool], *_: Any, **__: Any,
) -> int:  # fmt: skip
    # as many as forward for each of the gradients of x and w that is wanted: the pairs are the same
    return conv_flop_count(list(x), list(w), list(grad), transposed=transposed) * (mask[0] + mask[1])


_FORMULAS: dict[str, Callable[..., int]] = {
    # scores, and their product with v
    "aten._scaled_dot_product_flash_attention_for_cpu": lambda q, k, v, *_, **__: _attention(q, k, v),
    "fds.flash_attention": lambda q, k, v, *_, **__: _attention(q, k, v),
    # scores again; the gradients of v, of the probabilities, of q and of k
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (
        lambda dout, q, k, v, *_, **__: _attention(q, k, v, scores=3, values=2)
    ),
    # as above, where both of its kernels compute scores and the gradients of the probabilities
    "fds.flash_attention_backward": lambda dout, q, k, v, *_, **__: _attention(q, k, v, scores=4, values=3),
    # attention over listed blocks, as above: by its kernels, and by rows of gathered blocks, in whole blocks
    "fds.sparse_attention": (
        lambda q, k, v, kp, bias, by, seed, of, chosen, layout, block, together, causal, *_, **__: _listed(
            q, v, _listed_blocks(q, chosen, layout, block, together, causal), block
        )
    ),
    "fds.sparse_attention_backward": (
        lambda dout, q, k, v, kp, bias, by, seed, of, chosen, out, lse, layout, block, together, causal, *_, **__: (
            _listed(q, v, _listed_blocks(q, chosen, layout, block, together, causal), block, scores=4, values=3)
        )
    ),
    "fds.sparse_attention_rows": (
        lambda q, k, v, kp, bias, by, seed, of, chosen, layout, sizes, block, together, causal, *_, **__: _listed(
            q, v, _listed_blocks(q, chosen, layout, block, together, causal), block
        )
    ),
    "fds.sparse_attention_rows_backward": (
        lambda dout, q, k, v, kp, bias, by, seed, of, chosen, layout, sizes, block, together, causal, *_, **__: _listed(
            q, v, _listed_blocks(q, chosen, layout, block, together, causal), block, scores=3, values=2
        )
    ),
    # logits, and what is wanted of the gradients of hidden and of weight, which forward computes
    "fds.linear_cross_entropy": (
        lambda hidden, weight, targets, bias, wants, *_, **__: (
            2 * hidden[0] * hidden[1] * weight[0] * (1 + wants[0] + wants[1])
        )
    ),
    "aten.convolution_backward": _conv_backward,
}


@functools.cache
def formula(packet: Any) -> Callable[..., int] | None:
    """Return the formula of an operator, a function of its arguments and `out_val`; None where it has none."""
    ours = _FORMULAS.get(str(packet))
    counter = FlopCounterMode(display=False, custom_mapping={} if ours is None else {packet: ours})
    return counter.flop_registry.get(packet)


def by_name(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an operator by their names."""
    return dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs


def _count_unmasked(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return how many pairs of a query and a key an operator leaves, of how many, where it masks them causally."""
    arguments = by_name(func, args, kwargs)
    if not (arguments.get("is_causal") or arguments.get("causal")):
        return 1, 1
    queries, keys = (arguments[long if long in arguments else long[0]].shape[-2] for long in ("query", "key"))
    return sum(min(i + 1, keys) for i in range(queries)), queries * keys


_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
UNINITIALISED = frozenset(f"aten.{name}" for name in _EMPTY)  # what they return has anything in it
_MOVES_NOTHING = UNINITIALISED | {"aten._unsafe_view", "aten.lift_fresh"}


@attrs.define
class Work:
    """What operators did.

    Attributes:
        calls: how many operators ran.
        flops: floating-point operations of products of matrices, convolutions and attention, of which every pair of a
            query and a key counts.
        unmasked_flops: the same without pairs that a causal mask hides.
        elements: of the other operators, the elements of the largest argument or result of each, or of lists of them.
        num_bytes: what operators read and wrote: every tensor that is an argument or a result, once a call; views are
            free.
        seconds: the time in operators, each measured by itself; on a GPU between two events, so with what the host took
            to launch it.
    """

    calls: int = 0
    flops: int = 0
    unmasked_flops: int = 0
    elements: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def macs(self) -> int:
        """Multiplications with an addition each: half of the flops."""
        return self.flops // 2

    def add(self, other: Work) -> None:
        """Add what others did."""
        for field in attrs.fields(Work):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


@attrs.frozen
class Place:
    """Where an operator ran: in which module (empty: outside of all), in which phase of a step, and which it was."""

    module: str
    phase: Phase
    operator: str


class Counting(Watching):
    """Count every operator, by module, phase and name; see `counting`.

    Attributes:
        done: place -> what was done there.
        modules: those that ran.
    """

    def __init__(self) -> None:
        super().__init__()
        self.done: dict[Place, Work] = {}
        self.events: list[tuple[Work, Any, Any]] = []  # whose time is known when the device has come so far

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:

        kwargs = kwargs or {}
        if performing.get():
            return func(*args, **kwargs)
        if {*types} - {Tensor, Parameter}:  # such as a parameter gathered on use, which asks again with its values
            return NotImplemented
        packet = getattr(func, "_overloadpacket", None)
        if packet is None:  # an operator of higher order, such as cond, whose parts count
            return NotImplemented
        count = formula(packet)
        if count is None and func is not torch.ops.prim.device.default:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        work = self.done.setdefault(Place(*self.place(), str(packet)), Work())
        out = self._run_timed(work, func, args, kwargs)
        work.calls += 1
        if count is not None:
            flops = count(*args, **kwargs, out_val=out)
            left, pairs = _count_unmasked(func, args, kwargs)
            work.flops += flops
            work.unmasked_flops += flops * left // pairs
        if not func.is_view and str(packet) not in _MOVES_NOTHING:
            work.num_bytes += sum(x.nbytes for x in {id(x): x for x in tensors_of((args, kwargs, out))}.values())
            if count is None:  # of lists of tensors all elements
                values = (*args, *kwargs.values(), *(out if isinstance(out, tuple) else (out,)))
                work.elements += max((sum(x.numel() for x in tensors_of(value)) for value in values), default=0)
        return out

    def _run_timed(self, work: Work, func: Any, args: Any, kwargs: Any) -> Any:
        if torch.cuda.is_initialized() and any(x.is_cuda for x in tensors_of((args, kwargs))):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            out = func(*args, **kwargs)
            end.record()
            self.events.append((work, start, end))
            return out
        start = time.perf_counter()
        out = func(*args, **kwargs)
        work.seconds += time.perf_counter() - start
        return out


@contextlib.contextmanager
def counting() -> Iterator[Counting]:
    """Count what runs inside; times on a GPU are known afterwards."""
    counted = Counting()
    with counted.modules, counted:
        yield counted
    if counted.events:
        torch.cuda.synchronize()
    for work, start, end in counted.events:
        work.seconds += start.elapsed_time(end) / 1000


def add_inside(done: dict[Place, Work], names: list[str]) -> dict[str, dict[Phase, Work]]:
    """Return module -> phase -> what was done in it and in the modules inside of it; "" is everything."""
    total: dict[str, dict[Phase, Work]] = {name: {phase: Work() for phase in PHASES} for name in ["", *names]}
    for place, work in done.items():
        for name in names_above(place.module):
            if name in total:
                total[name][place.phase].add(work)
    return total


def names_above(name: str) -> list[str]:
    """Return the names of the modules around one, from that of all, "", to its own.

    >>> names_above("0.ffn")
    ['', '0', '0.ffn']
    """
    words = name.split(".") if name else []
    return [".".join(words[:n]) for n in range(len(words) + 1)]
