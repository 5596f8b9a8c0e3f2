"""A piece of work for kernels, and the ways to do it: what is called, what is checked, what it moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fds.kernels import choice

Outputs = tuple[Tensor, ...]

# Of ||out - ref|| / ||ref||, where a way rounds after each of a few operations; float32 may use tensor cores (TF32x3).
WITHIN = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


def by_inductor(f: Callable) -> Callable:
    """Return a function compiled as torch does by default, for the shapes that it is called with."""
    return torch.compile(f, dynamic=False)


def by_tracing(f: Callable) -> Callable:
    """Return a function that is traced and runs in torch's operators: what a CPU without a C++ compiler can do."""
    return torch.compile(f, backend="aot_eager", dynamic=False)


@attrs.frozen
class Setting:
    """Where and how large: a GPU and sizes as trained with, or a CPU and tiny ones (a smoke test)."""

    device: torch.device
    tiny: bool = False
    compiled: Callable[[Callable], Callable] = by_inductor
    done: frozenset[str] = frozenset()  # names of cases that are not done any more: nothing is prepared for them

    def size(self, full: int, tiny: int) -> int:
        """Return one of the two."""
        return tiny if self.tiny else full


@attrs.frozen
class Way:
    """A way to do some work: what is called with the inputs, and the tensors of its own that it trains."""

    name: str
    call: Callable[..., Any]
    params: tuple[Tensor, ...] = ()
    compared: int | None = None  # so many of its results; its parameters may be others


def ways_beside(setting: Setting, ours: Callable, torchs: Callable, *others: Way) -> list[Way]:
    """Return fds's way, torch's, torch's compiled, and others."""
    compiled = Way("torch.compile", setting.compiled(torchs))
    return [Way("fds", ours), Way("torch eager", torchs), compiled, *others]


@attrs.frozen
class Goals:
    """What is claimed of the first way: at least this much of the copy bandwidth, at most these ratios to others."""

    copy_at_least: float | None = None
    time_at_most: Mapping[str, float] = attrs.field(factory=dict)
    memory_at_most: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen(eq=False)
class Work:
    """Something to do in several ways, fds's first, then torch's own.

    `phase` is "forward", "backward", "both", or "update", which writes into its inputs. With dropout, calls get `p`.
    """

    family: str
    size: str
    phase: str
    inputs: Callable[[torch.Generator], dict[str, Tensor]]  # fresh ones; what is differentiated requires a gradient
    ways: Sequence[Way]
    oracle: Way
    moved_bytes: int = 0  # at the least, by the first way; 0 where arithmetic takes the time
    goals: Goals = Goals()
    dropout: float = 0.0
    oracle_dtype: torch.dtype = torch.float64
    hide_launches: bool = True  # time the device alone; False: back to back, as in a model
    flops: int = 0  # of matrix products, multiplications and additions; 0 where memory takes the time

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return f"{self.family}, {self.phase}"

    @property
    def unit(self) -> str:
        """What its phases share: they are checked as one."""
        return f"{self.family}, {self.size}"

    def arguments(self, inputs: Mapping[str, Tensor], *, p: float | None) -> dict[str, Any]:
        """Return what a way is called with."""
        return {**inputs, **({"p": p} if self.dropout and p is not None else {})}

    def prepare(
        self, way: Way, inputs: dict[str, Tensor], *, phase: str = "", p: float | None = None
    ) -> Callable[[], Outputs]:
        """Return a call that does the work once, and what it returns: outputs, then gradients."""
        given = self.arguments(inputs, p=p)
        phase = phase or self.phase
        forward = lambda: as_tuple(way.call(**given))
        if phase == "update":
            return lambda: (way.call(**given), tuple(inputs[k] for k in inputs if k in UPDATED))[1]
        if phase == "forward":
            return forward
        wanted = [x for x in (*inputs.values(), *way.params) if x.requires_grad]
        if phase == "backward":
            outs = forward()
            grads = [gradient(x, i) for i, x in enumerate(outs)]
            return lambda: torch.autograd.grad(outs, wanted, grads, retain_graph=True)
        grads = [gradient(x, i) for i, x in enumerate(forward())]

        def both() -> Outputs:
            outs = forward()
            return *(x.detach() for x in outs), *torch.autograd.grad(outs, wanted, grads)

        return both


UPDATED = ("param", "exp_avg", "exp_avg_sq", "out")  # what an update writes


def as_tuple(x: Any) -> Outputs:
    """Return the tensors that a way returned."""
    return (x,) if isinstance(x, Tensor) else tuple(x)


def gradient(x: Tensor, index: int) -> Tensor:
    """Return what arrives from above: ones for a loss, else random numbers, the same for every way."""
    if x.dim() == 0:
        return torch.ones_like(x)
    generator = torch.Generator(x.device).manual_seed(index)
    return torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype)


def raised(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return copies of inputs, floating ones in a wider dtype."""
    wider = lambda x: x.detach().to(dtype, copy=True).requires_grad_(x.requires_grad) if x.is_floating_point() else x
    return {name: wider(x) for name, x in inputs.items()}


def copies(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of inputs."""
    return {name: x.detach().clone().requires_grad_(x.requires_grad) for name, x in inputs.items()}


def distance(out: Tensor, ref: Tensor) -> float:
    """Return ||out - ref|| / ||ref||, NaN where either has one."""
    a, b = out.detach(), ref.detach()
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300))


def expected(work: Work, device: torch.device, *, seed: int) -> Outputs:
    """Return what every way should compute on the inputs of a seed: outputs and gradients in float64, or in float32."""
    inputs = work.inputs(torch.Generator(device).manual_seed(seed))
    phase = checked_phase(work, inputs, work.oracle)
    return tuple(x.detach() for x in work.prepare(work.oracle, raised(inputs, work.oracle_dtype), phase=phase, p=0.0)())


def checked_phase(work: Work, inputs: Mapping[str, Tensor], way: Way) -> str:
    """Return the phase that shows all that a way computes."""
    return "update" if work.phase == "update" else "both" if needs_gradient(inputs, way) else "forward"


def disagreement(work: Work, way: Way, device: torch.device, *, seed: int, oracle: Outputs | None = None) -> str:
    """Return what is wrong with what a way computes on fresh inputs, "" where it agrees with the oracle.

    Dropout is off for that. The first way is also compared with its own reference with dropout on: one mask.
    """
    oracle = expected(work, device, seed=seed) if oracle is None else oracle
    inputs = work.inputs(torch.Generator(device).manual_seed(seed))
    phase = checked_phase(work, inputs, way)
    read = () if phase == "update" else (*inputs.values(), *way.params)
    within = max((WITHIN[x.dtype] for x in read if x.dtype in WITHIN), default=0.0)
    wrong = differences(work.prepare(way, copies(inputs), phase=phase, p=0.0)(), oracle, within, way.compared)
    if work.dropout and way is work.ways[0] and not wrong:
        torch.manual_seed(seed)  # where the way draws its seed itself
        dropped = work.prepare(way, copies(inputs), phase=phase, p=work.dropout)()
        torch.manual_seed(seed)
        with choice.only("reference"):
            same = work.prepare(way, copies(inputs), phase=phase, p=work.dropout)()
        wrong = [f"with dropout, {text}" for text in differences(dropped, same, within)]
    return "; ".join(wrong)


def needs_gradient(inputs: Mapping[str, Tensor], way: Way) -> bool:
    """Tell whether there is anything to differentiate."""
    return any(x.requires_grad for x in (*inputs.values(), *way.params))


def differences(outs: Outputs, refs: Outputs, within: float, compared: int | None = None) -> list[str]:
    """Return which results lie further from what they should be than `within`, or than their dtype; NaN does."""
    found = []
    for i, (out, ref) in enumerate(zip(outs[:compared], refs[:compared], strict=True)):
        most = max(within, WITHIN.get(out.dtype, 0.0))
        if out.shape != ref.shape:
            found.append(f"result {i} has the shape {tuple(out.shape)}, not {tuple(ref.shape)}")
        elif not (apart := distance(out, ref)) <= most:
            found.append(f"result {i} {tuple(out.shape)} is {apart:.2g} apart, more than {most:.2g}")
    return found
