"""GELU of a number and its derivative, from the tail of a distribution, which is small and positive on both sides.

With a = |z|, T(a) the probability beyond a, and t(a) = -T'(a) the density there::

    gelu(z) = max(z, 0) - a * T(a)        gelu'(z) = g where z <= 0, 1 - g elsewhere        g = T(a) - a * t(a)
    "tanh":  T(a) = e / (1 + e)        e = exp(-2 * u(a))        t(a) = T(a) * (1 - T(a)) * 2 * u'(a)
    "none":  T(a) = exp(-a^2 / 2) * R(a)        t(a) = exp(-a^2 / 2) / sqrt(2 * pi)

R(a) = erfcx(a / sqrt(2)) / 2 falls from 1/2 as 1 / a does, and so does s = (1 + 0.7 * a + 0.16 * a^2)^(-1/2): a
polynomial of degree 7 in s, without a constant, is R to 1.5e-7 of it everywhere (equal ripples: Remez's exchange on
[0, 14], beyond which T is 0 in float32; 0.7 and 0.16 are the best of a grid). No cancellation: a negative z keeps its
digits, where 1 + erf(z / sqrt(2)) loses them.
With v = 2^-24 and x the exponent, a^2 / 2 or 2 * u(a), T is right to (20 + 3 * x) * v of it: 2.5 by the fit, 4 by the
square root and 4 by exp2 as a GPU has them, 3 * x by x itself, whose rounding e^-x magnifies, the rest by products.
Of the functions that a GPU has, exp2 and 1 / sqrt take one instruction each, exp five, a division eight, erf about 25.
Source: Abramowitz and Stegun 1964, section 7.1.26, where s is 1 / (1 + 0.33 * a) and 5 terms leave 1.5e-7 of 1.
"""

from __future__ import annotations

from fds.kernels.language import jit, tl


@jit
def _end(z, END: tl.constexpr):
    """Return |z| up to END, beyond which T is 0; NaN where z is."""
    return tl.minimum(tl.abs(z), END, tl.PropagateNan.ALL)


@jit
def tail(z, TANH: tl.constexpr):
    """Return a, T(a) and t(a) of float32."""
    if TANH:
        a = _end(z, 12.0)
        square = a * a
        e = tl.exp2(-a * (2.302208198 + 0.1029432397 * square))  # 2 * sqrt(2 / pi) * log2(e), and 0.044715 of it
        root = tl.rsqrt(1 + e)
        probability = e * root * root
        density = probability * (1 - probability) * (1.5957691216057308 + 0.2140644489 * square)
    else:
        a = _end(z, 16.0)
        e = tl.exp2(-0.7213475204444817 * a * a)
        s = tl.rsqrt(1 + a * (0.7 + 0.16 * a))
        r = 0.05440109196 + s * (-0.06331123225 + s * 0.02883656577)
        r = 0.1595799035 + s * (0.1395250395 + s * (0.1166688719 + s * (0.06429978876 + s * r)))
        probability = e * (s * r)
        density = e * 0.3989422804014327
    return a, probability, density


@jit
def gelu(z, a, probability):
    """Return the GELU of z, given two results of `tail`."""
    return tl.maximum(z, 0.0) - a * probability


@jit
def derivative(z, a, probability, density):
    """Return the derivative at z, given the results of `tail`."""
    g = probability - a * density
    return tl.where(z > 0, 1 - g, g)
