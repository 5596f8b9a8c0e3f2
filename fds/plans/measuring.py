"""`measure`: the time and memory of each layer of a loss, for partitions and simulations."""

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
from fds.plans.simulator import Costs


def _per_layer(_self: Any, field: attrs.Attribute, values: tuple) -> None:
    for i, value in enumerate(values):
        if not is_number(value) or not 0 <= value < math.inf:
            raise PlanError("a cost is negative or not finite", where=f"{field.name}[{i}]", got=repr(value))


def _numbers() -> Any:
    return attrs.field(converter=tuple, validator=_per_layer)


@attrs.frozen
class LayerCosts:
    """The cost of every layer for one microbatch; the criterion counts as part of the last layer.

    >>> costs = LayerCosts([1, 2, 4], [0, 2, 4], [1, 1, 3], [8, 8, 8], [4, 4, 4])
    >>> costs.by_stage([0, 1, 3]).forward, costs.seconds
    ((1.0, 6.0), (2, 5, 11))
    """

    forward: tuple[float, ...] = _numbers()  # seconds
    backward_input: tuple[float, ...] = _numbers()  # seconds; 0 where the input needs no gradient
    backward_weight: tuple[float, ...] = _numbers()  # seconds, in addition to backward_input
    activation_bytes: tuple[float, ...] = _numbers()  # saved from forward to backward, without parameters
    message_bytes: tuple[float, ...] = _numbers()  # of the layer's output

    def __attrs_post_init__(self) -> None:
        lengths = {field.name: len(getattr(self, field.name)) for field in attrs.fields(LayerCosts)}
        if len(set(lengths.values())) > 1:
            raise PlanError("the costs have different lengths", got=str(lengths), want="one number per layer")

    def __len__(self) -> int:
        return len(self.forward)

    @property
    def seconds(self) -> tuple[float, ...]:
        """Time of forward and backward of every layer."""
        return tuple(map(sum, zip(self.forward, self.backward_input, self.backward_weight, strict=True)))

    def by_stage(self, boundaries: Sequence[int]) -> Costs:
        """Return the costs of the stages made of the layers between neighbouring boundaries.

        A tensor that two neighbouring layers save (as output and as input) counts twice.
        Raises `PlanError`.
        """
        cuts = [operator.index(b) for b in boundaries]
        if cuts[:1] != [0] or cuts[-1] != len(self) or any(a >= b for a, b in itertools.pairwise(cuts)):
            raise PlanError(
                "not boundaries of these layers", got=repr(boundaries), want=f"increasing numbers from 0 to {len(self)}"
            )
        total = lambda values: tuple(math.fsum(values[a:b]) for a, b in itertools.pairwise(cuts))
        return Costs(
            forward=total(self.forward),
            backward_input=total(self.backward_input),
            backward_weight=total(self.backward_weight),
            activation_bytes=total(self.activation_bytes),
            message_bytes=tuple(self.message_bytes[b - 1] for b in cuts[1:]),
        )

    def to_json(self) -> str:
        """Return the costs as JSON, for `from_json`."""
        return json.dumps(attrs.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LayerCosts:
        """Return the value that `to_json` wrote. Raises `PlanError`."""
        names = {field.name for field in attrs.fields(cls)}
        try:
            read = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError("not JSON", got=repr(text)[:80], hint=str(error)) from None
        if not isinstance(read, dict) or read.keys() != names or not all(isinstance(v, list) for v in read.values()):
            raise PlanError("not layer costs", got=repr(text)[:80], want="lists " + ", ".join(sorted(names)))
        return cls(**read)


def measure(
    layers: Any, batch: Any, *, params: Mapping[str, Tensor] | None = None, axis: Any = None, repeats: int = 5
) -> LayerCosts:
    """Measure each layer of an `fds.Layers` loss on one microbatch, on the device of its tensors.

    Times the forward, the backward with respect to the input, and the backward with respect to input and parameters of
    each layer: medians of `repeats` runs after one warm-up run. Parameters and generators are not changed.

    Args:
        layers: the loss.
        batch: one microbatch, `(inputs, targets)`.
        params: parameters of the loss; None initializes them on the device of the batch.
        axis: if given, its first rank measures and all ranks return the same value; a collective.
        repeats: number of timed runs.

    Raises `PlanError`, and errors of a layer with a note that names the layer; the ranks of an axis raise together.
    """
    if axis is None:
        return _measure(layers, batch, params, repeats)
    answer, failure = None, None
    if axis.index == 0:
        try:
            answer = {"costs": _measure(layers, batch, params, repeats).to_json()}
        except Exception as error:  # first sent to the other ranks, which wait in the exchange
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
        raise PlanError("repeats is not positive", where="repeats", got=str(repeats), want="1 or more")
    if not len(layers):
        raise PlanError("there is no layer to measure", where="layers")
    x, targets = layers.split(batch)
    device = next((t.device for t in _tensors((x, targets, params))), torch.device("cpu"))
    buffers, rows = layers.buffers(), []
    with _measuring_mode(device):
        if params is None:
            params = {name: p.to(device) for name, p in layers.init(torch.zeros(2, dtype=torch.int64)).items()}
        layers.check(params)
        usable_params, targets = _map(lambda t: t.clone() if t.is_inference() else t, (params, targets))
        for i in range(len(layers)):
            criterion = (lambda out: layers.compare(out, targets)) if i == len(layers) - 1 else None
            try:
                layer = _Bound.of(layers.layer(i), usable_params, buffers, criterion)
                out, new, kept_bytes = layer.watch(x)
                if not _tensors(out):
                    raise PlanError(
                        "a layer returns no tensor",
                        got=type(out).__name__,
                        want="tensors, or tuples, lists and dicts of them",
                    )
                rows.append((*layer.seconds(x, device, repeats), kept_bytes, sum(map(_bytes, _tensors(out)))))
            except Exception as error:
                error.add_note(f"while layers[{i}] was measured")
                raise
            x, buffers = _map(lambda t: t.detach().requires_grad_(t.requires_grad), out), {**buffers, **new}
    return LayerCosts(*zip(*rows, strict=True))


@attrs.frozen(eq=False)
class _Bound:
    """One layer with all its arguments but the input."""

    layer: Callable
    params: dict[str, Tensor]  # of this layer: leaves; trained ones require gradients
    buffers: Mapping[str, Tensor]
    criterion: Callable | None  # of the last layer

    @classmethod
    def of(cls, layer: Any, params: Mapping[str, Tensor], buffers: Mapping, criterion: Callable | None) -> _Bound:
        """Select the parameters of this layer; those that its module froze do not require gradients."""
        frozen = getattr(layer.apply, "frozen", ())
        trains = lambda name, local: params[name].is_floating_point() and local not in frozen
        layer_params = {
            name: params[name].detach().requires_grad_(trains(name, local)) for name, local in layer.params.items()
        }
        return cls(layer, layer_params, buffers, criterion)

    def watch(self, x: Any) -> tuple[Any, dict[str, Tensor], int]:
        """Return the layer's output, its new buffers, and the bytes that it saves for backward."""
        kept: dict[int, int] = {}  # by address: a tensor saved twice counts once

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
        """Return the seconds of the forward, of the backward with respect to the input, and added by the parameters."""
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
    """Return the tensor to differentiate of a criterion's result: a scalar or `Mean`, alone or before metrics."""
    value = value[0] if isinstance(value, tuple) else value
    return getattr(value, "total", value)


def _fresh(x: Any) -> tuple[list[Tensor], Any]:
    """Return leaves that require gradients, and a copy of `x` computed from them, which may be overwritten."""
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
    tensors: list[Tensor] = []
    _map(lambda tensor: tensors.append(tensor) or tensor, value)
    return tensors


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def _measuring_mode(device: torch.device) -> Iterator[None]:
    """Enable gradients, and restore the generators of torch and Python at the end."""
    state = random.getstate()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        try:
            yield
        finally:
            random.setstate(state)
