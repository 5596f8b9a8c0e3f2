"""The best known kernels elsewhere, where they are installed: each a way to do the same work, else nothing.

What writes over its inputs or over the gradients that it is given stays out (Liger's SwiGLU and cross-entropy): it
would do the next contender's work, and a copy before each call would be unfair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.kernel_works import Setting, Way

EPS = 1e-5


def peers(setting: Setting, family: str) -> list[Way]:
    """Return the installed peers of a family; none without a GPU, which all of them need."""
    found = []
    for name, module, attribute, adapt in KNOWN.get(family, ()) if setting.device.type == "cuda" else ():
        try:
            found.append(Way(name, adapt(getattr(import_module(module), attribute))))
        except Exception:  # not installed, or not for this machine
            continue
    return found


def _flash(f: Callable) -> Callable:
    heads_second = lambda x: x.transpose(1, 2)
    return lambda q, k, v, p=0.0: heads_second(f(*map(heads_second, (q, k, v)), dropout_p=p, causal=True))


def _linear_loss(f: Callable) -> Callable:
    return lambda hidden, weight, targets: f(hidden, weight, targets, reduction="mean")


def _normal(f: Callable, **more: Any) -> Callable:
    return functools.partial(lambda x, weight, bias: f(x, weight, bias, EPS, **more))


LIGER = "liger_kernel.transformers.functional"
# family -> (name, module, attribute, how to call it as fds's is called)
KNOWN: dict[str, tuple[tuple[str, str, str, Callable], ...]] = {
    "layer_norm": (
        ("Liger", LIGER, "liger_layer_norm", _normal),
        (
            "apex",
            "apex.normalization.fused_layer_norm",
            "fused_layer_norm_affine",
            lambda f: lambda x, weight, bias: f(x, weight, bias, tuple(weight.shape), EPS),
        ),
    ),
    "rms_norm": (
        ("Liger", LIGER, "liger_rms_norm", lambda f: lambda x, weight: f(x, weight, EPS, in_place=False)),
        ("quack", "quack", "rmsnorm", lambda f: lambda x, weight: f(x, weight, eps=EPS)),
        (
            "apex",
            "apex.normalization.fused_layer_norm",
            "fused_rms_norm_affine",
            lambda f: lambda x, weight: f(x, weight, tuple(weight.shape), EPS),
        ),
    ),
    "linear_cross_entropy": (("Liger", LIGER, "liger_fused_linear_cross_entropy", _linear_loss),),
    "flash_attention": (("flash-attn", "flash_attn", "flash_attn_func", _flash),),
}
