"""Pieces of the backward kernels of normalisation: parameters, x_hat, and the two means of a row."""

from __future__ import annotations

from fds.kernels.language import jit, tl


@jit
def parameter(ptr, column, inside, absent):
    """Return columns of a weight or bias in float32, or `absent` where there is none."""
    if ptr is None:
        return absent
    else:  # noqa: RET505  (Triton would compile code after the if)
        return tl.load(ptr + column, mask=inside, other=0, eviction_policy="evict_last").to(tl.float32)


@jit
def unscaled(y, weight, bias, n, WEIGHT: tl.constexpr, BIAS: tl.constexpr):
    """Recover x_hat from y: 0 where the weight is 0, NaN where y is NaN."""
    x_hat = y - bias if BIAS else y
    if WEIGHT:
        bound = tl.sqrt(n.to(tl.float32))
        x_hat = x_hat / tl.where(weight == 0, 1, weight)
        x_hat = tl.where(x_hat > bound, bound, tl.where(x_hat < -bound, -bound, x_hat))
        x_hat = tl.where(weight == 0, 0, x_hat)
    return x_hat


@jit
def x_hat_of(
    x, mean, r, weight, bias, n,
    CENTERED: tl.constexpr, INVERTIBLE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):
    """Return x_hat, from x or, with INVERTIBLE, from y."""
    if INVERTIBLE:
        return unscaled(x, weight, bias, n, WEIGHT, BIAS)
    elif CENTERED:  # noqa: RET505  (Triton would compile code after the if)
        return (x - mean) * r
    else:
        return x * r


@jit
def row_means(g, product, n, CENTERED: tl.constexpr):
    """Return the means of g (0 unless centered) and of g * x_hat over the last axis, for the barriers of one sum."""
    if CENTERED:
        first, second = tl.split(tl.sum(tl.join(g, product), axis=1) / n)
    else:
        second = tl.sum(product, axis=1) / n
        first = tl.zeros_like(second)
    return first, second
