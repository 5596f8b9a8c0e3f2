"""Examples of layer_norm and rms_norm, and the check against float64."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fds.kernels.normalization import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from tests.kernels.accuracy import TOLERANCE, assert_near, random

KINDS = ["triton", "reference"]
NORMS = ["layer_norm", "rms_norm"]
LEAVES = ["x", "residual", "weight", "bias"]


def normalized(norm: str, of: dict[str, Tensor], *, returns_sum: bool = False, **modes: Any) -> tuple[Tensor, ...]:
    """Call the public function for the arguments at hand; return its outputs as a tuple."""
    if norm == "layer_norm":
        return add_layer_norm(**of, **modes) if returns_sum else (layer_norm(**of, **modes),)
    return add_rms_norm(**of, **modes) if returns_sum else (rms_norm(**of, **modes),)


def in_float64(norm: str, of: dict[str, Tensor], *, returns_sum: bool = False) -> tuple[Tensor, ...]:
    """Return the same by torch's own."""
    x, weight, bias = of["x"] + of["residual"] if "residual" in of else of["x"], of.get("weight"), of.get("bias")
    at = x.shape[-1:]
    y = F.layer_norm(x, at, weight, bias, 1e-5) if norm == "layer_norm" else F.rms_norm(x, at, weight, 1e-6)
    return (y, x) if returns_sum else (y,)


def example(
    norm: str,
    *shape: int,
    dtype: torch.dtype = torch.float32,
    among: str = "x weight bias",
    params: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Return arguments by name; weights lie around 1, so that they can be divided by."""
    made = {}
    for i, name in enumerate(LEAVES):
        if name in among.split() and (norm, name) != ("rms_norm", "bias"):
            is_param = name in ("weight", "bias")
            t = random(*(shape[-1:] if is_param else shape), seed=i)
            t = 1 + 0.5 * torch.tanh(t) if name == "weight" else t
            made[name] = t.to(params if is_param else dtype).requires_grad_()
    return made


def check(norm: str, of: dict[str, Tensor], *, returns_sum: bool = False, factor: float = 1, **modes: Any) -> None:
    """Hold outputs and every gradient of a call against float64."""
    dtype = of["x"].dtype
    outs = normalized(norm, of, returns_sum=returns_sum, **modes)
    douts = [random(*out.shape, seed=7 + i).to(out.dtype) for i, out in enumerate(outs)]
    grads = torch.autograd.grad(outs, list(of.values()), douts)
    of64 = {name: t.detach().double().requires_grad_() for name, t in of.items()}
    outs64 = in_float64(norm, of64, returns_sum=returns_sum)
    grads64 = torch.autograd.grad(outs64, list(of64.values()), [d.double() for d in douts])
    for out, out64 in zip(outs, outs64, strict=True):
        assert out.dtype == dtype
        assert_near(out, out64)
    for (name, leaf), grad, grad64 in zip(of.items(), grads, grads64, strict=True):
        assert grad.dtype == leaf.dtype, name
        # float32 gradients of weights are as near as float32 where backward reads what forward read: neither a rounded
        # sum nor a rounded output
        rounded = dtype if modes.get("invertible") or "residual" in of else grad.dtype
        if name in ("x", "residual"):
            most = max(grad64.norm(), terms_of_dx(norm, of64, douts[0]).norm())
            assert (grad.double() - grad64).norm() <= factor * TOLERANCE[rounded] * most
        else:
            assert_near(grad, grad64, rounded, factor=factor)


def terms_of_dx(norm: str, of64: dict[str, Tensor], dy: Tensor) -> Tensor:
    """Return what is subtracted from in dx: where few columns cancel, what is left has the rounding of that."""
    x = (of64["x"] + of64["residual"] if "residual" in of64 else of64["x"]).detach()
    x = x - x.mean(-1, keepdim=True) if norm == "layer_norm" else x
    weight = of64["weight"].detach() if "weight" in of64 else 1
    return dy.double() * weight / (x.square().mean(-1, keepdim=True).sqrt() + 1e-3)
