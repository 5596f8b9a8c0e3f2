"""Measuring: what each layer of a loss takes, as a value that partitions and simulations can be made from."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import operator
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.errors import PlanError, is_number
from fds.plans.costs import Costs


def _per_layer(_self: Any, field: attrs.Attribute, values: tuple) -> None:
    for i, value in enumerate(values):
        if not is_number(value) or not 0 <= value < math.inf:
            raise PlanError("a cost is not negative, and finite", where=f"{field.name}[{i}]", got=repr(value))


def _numbers() -> Any:
    return attrs.field(converter=tuple, validator=_per_layer)


@attrs.frozen
class LayerCosts:
    """What every layer takes for one microbatch; the criterion belongs to the last.

    >>> costs = LayerCosts([1, 2, 4], [0, 2, 4], [1, 1, 3], [8, 8, 8], [4, 4, 4])
    >>> costs.by_stage([0, 1, 3]).forward, costs.seconds
    ((1.0, 6.0), (2, 5, 11))
    """

    forward: tuple[float, ...] = _numbers()  # seconds
    backward_input: tuple[float, ...] = _numbers()  # seconds; 0 where the input needs no gradient
    backward_weight: tuple[float, ...] = _numbers()  # seconds, beyond those of the input's gradient
    activation_bytes: tuple[float, ...] = _numbers()  # held from forward to backward, parameters left out
    message_bytes: tuple[float, ...] = _numbers()  # of the layer's output

    def __attrs_post_init__(self) -> None:
        lengths = {field.name: len(getattr(self, field.name)) for field in attrs.fields(LayerCosts)}
        if len(set(lengths.values())) > 1:
            raise PlanError("the costs are of different numbers of layers", got=str(lengths),
                            want="one number per layer")  # fmt: skip

    def __len__(self) -> int:
        return len(self.forward)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Forward and backward of every layer."""
        return tuple(map(sum, zip(self.forward, self.backward_input, self.backward_weight, strict=True)))

    def by_stage(self, boundaries: Sequence[int]) -> Costs:
        """Return the costs of the stages that hold the layers between neighbouring boundaries.

        What two neighbouring layers both hold (the one its output, the other its input) counts for each.
        Raises `PlanError`.
        """
        cuts = [operator.index(b) for b in boundaries]
        if cuts[:1] != [0] or cuts[-1] != len(self) or any(a >= b for a, b in itertools.pairwise(cuts)):
            raise PlanError("these are no boundaries of these layers", got=repr(boundaries),
                            want=f"growing numbers from 0 to {len(self)}")  # fmt: skip
        total = lambda values: tuple(math.fsum(values[a:b]) for a, b in itertools.pairwise(cuts))
        return Costs(
            forward=total(self.forward),
            backward_input=total(self.backward_input),
            backward_weight=total(self.backward_weight),
            activation_bytes=total(self.activation_bytes),
            message_bytes=tuple(self.message_bytes[b - 1] for b in cuts[1:]),
        )

    def to_json(self) -> str:
        """Return a text that `from_json` reads back to an equal value."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LayerCosts:
        """Return the value that `to_json` wrote. Raises `PlanError`."""
        names = {field.name for field in attrs.fields(cls)}
        try:
            read = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError("this is no JSON", got=repr(text)[:80], hint=str(error)) from None
        if not isinstance(read, dict) or read.keys() != names or not all(isinstance(v, list) for v in read.values()):
            raise PlanError("these are no layer costs", got=repr(text)[:80], want="lists " + ", ".join(sorted(names)))
        return cls(**read)


def measure(
    layers: Any, batch: Any, *, params: Mapping[str, Tensor] | None = None, axis: Any = None, repeats: int = 5
) -> LayerCosts:
    """Return what each layer of an `fds.Layers` loss takes for one microbatch, on the device of its tensors.

    Layer by layer it times the forward, the backward to the input alone, and the backward to input and parameters:
    medians of `repeats`, after one run that does not count. Neither parameters nor generators are changed.

    Args:
        layers: the loss.
        batch: one microbatch, `(inputs, targets)`.
        params: those of the loss; without them, initial ones are made where the batch is.
        axis: where given, its first rank measures and all return the same value: a collective.
        repeats: how often.

    Raises `PlanError`, and what a layer raises, with a note that names it; the ranks of an axis raise together.
    """
    if axis is None:
        return _measure(layers, batch, params, repeats)
    answer, failure = None, None
    if axis.index == 0:
        try:
            answer = {"costs": _measure(layers, batch, params, repeats).to_json()}
        except Exception as error:  # the others wait in the exchange: it tells them before it is raised here
            failure = error
            answer = {"error": "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])}
    first = axis.exchange(answer, "measure")[0]
    if failure is not None:
        raise failure
    if "error" in first:
        raise PlanError("the layers could not be measured", where="the first rank of the axis", got=first["error"])
    return LayerCosts.from_json(first["costs"])


def _measure(layers: Any, batch: Any, params: Mapping[str, Tensor] | None, repeats: int) -> LayerCosts:
    if repeats < 1:
        raise PlanError("nothing would be measured", where="repeats", got=str(repeats), want="1 or more")
    if not len(layers):
        raise PlanError("there is no layer to measure", where="layers")
    x, targets = layers.split(batch)
    device = next((t.device for t in _tensors((x, targets, params))), torch.device("cpu"))
    buffers, rows = layers.buffers(), []
    with _undisturbed(device):
        if params is None:
            params = {name: p.to(device) for name, p in layers.init(torch.zeros(2, dtype=torch.int64)).items()}
        layers.check(params)
        known, targets = _map(lambda t: t.clone() if t.is_inference() else t, (params, targets))
        for i in range(len(layers)):
            criterion = (lambda out: layers.compare(out, targets)) if i == len(layers) - 1 else None
            try:
                layer = _Bound.of(layers.layer(i), known, buffers, criterion)
                out, new, kept_bytes = layer.watch(x)
                if not _tensors(out):
                    raise PlanError("a layer returns no tensor that can be seen", got=type(out).__name__,
                                    want="tensors, or tuples, lists and dicts of them")  # fmt: skip
                rows.append((*layer.seconds(x, device, repeats), kept_bytes, sum(map(_bytes, _tensors(out)))))
            except Exception as error:
                error.add_note(f"while layers[{i}] was measured")
                raise
            x, buffers = _map(lambda t: t.detach().requires_grad_(t.requires_grad), out), {**buffers, **new}
    return LayerCosts(*zip(*rows, strict=True))


@attrs.frozen(eq=False)
class _Bound:
    """One layer with all that it takes but its input."""

    layer: Callable
    params: dict[str, Tensor]  # its own: leaves, those that it trains requiring gradients
    buffers: Mapping[str, Tensor]
    criterion: Callable | None  # of the last layer

    @classmethod
    def of(cls, layer: Any, params: Mapping[str, Tensor], buffers: Mapping, criterion: Callable | None) -> _Bound:
        """Take the layer's own of `params`; a module refuses gradients for what it froze, so that asks for none."""
        frozen = getattr(layer.apply, "frozen", ())
        trains = lambda name, local: params[name].is_floating_point() and local not in frozen
        own = {name: params[name].detach().requires_grad_(trains(name, local)) for name, local in layer.params.items()}
        return cls(layer, own, buffers, criterion)

    def watch(self, x: Any) -> tuple[Any, dict[str, Tensor], int]:
        """Return the layer's output, its new buffers, and the bytes that it keeps for backward."""
        kept: dict[int, int] = {}  # by address: what is saved twice is held once

        def see(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        _, argument = _fresh(x)
        with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
            out, new = self.layer(self.params, self.buffers, argument)
            if self.criterion is not None:
                self.criterion(out)
        ours = {p.untyped_storage().data_ptr() for p in self.params.values()}
        return out, new, sum(size for address, size in kept.items() if address not in ours)

    def seconds(self, x: Any, device: torch.device, repeats: int) -> tuple[float, float, float]:
        """Return the seconds of the forward, of the backward to the input, and of what the parameters add to it."""
        params = [p for p in self.params.values() if p.requires_grad]
        alone, both = [], []
        for _ in range(1 + repeats):
            alone.append(self._once(x, [], device))
            both.append(self._once(x, params, device))
        forward = statistics.median(f for f, _ in alone[1:] + both[1:])
        to_input, to_both = (statistics.median(b for _, b in runs[1:]) for runs in (alone, both))
        return forward, to_input, max(0.0, to_both - to_input) if params else 0.0

    def _once(self, x: Any, params: list[Tensor], device: torch.device) -> tuple[float, float]:
        needed, argument = _fresh(x)
        begin = _now(device)
        out, _ = self.layer(self.params, self.buffers, argument)
        value = out if self.criterion is None else _total(self.criterion(out))
        forward = _now(device) - begin
        results = [t for t in _tensors(value) if t.requires_grad]
        ones = [torch.ones_like(t) for t in results]
        if not results or not needed + params:
            return forward, 0.0
        begin = _now(device)
        torch.autograd.grad(results, needed + params, ones, allow_unused=True)
        return forward, _now(device) - begin


def _total(value: Any) -> Any:
    """Return what is differentiated of what a criterion returns: a scalar or a `Mean`, alone or before metrics."""
    value = value[0] if isinstance(value, tuple) else value
    return getattr(value, "total", value)


def _fresh(x: Any) -> tuple[list[Tensor], Any]:
    """Return leaves that need a gradient, and a copy of `x` that comes from them and that may be written over."""
    needed: list[Tensor] = []

    def copied(tensor: Tensor) -> Tensor:
        leaf = tensor.detach().clone()
        if not tensor.requires_grad:
            return leaf
        needed.append(leaf.requires_grad_())
        return leaf.clone()

    return needed, _map(copied, x)


def _map(f: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply `f` to the tensors of nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return f(value)
    if isinstance(value, Mapping):
        return {key: _map(f, v) for key, v in value.items()}
    if isinstance(value, tuple | list):
        mapped = [_map(f, v) for v in value]
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    return value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _map(lambda tensor: found.append(tensor) or tensor, value)
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Compute gradients, whatever the caller does, and leave the generators of torch and Python as they were."""
    state = random.getstate()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        try:
            yield
        finally:
            random.setstate(state)
