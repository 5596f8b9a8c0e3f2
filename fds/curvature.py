"""How a loss curves: the greatest eigenvalue of its Hessian, by block of parameters, its sharpness and its trace.

Products of the Hessian with a vector are exact, by differentiating the gradient once more; the Hessian is never there.
A step has first derivatives alone, so these are functions of a loss and of whole parameters: `step.params(state)`.
Source: Yao et al. 2020, "PyHessian", arXiv:1912.07145; Hutchinson 1990, doi:10.1080/03610919008812866.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fds import kernels, loss as losses, random, tree
from fds.collectives import Axis
from fds.errors import FdsError, LossError, is_a, is_int, is_number
from fds.state import State

Vector = list[Tensor]


@attrs.frozen
class Eigenvalue:
    """The eigenvalue of greatest magnitude of a block of the Hessian.

    Attributes:
        value: with its sign; 0 for a block in which the loss is linear.
        normalized: as DeepSpeed has it: magnitude over the greatest magnitude of all blocks, and 1 for a value of 0.
        iterations: products with the Hessian that it took.
        converged: whether the last one changed it by less than `tol`, relatively; its error may be larger.
    """

    value: float
    normalized: float
    iterations: int
    converged: bool


def top_eigenvalue(
    loss: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    *,
    blocks: Sequence[str] = ("*",),
    max_iter: int = 100,
    tol: float = 1e-2,
    stability: float = 0.0,
    axis: Axis | None = None,
    key: int = 0,
) -> dict[str, Eigenvalue]:
    """Return, for every block of parameters, the eigenvalue of greatest magnitude of its part of the Hessian.

    By power iteration: it ends where the eigenvalue changes by less than `tol`. Two eigenvalues of opposite sign and
    nearly equal magnitude converge slowly, or not at all: `converged` says so.

    Args:
        loss: `(params, batch) -> ` what a loss returns: a scalar, `(scalar, metrics)` or a `Mean`.
        params: a tree of whole parameters; of a state, `step.params(state)`.
        batch: of this rank.
        blocks: patterns of names, as `"transformer.h.0.*"`; each is a block.
        max_iter: products with the Hessian at most, for each block.
        tol: relative change at which it ends.
        stability: added to the norm that a vector is divided by.
        axis: data ranks that share the loss; all of them call this, with the same parameters, each with its own batch.
        key: seed of the first vector, and of what the loss draws.

    Raises `FdsError` for other values of these and patterns that match nothing, `LossError` for a loss that cannot be
    differentiated twice.
    """
    _check(axis=axis, key=key)
    _check_power(max_iter, tol=tol, stability=stability)
    if isinstance(blocks, str) or not all(isinstance(pattern, str) for pattern in blocks) or not blocks:
        raise FdsError("not blocks", where="blocks", got=repr(blocks)[:80], want='["layers.0.*", "layers.1.*"]')
    results: dict[str, tuple[float, int, bool]] = {}
    hessian = _Hessian.of(loss, params, batch, axis, key)
    for block in blocks:
        names = tree.match([block], list(hessian.leaves), what="blocks")
        results[block] = hessian.power([n for n in hessian.leaves if n in names], max_iter, tol, stability)
    most = max(abs(value) for value, _, _ in results.values())
    return {
        block: Eigenvalue(value, abs(value) / most if value else 1.0, iterations, converged)
        for block, (value, iterations, converged) in results.items()
    }


def sharpness(
    loss: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    *,
    max_iter: int = 100,
    tol: float = 1e-3,
    axis: Axis | None = None,
    key: int = 0,
) -> float:
    """Return the greatest eigenvalue of the Hessian of all parameters, which may be negative.

    By Lanczos' method, which ends where the residual is at most `tol` of the value: then an eigenvalue is that near.
    Gradient descent is stable on a quadratic loss up to a learning rate of 2 / sharpness. Arguments and errors are
    those of `top_eigenvalue`; where `max_iter` products are not enough a `UserWarning` says how near the value is.
    """
    _check(axis=axis, key=key)
    _check_power(max_iter, tol=tol)
    value, residual = _Hessian.of(loss, params, batch, axis, key).greatest(max_iter, tol)
    if residual > tol * abs(value):
        text = f"an eigenvalue is within {residual:.2g} of {value:.6g}"
        warnings.warn(f"sharpness: after {max_iter} products {text}, and tol is {tol:g} of it", stacklevel=2)
    return value


def trace(
    loss: Callable[[Any, Any], Any],
    params: Any,
    batch: Any,
    *,
    num_samples: int = 32,
    axis: Axis | None = None,
    key: int = 0,
) -> tuple[float, float]:
    """Return an estimate of the trace of the Hessian, and its standard error; by Hutchinson's method.

    A sample is v'Hv for a vector of random signs, whose mean is the trace; exact where the Hessian is diagonal. Other
    arguments and errors are those of `top_eigenvalue`.
    """
    _check(axis=axis, key=key)
    if not is_int(num_samples, 2):
        raise FdsError("not a number of samples", where="num_samples", got=repr(num_samples)[:80], want="an int >= 2")
    hessian = _Hessian.of(loss, params, batch, axis, key)
    names = list(hessian.leaves)
    values: list[float] = []
    with random.seeded(random.key(key), "trace"):
        for _ in range(num_samples):
            v = [torch.randn(x.shape).sign().to(x.device, x.dtype) for x in hessian.leaves.values()]
            values.append(_inner(hessian.times(names, v), v))
    samples = torch.tensor(values, dtype=torch.float64)
    return float(samples.mean()), float(samples.std() / math.sqrt(num_samples))


@attrs.frozen(eq=False)
class _Hessian:
    """The Hessian of a loss at some parameters, by its products."""

    leaves: dict[str, Tensor]  # that are differentiated
    gradients: dict[str, Tensor]  # of this rank's total, with a graph
    weight: float  # of all ranks
    axis: Axis | None
    key: int

    @classmethod
    def of(cls, loss: Callable[[Any, Any], Any], params: Any, batch: Any, axis: Axis | None, key: int) -> _Hessian:
        """Run the loss and differentiate it once. Raises `LossError`."""
        if not (callable(loss) or is_a(loss, losses.Buffered)):
            raise FdsError("not a loss", where="loss", got=repr(loss)[:80], want="loss_fn(params, batch)")
        if is_a(params, State):
            raise FdsError("not parameters", where="params", got="a State", want="whole parameters: step.params(state)")
        flat, build = tree.flatten(params)
        paths = tree.paths(params)
        if not flat or not all(isinstance(x, Tensor) for x in flat):
            raise FdsError("not parameters", where="params", got=repr(params)[:80], want="a tree of tensors")
        inputs = [x.detach().requires_grad_(tree.is_float(x)) for x in flat]
        leaves = {name: x for name, x in zip(paths, inputs, strict=True) if x.requires_grad}
        if is_a(loss, losses.Buffered):
            loss_fn, buffers = loss.loss_fn, loss.buffers
            loss = lambda params, batch: loss_fn(params, batch, buffers)
        # attention by products of matrices and references have second derivatives; kernels have not
        with (
            torch.enable_grad(),
            sdpa_kernel(SDPBackend.MATH),
            kernels.only("reference"),
            random.seeded(random.key(key), "loss"),
        ):
            value = loss(build(inputs), batch)
            value = value[0] if isinstance(value, tuple) else value
            total, weight = (value.total, value.weight) if is_a(value, losses.Mean) else (value, 1.0)
            if not isinstance(total, Tensor) or total.numel() != 1 or not total.requires_grad:
                raise LossError(
                    "not a loss that can be differentiated", got=repr(value)[:80], want="a scalar, or a Mean"
                )
            gradients = torch.autograd.grad(
                total.sum(), list(leaves.values()), create_graph=True, materialize_grads=True
            )
        weight = torch.as_tensor(weight, dtype=torch.float64)
        sums = float(weight if axis is None else axis.all_reduce(weight.reshape(1).to(axis.device)))
        return cls(leaves, dict(zip(leaves, gradients, strict=True)), sums, axis, key)

    def times(self, names: Sequence[str], v: Vector) -> Vector:
        """Return the product of the block of these parameters with a vector, averaged over the ranks."""
        pairs = [(g, x) for name, x in zip(names, v, strict=True) if (g := self.gradients[name]).requires_grad]
        inputs = [self.leaves[name] for name in names]
        if not pairs:  # the gradient is a constant: the loss is linear
            products = [torch.zeros_like(x) for x in inputs]
        else:
            try:
                products = torch.autograd.grad(
                    [g for g, _ in pairs], inputs, [x for _, x in pairs], retain_graph=True, materialize_grads=True
                )
            except RuntimeError as error:
                raise LossError(
                    "this loss has no second derivatives",
                    got=str(error)[:200],
                    want="operators of torch that can be differentiated twice",
                ) from error
        if self.axis is not None:
            products = [self.axis.all_reduce(x.contiguous()) for x in products]
        return [x / self.weight for x in products]

    def begin(self, names: Sequence[str], stability: float = 0.0) -> Vector:
        """Return a random vector of norm 1 for the block of these parameters. Raises `FdsError` where it has none."""
        if not names:
            raise FdsError("a block has no floating-point parameters", where="blocks", want="trained parameters")
        with random.seeded(random.key(self.key), "vector"):
            return _normal([torch.randn(self.leaves[n].shape).to(self.leaves[n]) for n in names], stability)

    def greatest(self, max_iter: int, tol: float) -> tuple[float, float]:
        """Return the greatest eigenvalue, and the norm of the residual: an eigenvalue is at most that far away.

        Vectors are not made orthogonal again, so that two are in memory: an eigenvalue that was found may be found
        twice, which changes neither.

        Source: Paige 1976, doi:10.1093/imamat/18.3.341.
        """
        names = list(self.leaves)
        v, last, beta = self.begin(names), None, 0.0
        diagonal, beside = list[float](), list[float]()
        while True:
            u = [torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in self.times(names, v)]
            diagonal.append(alpha := _inner(u, v))
            u = [x - alpha * y for x, y in zip(u, v, strict=True)]
            u = u if last is None else [x - beta * y for x, y in zip(u, last, strict=True)]
            values, vectors = torch.linalg.eigh(_tridiagonal(diagonal, beside))
            beta = math.sqrt(_inner(u, u))
            value, residual = float(values[-1]), beta * abs(float(vectors[-1, -1]))
            if residual <= tol * abs(value) or len(diagonal) == max_iter:
                return value, residual
            beside.append(beta)
            last, v = v, [x / beta for x in u]

    def power(self, names: Sequence[str], max_iter: int, tol: float, stability: float) -> tuple[float, int, bool]:
        """Return the eigenvalue of greatest magnitude of a block, and how it was found."""
        v = self.begin(names, stability)
        value, before, count = math.nan, math.nan, 0
        settled = lambda: value == 0 or abs(value - before) < tol * abs(value)  # not after one product
        while count < max_iter and not settled():
            before = value
            product = [torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in self.times(names, v)]
            value, v, count = _inner(product, v), _normal(product, stability), count + 1
        return value, count, settled()


def _tridiagonal(diagonal: list[float], beside: list[float]) -> Tensor:
    """Return a symmetric matrix, float64, of its diagonal and the one beside it."""
    upper = torch.diag(torch.tensor(beside, dtype=torch.float64, device="cpu"), 1)
    return torch.diag(torch.tensor(diagonal, dtype=torch.float64, device="cpu")) + upper + upper.T


def _inner(a: Vector, b: Vector) -> float:
    return float(sum(((x.double() * y.double()).sum() for x, y in zip(a, b, strict=True)), torch.zeros(())))


def _normal(v: Vector, stability: float) -> Vector:
    norm = math.sqrt(_inner(v, v)) + stability
    return [x / norm if norm else x for x in v]


def _check(axis: Any, key: Any) -> None:
    if axis is not None and not is_a(axis, Axis):
        raise FdsError("not an axis", where="axis", got=repr(axis)[:80], want='mesh["dp"], or None')
    if not is_int(key):
        raise FdsError("not a seed", where="key", got=repr(key)[:80], want="an int")


def _check_power(max_iter: Any, **small: Any) -> None:
    if not is_int(max_iter, 1):
        raise FdsError("not a number of iterations", where="max_iter", got=repr(max_iter), want="an int >= 1")
    for name, value in small.items():
        if not is_number(value) or not 0 <= value < math.inf:
            raise FdsError("not a small number", where=name, got=repr(value)[:80], want="a number >= 0")
