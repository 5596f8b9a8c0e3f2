"""The operators of a forward pass, each by a rule that computes a row without regard to others, or refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fds.errors import LossError
from fds.transforms.batch_invariant import products
from fds.tree import is_sequence

_torch: Any = torch
aten: Any = torch.ops.aten
BLOCK = 2**14  # elements of a function that is computed at a time: torch divides none so small over threads

# Arithmetic that IEEE 754 rounds in one way, wherever an element stands.
_EXACT = """abs bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min div eq floor
    floor_divide fmod ge gt isfinite isinf isnan le leaky_relu logical_and logical_not logical_or logical_xor lt
    masked_fill maximum minimum mul nan_to_num ne neg reciprocal relu remainder round rsqrt sgn sign signbit sqrt
    threshold trunc where"""
# What moves, chooses, counts or draws, makes one number of all rows, or computes each row of its last dim by itself.
_ROWWISE = """_local_scalar_dense _to_copy _unsafe_index _unsafe_view all amax amin aminmax any arange argmax argmin
    argsort as_strided bernoulli bucketize cat clone constant_pad_nd copy cummax cummin cumprod cumsum detach embedding
    empty empty_like empty_strided equal expand eye fill flip full full_like gather im2col index index_copy
    index_fill index_put index_select isin lift lift_fresh linspace masked_scatter masked_select max
    max_pool2d_with_indices median min mse_loss native_dropout native_layer_norm new_empty new_empty_strided
    new_full new_ones new_zeros nll_loss2d_forward nll_loss_forward nonzero normal ones ones_like pixel_shuffle rand
    rand_like randint randn randn_like repeat repeat_interleave resize roll rot90 scalar_tensor scatter searchsorted
    select_scatter slice_scatter smooth_l1_loss sort split split_with_sizes squeeze stack swapaxes t topk transpose
    tril triu unbind uniform unsafe_split unsafe_split_with_sizes unsqueeze zero zeros zeros_like"""
_POOLS = ("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "adaptive_max_pool3d", "avg_pool2d",
    "avg_pool3d", "max_pool3d_with_indices")  # fmt: skip
PLAIN = frozenset([*_EXACT.split(), *_ROWWISE.split()])


class Invariant(TorchDispatchMode):
    """Runs every operator so that what it computes of a row has the same bits, whatever other rows there are."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator. Raises `LossError` for one of which nothing is known."""
        kwargs = kwargs or {}
        space, _, name = func._schema.name.partition("::")
        base = name.removesuffix("_") if not name.startswith("__") else name
        if space != "aten" or func.is_view:
            return func(*args, **kwargs)
        tensors: list[Tensor] = [x for x in _flat(args) if isinstance(x, Tensor)]
        rule = RULES.get(base)
        if rule is not None and tensors[0].is_floating_point():
            return _written(name, base, args, kwargs, lambda a, k: rule(*a, **k))
        if base in PLAIN or not any(x.is_floating_point() for x in tensors):
            return func(*args, **kwargs)
        if base in ("add", "sub", "rsub") and kwargs.get("alpha", 1) == 1 and len(args) == 2:
            return func(*args, **kwargs)
        if torch.Tag.pointwise in func.tags:
            whole = getattr(aten, base, None)
            if tensors[0].device.type != "cpu" or whole is None:
                return func(*args, **kwargs)
            return _written(name, base, args, kwargs, lambda a, k: _in_blocks(whole, a, k))
        raise LossError(
            "batch_invariant: nothing is known of how this operator computes a row",
            where=f"aten.{name}",
            got=", ".join(str(tuple(x.shape)) for x in tensors[:4]),
            want="matrix products, attention, norms, softmax, sums, convolutions and elementwise functions",
            hint="torch.backends.mha.set_fastpath_enabled(False)" * ("_encoder_layer" in name or "multi_head" in name),
        )


def _flat(args: Sequence[Any]) -> list[Any]:
    flat: list[Any] = []
    for x in args:
        flat += _flat(x) if is_sequence(x) else [x]
    return flat


def _plain(x: Any) -> Any:
    """Return the values of a parameter that is gathered on use, and anything else as it is."""
    if is_sequence(x):
        return [*map(_plain, x)]
    return x.read() if getattr(x, "gathered_on_use", False) else x


def _written(
    name: str, base: str, args: Sequence[Any], kwargs: dict[str, Any], rule: Callable[[list[Any], dict[str, Any]], Any]
) -> Any:
    """Return what a rule makes, written where the operator writes it: over its first argument, or to `out`."""
    kwargs = {key: _plain(x) for key, x in kwargs.items()}
    out = kwargs.pop("out", None)
    made = rule([_plain(x) for x in args], kwargs)
    if name != base and isinstance(made, Tensor):
        return args[0].copy_(made)
    return made if out is None else out.copy_(made)


def _in_blocks(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Return an elementwise function, computed in blocks of one size: torch computes ends of others by other code."""
    at = [i for i, x in enumerate(args) if isinstance(x, Tensor) and x.dim()]
    if not at:
        at = [i for i, x in enumerate(args) if isinstance(x, Tensor)][:1]
    several: list[Tensor] = _torch.broadcast_tensors(*(args[i] for i in at))
    shape, numel = several[0].shape, several[0].numel()
    size = max(1, -(-numel // BLOCK)) * BLOCK
    flat = [
        torch.nn.functional.pad(x.reshape(-1), (0, size - numel), value=1.0 if x.is_floating_point() else 0)
        for x in several
    ]
    parts = list[Tensor]()
    for start in range(0, size, BLOCK):
        arguments = list(args)
        for i, x in zip(at, flat, strict=True):
            arguments[i] = x[start : start + BLOCK]
        parts.append(function(*arguments, **kwargs))
    return torch.cat(parts)[:numel].view(shape)


# --- Products


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _with(bias, products.mm(a, b), beta, alpha)


def _baddbmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return _with(bias, products.bmm(a, b), beta, alpha)


def _with(bias: Tensor, y: Tensor, beta: float, alpha: float) -> Tensor:
    y = y if alpha == 1 else y.mul(alpha)
    return y.add(bias if beta == 1 else bias.mul(beta)) if beta else y


def _mv(a: Tensor, x: Tensor) -> Tensor:
    return products.mm(a, x[:, None])[:, 0]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return products.mm(a[None], b[:, None])[0, 0]


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """Return a convolution of one row after another."""
    if not len(x):
        return aten.convolution(x, weight, bias, *rest)
    return torch.cat([aten.convolution(x[i : i + 1].contiguous(), weight, bias, *rest) for i in range(len(x))])


def _pool(function: Any) -> Callable[..., Any]:
    """Return the rule of windows, of which torch goes through those of one row after another, laid out as a row is."""

    def rule(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(x.contiguous(), *args, **kwargs)

    return rule


def _hardswish(x: Tensor) -> Tensor:
    return _in_blocks(aten.hardswish, [x], {})


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    a, gate = _wide(x).chunk(2, dim)
    return (a * _in_blocks(aten.sigmoid, [gate], {})).to(x.dtype)


def _log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    e = _in_blocks(aten.exp, [-x.abs()], {})  # as torch's kernel keeps it for backward
    return x.clamp(max=0) - _in_blocks(aten.log1p, [e], {}), e


# --- Sums


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize == 2 else x


def _last(x: Tensor, dims: Any) -> tuple[Tensor, list[int]]:
    """Return a tensor (..., n) with these dims, all if there are none, as its last one, and their numbers."""
    dims = [dims] if isinstance(dims, int) else list(dims or range(x.dim()))
    dims = [d % max(1, x.dim()) for d in dims]
    kept = [d for d in range(x.dim()) if d not in dims]
    shape = [x.shape[d] for d in kept]
    return x.permute(*kept, *dims).reshape(*shape, -1) if x.dim() else x.reshape(1), dims


def _shaped(y: Tensor, x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    return y.reshape([1 if d in dims else n for d, n in enumerate(x.shape)]) if keepdim else y


def _sum(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    last, dims = _last(x, dim)
    return _shaped(products.total(_wide(last.to(dtype or x.dtype))), x, dims, keepdim).to(dtype or x.dtype)


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    last, dims = _last(x, dim)
    mean = products.total(_wide(last.to(dtype or x.dtype))) / last.shape[-1]
    return _shaped(mean, x, dims, keepdim).to(dtype or x.dtype)


def _var_mean(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    last, dims = _last(x, dim)
    last, n = _wide(last), last.shape[-1]
    mean = products.total(last) / n
    var = products.total((last - mean[..., None]).square()) / max(0, n - (1 if correction is None else correction))
    return _shaped(var, x, dims, keepdim).to(x.dtype), _shaped(mean, x, dims, keepdim).to(x.dtype)


def _var(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _std(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    return _var(x, dim, correction=correction, keepdim=keepdim).sqrt()


def _norm(x: Tensor, order: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    last, dims = _last(x, dim)
    last = _wide(last.to(dtype or x.dtype)).abs()
    if order == 2:
        norm = products.total(last.square()).sqrt()
    elif order == 1:
        norm = products.total(last)
    elif order == math.inf:
        norm = last.amax(-1)
    else:
        raise LossError("batch_invariant: no such norm", where="aten.linalg_vector_norm", got=f"ord={order}")
    return _shaped(norm, x, dims, keepdim).to(dtype or x.dtype)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    wide = _wide(x)
    rstd = _mean(wide.square(), dims, True).add(torch.finfo(x.dtype).eps if eps is None else eps).rsqrt()
    y = wide * rstd
    return (y if weight is None else y * weight).to(x.dtype), rstd


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, channels: int, size: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = _wide(x).reshape(n, groups, -1)
    var, mean = _var_mean(rows, 2, correction=0)
    rstd = (var + eps).rsqrt()
    y = ((rows - mean[..., None]) * rstd[..., None]).reshape(n, channels, size)
    y = _affine(y, weight, bias).reshape(x.shape)
    return y.to(x.dtype), mean.to(x.dtype), rstd.to(x.dtype)


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if training and mean is None and len(x) == 1:  # instance norm, whose rows are channels here; or one row alone
        rows = _wide(x).reshape(1, x.shape[1], -1)
        var, mean = _var_mean(rows, 2, correction=0)
        rstd = (var + eps).rsqrt()
        y = _affine((rows - mean[..., None]) * rstd[..., None], weight, bias)
        return y.reshape(x.shape).to(x.dtype), mean[0], rstd[0]
    if training or mean is None or var is None:
        raise LossError(
            "batch_invariant: batch norm in training, and tracked instance norm, computes a row by all others",
            where="aten.native_batch_norm",
            got="statistics of the batch",
            want="an evaluation, or layer, group, RMS or instance norm, this without track_running_stats",
        )
    rows = _wide(x).reshape(x.shape[0], x.shape[1], -1)
    rows = (rows - mean[:, None]) * (var + eps).rsqrt()[:, None]
    return _affine(rows, weight, bias).reshape(x.shape).to(x.dtype), x.new_empty(0), x.new_empty(0)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return x (n, channels, size) times a weight plus a bias, (channels,)."""
    x = x if weight is None else x * weight[:, None]
    return x if bias is None else x + bias[:, None]


# --- Softmax and attention


def _exponentials(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return exp(x - m) and its sum (..., 1) along the last dim, and the largest m (..., 1), of rows of -inf 0."""
    most = x.amax(-1, keepdim=True)
    most = torch.where(most == -math.inf, 0.0, most)
    e = _in_blocks(aten.exp, [x - most], {})
    return e, products.total(e)[..., None], most


def _softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    e, s, _ = _exponentials(_wide(x).transpose(dim, -1).contiguous())
    return (e / s).transpose(dim, -1).to(torch.float32 if half_to_float else x.dtype)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    e, s, _ = _exponentials(_wide(x if dtype is None else x.to(dtype)).transpose(dim, -1).contiguous())
    return (e / torch.where(s == 0, 1.0, s)).transpose(dim, -1).to(dtype or x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    rows = _wide(x).transpose(dim, -1).contiguous()
    _, s, most = _exponentials(rows)
    y = rows - most - _in_blocks(aten.log, [s], {})
    return y.transpose(dim, -1).to(torch.float32 if half_to_float else x.dtype)


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    last, dims = _last(_wide(x), dim)
    _, s, most = _exponentials(last)
    return _shaped((most + _in_blocks(aten.log, [s], {}))[..., 0], x, dims, keepdim).to(x.dtype)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention (B, H, T, D) and the log of sums of exponentials (B, H, T), as torch's kernel for CPUs does."""
    assert not dropout_p  # with dropout torch takes products and softmax by itself
    (b, h, t, d), s = q.shape, k.shape[2]
    scores = products.bmm(_wide(q).flatten(0, 1), _wide(k).flatten(0, 1).transpose(1, 2)).view(b, h, t, s)
    scores = scores * (1 / math.sqrt(d) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(t, s, dtype=torch.bool, device=q.device).tril().logical_not(), -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype is torch.bool else scores + attn_mask
    e, sums, most = _exponentials(scores)
    weights = e / torch.where(sums == 0, 1.0, sums)
    out = products.bmm(weights.view(b * h, t, s), _wide(v).flatten(0, 1)).view(b, h, t, -1).to(q.dtype)
    # as torch's kernel lays it out: (B, T, H, D) in memory
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, (most + _in_blocks(aten.log, [sums], {}))[..., 0]


RULES: dict[str, Callable[..., Any]] = {
    "mm": products.mm,
    "bmm": products.bmm,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "mv": _mv,
    "dot": _dot,
    "convolution": _convolution,
    **{name: _pool(getattr(aten, name)) for name in _POOLS},
    "glu": _glu,
    "hardswish": _hardswish,
    "log_sigmoid_forward": _log_sigmoid,
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "var_mean": _var_mean,
    "std": _std,
    "linalg_vector_norm": _norm,
    "_fused_rms_norm": _rms_norm,
    "native_group_norm": _group_norm,
    "native_batch_norm": _batch_norm,
    "_softmax": _softmax,
    "_safe_softmax": _safe_softmax,
    "_log_softmax": _log_softmax,
    "logsumexp": _logsumexp,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
}
