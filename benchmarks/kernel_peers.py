"""The best known kernels elsewhere: each a way to do the same work, which says so where it is not installed.

What writes over its inputs or over the gradients that it is given stays out (Liger's SwiGLU and cross-entropy): it
would do the next contender's work, and a copy before each call would be unfair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from benchmarks.kernel_works import Setting, Way

EPS = 1e-5


NOT_INSTALLED = "not installed"


def peers(setting: Setting, family: str) -> list[Way]:
    """Return the peers of a family; none without a GPU, which all of them need.

    What cannot be imported says why when it is called, so that it is told among what was not timed.
    """
    known = KNOWN.get(family, ()) if setting.device.type == "cuda" else ()
    return [Way(name, _found(module, attribute, adapt)) for name, module, attribute, adapt in known]


def _found(module: str, attribute: str, adapt: Callable) -> Callable:
    try:
        return adapt(getattr(import_module(module), attribute))
    except Exception as error:  # not there, or not for this machine
        top = module.partition(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and error.name == top
        why = NOT_INSTALLED if missing else f"cannot be imported: {type(error).__name__}: {error}"

    def refuse(*_: Any, **__: Any) -> Any:
        raise ImportError(why)

    return refuse


def _flash(f: Callable) -> Callable:
    heads_second = lambda x: x.transpose(1, 2)
    return lambda q, k, v, p=0.0: heads_second(f(*map(heads_second, (q, k, v)), dropout_p=p, causal=True))


def _linear_loss(f: Callable, **more: Any) -> Callable:
    return lambda hidden, weight, targets: f(hidden, weight, targets, reduction="mean", **more)


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
    "cross_entropy": (("quack", "quack", "cross_entropy", lambda f: lambda logits, targets: f(logits, targets)),),
    "linear_cross_entropy": (
        ("Liger", LIGER, "liger_fused_linear_cross_entropy", _linear_loss),
        (
            "Liger, float32 sums",  # as fds adds up the gradient of the weight
            LIGER,
            "liger_fused_linear_cross_entropy",
            functools.partial(_linear_loss, accum_dtype=torch.float32),
        ),
    ),
    "flash_attention": (("flash-attn", "flash_attn", "flash_attn_func", _flash),),
}
